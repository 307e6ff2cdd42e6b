#!/usr/bin/env python3
"""Compares `/openapi.json` with a real `unicorn serve` with the demo model (described.py).

tools/test.py starts it, after `cargo build`, with an interpreter that has the packages of requirements-schemathesis.txt.
Prints one line per test and at the end `document: N passed, N failed, N skipped`.
"""

import sys
import tempfile

import described
from server import ROOT, Server
from session import Report


def main():
    report = Report("document")
    # With a folder for conversations, every route answers.
    with tempfile.TemporaryDirectory() as conversations:
        server = Server(ROOT / ".cache/test/document.log", UNICORN_KV_DISK_PATH=conversations)
        try:
            if report.attempt("the_server_starts", server.wait):
                report.attempt_all(described.TESTS, server)
        finally:
            report.attempt_end(server)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())

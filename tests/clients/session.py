"""Collects the results of client sessions with a server, one line per test: `ok NAME`, `FAILED NAME: WHY` or `SKIP
REASON: NAME`.

A client whose packages conflict with those of the others runs in a separate process,
`PYTHON tests/clients/session.py MODULE URL`, whose lines `Report.relay` counts.
"""

import importlib
import json
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

# The questions, tools and schema that every client uses.
SCENARIO = json.loads((Path(__file__).parent / "scenario.json").read_text())
SESSION_SECONDS = 600


class Report:
    def __init__(self, name):
        self.name, self.passed, self.failed, self.skipped = name, 0, 0, 0

    def attempt(self, name, test):
        """Runs a test and returns whether it passed. Any error is a failure of this test, and the next one still
        runs."""
        try:
            test()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {name}: {reason[:600]}", flush=True)
            self.failed += 1
            return False
        print(f"ok {name}", flush=True)
        self.passed += 1
        return True

    def attempt_all(self, tests, server):
        for test in tests:
            self.attempt(test.__name__, lambda test=test: test(server))

    def skip(self, reason, name):
        """`reason` is a name in tests/skips.toml."""
        print(f"SKIP {reason}: {name}", flush=True)
        self.skipped += 1

    def relay(self, name, command):
        """Runs the session `name` in a separate process, and counts its results. Missing output is a failure."""
        def session():
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=SESSION_SECONDS, check=False,
            )
            print(done.stdout, end="", flush=True)
            passed, failed = (len(re.findall(rf"^{word} ", done.stdout, re.MULTILINE)) for word in ("ok", "FAILED"))
            self.passed += passed
            self.failed += failed
            last = (done.stdout.splitlines() or ["nothing"])[-1]
            assert passed > 0 and last == f"{name}: {passed} passed, {failed} failed, 0 skipped", f"its last words: {last}"
            assert done.returncode == bool(failed), f"exit status {done.returncode}"

        self.attempt(f"{name}_reports_to_the_end", session)

    def attempt_end(self, server):
        """Ends a server, which must stop cleanly and have logged no error."""
        def no_error():
            errors = [line for line in server.logged().splitlines() if "ERROR" in line]
            assert not errors, errors

        def ends():
            status = server.stop()
            assert status == 0, f"exit status {status}"

        self.attempt("sigterm_ends_the_server", ends)
        self.attempt("the_server_logged_no_error", no_error)

    def end(self):
        """The exit status."""
        print(f"{self.name}: {self.passed} passed, {self.failed} failed, {self.skipped} skipped", flush=True)
        return 1 if self.failed else 0


def main(name, url):
    report = Report(name)
    report.attempt_all(importlib.import_module(name).TESTS, namedtuple("Server", "url")(url))
    return report.end()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

#!/usr/bin/env python3
"""Runs Lemonade's tests of Ollama's API, test/test_ollama.py, against `unicorn serve`, and writes their section of
docs/conformance.md: `.venv/bin/python tools/lemonade_tests.py CHECKOUT`.

The tests are in no package index, so that CHECKOUT is a clone of Lemonade's repository. Nothing of it is changed or copied
into this repository. The demo model has the names of the suite's models, and the suite's context of 2048 tokens. A proxy
answers what the suite asks only to prepare Lemonade's own server (`Proxy.prepare`), and forwards everything else unchanged.
The exit status is 1 if a failure has no reason in REASONS.
"""

import argparse
import datetime
import http.client
import json
import os
import subprocess
import sys
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from conformance import DOCUMENT, LEMONADE, plain
from revision import revision

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/lemonade-sdk/lemonade"
LOG = ROOT / ".cache/conformance/lemonade-server.log"
EXCHANGE_SECONDS = 300

# Why a test does not pass. Each is a requirement of Lemonade alone, or differs from Ollama, whose API this is.
REASONS = {
    "test_001_version": "it wants the version 0.16.1, which Lemonade reports; this server has the API of 0.30.0",
    "test_004_show": "it wants Lemonade's name of every architecture, `llamacpp`, before `.context_length`; Ollama has the model's own, "
    "and clients read that from `general.architecture`",
    "test_008_unload_via_generate": "it wants the model to be unloaded before the answer comes; here, as in Ollama, it is unloaded "
    "soon after the answer",
    "test_010_chat_streaming_with_tools_returns_complete_tool_call": "it wants the `done_reason` `tool_calls`; Ollama's is `stop`",
    "test_011_chat_missing_model": "it wants 400 without `model`; this server then [uses its first model](api.md#rules-for-every-body)",
    "test_015a_auto_load_forwards_only_ctx_size": "it reads Lemonade's options of a loaded model from its `/api/v1/health`",
    "test_021_chat_with_image_input": "it needs a model that sees images",
    "test_022_generate_image_output": "it needs a model that draws images",
    "test_027_anthropic_messages_backend_error": "it wants the word `context` in the error; this server has Anthropic's own words, `prompt is too "
    "long`, which Claude Code looks for",
    "test_028_anthropic_messages_streaming_backend_error": "it wants 200 and an event for a prompt that is too long; Anthropic refuses it with 400 before "
    "a stream begins, and so does this server",
}


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests to the server, except those that prepare Lemonade's own server."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    names = ()

    def prepare(self, path, fields):
        """The answer to a request that Lemonade's suite makes before it tests, or None. A model that is not served is
        unknown, as it is to Lemonade if it cannot be downloaded."""
        name = fields.get("model_name")
        if path.startswith("/api/v1/models/") and path.endswith("/options"):
            return 200, {"saved": {}}  # The context that the suite asks for is the server's.
        if path not in ("/api/v1/pull", "/api/v1/load", "/api/v1/unload"):
            return None
        if name and name not in self.names:
            return 404, {"error": f"{name} is not served"}
        if path != "/api/v1/pull":
            status, _, answer = self.ask("POST", path.replace("/api/v1", "/models"), json.dumps({"model": name}).encode(), {})
            with answer:
                return status, json.load(answer)
        return 200, {"status": "success"}

    def ask(self, method, target, body, headers):
        connection = http.client.HTTPConnection(self.upstream, timeout=EXCHANGE_SECONDS)
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            fields = json.loads(body or b"{}")
        except ValueError:
            fields = {}
        self.close_connection = True
        if prepared := self.prepare(urlsplit(self.path).path, fields):
            status, answer = prepared
            self.reply(status, [("Content-Type", "application/json")], [json.dumps(answer).encode()])
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        status, fields, answer = self.ask(self.command, self.path, body or None, headers)
        with answer:
            self.reply(status, fields, iter(lambda: answer.read1(65536), b""))

    def reply(self, status, headers, pieces):
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
            self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = relay

    def log_message(self, *_):
        pass


class Results(unittest.TestResult):
    """(test, its result, the last line of its error) of each test."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def add(self, test, result, error=""):
        lines = str(error).strip().splitlines()
        self.rows.append((test.id().rsplit(".", 1)[-1], result, lines[-1] if lines else ""))

    def addSuccess(self, test):
        self.add(test, "passed")

    def addFailure(self, test, error):
        self.add(test, "failed", error[1])

    def addError(self, test, error):
        self.add(test, "failed", f"{error[0].__name__}: {error[1]}")

    def addSkip(self, test, reason):
        self.add(test, "not run", reason)


def run(checkout):
    """Runs the suite, and returns its rows."""
    sys.path[:0] = [str(ROOT / "tests/clients"), str(checkout / "test")]
    from server import ENVIRONMENT, Server

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    # The suite reads its port when it is imported.
    os.environ["LEMONADE_TEST_PORT"] = str(proxy.server_port)
    import test_ollama

    Proxy.names = (test_ollama.ENDPOINT_TEST_MODEL, test_ollama.TOOL_CALLING_MODEL)
    # The validation layers make a server slow, and have no effect on the API.
    ENVIRONMENT.update(UNICORN_HARDWARE_VALIDATION="false", UNICORN_SERVER_MODEL_ALIASES=Proxy.names[1])
    server = Server(LOG, "--name", Proxy.names[0], "--context", str(test_ollama.OVERFLOW_CTX_SIZE))
    Proxy.upstream = f"127.0.0.1:{server.port}"
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    results = Results()
    try:
        server.wait()
        unittest.defaultTestLoader.loadTestsFromTestCase(test_ollama.OllamaTests).run(results)
    finally:
        server.stop()
    return results.rows


def section(rows, commit):
    passed = sum(result == "passed" for _, result, _ in rows)
    lines = [
        LEMONADE,
        "",
        f"- `test/test_ollama.py` of [Lemonade]({REPOSITORY}) at commit `{commit}`: {passed} of {len(rows)} tests passed",
        f"- {datetime.date.today().isoformat()}, at revision {revision()}: `unicorn serve` with the demo model on software Vulkan",
        "",
        "To repeat it after `make test-clients`:",
        "",
        "```sh",
        f"git clone {REPOSITORY} /tmp/lemonade && git -C /tmp/lemonade checkout {commit}",
        ".venv/bin/python tools/lemonade_tests.py /tmp/lemonade",
        "```",
        "",
        "The suite runs unchanged, and `tools/lemonade_tests.py` has the reasons. The demo model has the names of the suite's",
        "models and a context of 2048 tokens. A proxy answers the requests that prepare Lemonade's own server (`/api/v1/pull`,",
        "`load`, `unload` and `options`), and forwards all others.",
        "",
        "| test | result | why, if it did not pass |",
        "|---|---|---|",
        *[f"| `{test}` | {result} | {reason(test, result, error)} |" for test, result, error in rows],
    ]
    return "\n".join(lines) + "\n"


def reason(test, result, error):
    return "" if result == "passed" else REASONS.get(test, plain(f"UNEXPLAINED: {error}" if result == "failed" else error))


def main():
    parser = argparse.ArgumentParser(description="Runs Lemonade's tests of Ollama's API against `unicorn serve`.")
    parser.add_argument("checkout", type=Path, help="a clone of Lemonade's repository")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    asked = parser.parse_args()
    if not (asked.checkout / "test/test_ollama.py").is_file():
        sys.exit(f"lemonade_tests: {asked.checkout} has no test/test_ollama.py: git clone {REPOSITORY}")
    named = ["git", "-C", str(asked.checkout), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    rows = run(asked.checkout.resolve())
    page = asked.out.read_text() if asked.out.exists() else ""
    asked.out.write_text(f"{page.split(LEMONADE)[0].rstrip()}\n\n".lstrip() + section(rows, commit))
    bad = [test for test, result, error in rows if reason(test, result, error).startswith("UNEXPLAINED")]
    for test, result, error in rows:
        print(f"{result}: {test} {error}")
    print(f"lemonade: {sum(result == 'passed' for _, result, _ in rows)} of {len(rows)} passed, {len(bad)} unexplained")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""tools/scaling.py: that it runs the shipped files, and distinguishes interrupted answers from complete ones."""

import http.server
import re
import sys
import threading
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import scaling  # noqa: E402


class Files(unittest.TestCase):
    def test_replaced_texts_are_in_the_shipped_files(self):
        addresses = [(daemon, "there") for daemon in scaling.DAEMONS]
        text = scaling.replaced(scaling.HAPROXY_CONFIG.read_text(), [
            *addresses, (f"bind {scaling.API}", "bind here"), (scaling.AFFINITY, scaling.ROUND_ROBIN), (scaling.USER, "")])
        self.assertEqual(text.count("there"), 2)
        self.assertNotIn("127.0.0.1:8", text)
        text = scaling.replaced(scaling.LITELLM_CONFIG.read_text(), [*addresses, (scaling.LITELLM_AFFINITY, "")])
        self.assertNotIn("session_affinity", text)

    def test_a_missing_or_repeated_text_is_refused(self):
        for text in ["", "a a"]:
            with self.assertRaises(AssertionError):
                scaling.replaced(text, [("a", "b")])

    def test_limits_equal_those_of_the_shipped_files(self):
        self.assertIn(f"\n    tune.bufsize {scaling.BUFFER_BYTES}\n", scaling.HAPROXY_CONFIG.read_text())
        self.assertIn(f"\nblock_size = {scaling.BLOCK_TOKENS}\n", (ROOT / "config/default.toml").read_text())


class Streams(unittest.TestCase):
    def request(self, body, length, kind):
        """The request after an answer with `body` and a promised length of `length` bytes."""
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.handle_request).start()
            request = scaling.Request(server.server_address[1], {})
            request.run()
        return request

    def test_a_stream_is_complete_only_with_its_last_line(self):
        kind, piece = "text/event-stream", b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
        failed = b'data: {"error": {"message": "lost"}}\n\n'
        for body, whole in [(b": comment\n\n" + piece + b"data: [DONE]\n\n", True), (piece, False), (piece + failed + b"data: [DONE]\n\n", False)]:
            request = self.request(body, len(body), kind)
            self.assertEqual((request.whole, request.text, request.pieces), (whole, "Hi", 1), body)

    def test_an_interrupted_answer_is_not_complete(self):
        body = b'{"choices": [{"message": {"content": "Hi"}}]}'
        self.assertEqual((self.request(body, len(body), "application/json").text), "Hi")
        request = self.request(body, len(body) + 1, "application/json")
        self.assertFalse(request.whole)
        self.assertTrue(re.match("IncompleteRead", request.error), request.error)


if __name__ == "__main__":
    unittest.main()

"""tools/conformance.py: how it unpacks a source distribution, and which class it gives to a failure. It needs no network."""

import io
import json
import sys
import tarfile
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import conformance  # noqa: E402

SUITE = conformance.Suite("s", "a suite", "some-package", "1.0", "0" * 64, ".", "tests/unit", ("tests/unit", "tests/utils.py"))


def openai_error(message, param=None, code=None):
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}})


def exchange(status=200, refusal="", ignored=(), path="/v1/chat/completions"):
    return {"method": "POST", "path": path, "asked": [], "status": status, "refusal": refusal, "ignored": list(ignored)}


def failure(*exchanges, error="AssertionError", message="", statement="assert x"):
    return conformance.Failure("unit/a.py::test", error, message, statement, list(exchanges))


class Unpacking(unittest.TestCase):
    def archive(self, folder, members):
        path = Path(folder) / "some_package-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                if data is None:
                    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                    archive.addfile(member)
                else:
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        return path

    def unpacked(self, members, suite=SUITE):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "target"
            conformance.unpack(self.archive(folder, members), suite, target)
            self.assertEqual(sorted(p.name for p in Path(folder).iterdir()), ["some_package-1.0.tar.gz", "target"])
            return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file() or p.is_symlink())

    def test_only_the_suite_is_unpacked(self):
        members = {f"some_package-1.0/{name}": b"x" for name in ["tests/unit/a.py", "tests/unit/b/c.py", "tests/utils.py", "tests/unit2.py", "setup.py"]}
        self.assertEqual(self.unpacked(members), ["tests/unit/a.py", "tests/unit/b/c.py", "tests/utils.py"])

    def test_unsafe_paths_are_not_unpacked(self):
        evil = {
            "some_package-1.0/tests/unit/a.py": b"x",
            "some_package-1.0/tests/unit/../../../../out.py": b"x",
            "/some_package-1.0/tests/unit/absolute.py": b"x",
            "other-1.0/tests/unit/b.py": b"x",
            "some_package-1.0/tests/unit/link.py": None,
        }
        self.assertEqual(self.unpacked(evil), ["tests/unit/a.py"])

    def test_an_archive_without_the_tests_is_refused(self):
        with self.assertRaisesRegex(conformance.ConformanceError, "has no tests at tests/unit: 1 files unpacked"):
            self.unpacked({"some_package-1.0/tests/utils.py": b"x"})

    def test_a_wrong_hash_is_refused_and_the_archive_is_removed(self):
        with tempfile.TemporaryDirectory() as folder:
            conformance.CACHE, before = Path(folder), conformance.CACHE
            try:
                archive = self.archive(folder, {"some_package-1.0/tests/unit/a.py": b"x"})
                with self.assertRaisesRegex(conformance.ConformanceError, "another SHA-256"):
                    conformance.fetch_suite(SUITE)
                self.assertFalse(archive.exists())
                archive = self.archive(folder, {"some_package-1.0/tests/unit/a.py": b"x"})
                good = replace(SUITE, sha256=conformance.hashlib.sha256(archive.read_bytes()).hexdigest())
                self.assertTrue((conformance.fetch_suite(good) / "tests/unit/a.py").is_file())
                self.assertFalse(archive.exists())
            finally:
                conformance.CACHE = before


class Classes(unittest.TestCase):
    def test_a_route(self):
        nothing = exchange(404, openai_error("there is nothing at /infill", code="not_found"), path="/infill")
        self.assertEqual(conformance.classify(failure(exchange(), nothing)), ("route", "POST /infill"))
        method = exchange(405, openai_error("PUT is not allowed at /v1/models", code="method_not_allowed"), path="/v1/models")
        self.assertEqual(conformance.classify(failure(method))[0], "route")

    def test_a_field(self):
        refused = exchange(400, openai_error("suffix: Gemma-3 was not trained for it", "suffix", "unsupported_value"))
        self.assertEqual(conformance.classify(failure(refused)), ("field", "suffix: Gemma-3 was not trained for it"))
        anthropic = json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": "messages[0].content[1].type: this server reads text only"}})
        self.assertEqual(conformance.classify(failure(exchange(400, anthropic, path="/v1/messages"))),
                         ("field", "messages[0].content[1].type: this server reads text only"))

    def test_text(self):
        for statement in ['assert match_regex("x", y)', 'assert body["usage"]["prompt_tokens"] == 3', "assert answer.model == MODEL_NAME",
                          "assert len(tool_calls) == 1"]:
            self.assertEqual(conformance.classify(failure(exchange(), statement=statement))[0], "text", statement)

        foreign = exchange(404, openai_error('the model "x" does not exist; this server serves "y"', "model", "model_not_found"))
        self.assertEqual(conformance.classify(failure(foreign)), ("text", "the name of its own model"))

    def test_a_value_that_only_other_servers_accept_is_a_field(self):
        for param in ["input", "input[1][2]", "messages[0].role", "logit_bias.bad"]:
            refused = exchange(400, openai_error(f"{param}: expected another", param, "invalid_value"))
            self.assertEqual(conformance.classify(failure(refused)), ("field", f"{param}: expected another"))

    def test_a_manner_is_explained_only_if_all_requests_were_answered(self):
        name = "unit/test_metrics.py::test_metrics_disabled"
        disabled = replace(failure(exchange()), test=name)
        self.assertEqual(conformance.classify(disabled), conformance.LISTED["test_metrics.py::test_metrics_disabled"])
        broken = replace(failure(exchange(500, "Internal Server Error")), test=name)
        self.assertEqual(conformance.classify(broken)[0], conformance.UNEXPLAINED)

    def test_an_unexplained_failure_is_described(self):
        words = 'assert match_regex("x", y)'
        required = {**exchange(), "asked": ["messages", "tool_choice", "tools"]}
        cases = [
            (failure(required, statement="assert len(tool_calls) == 1"), "AssertionError, asked POST /v1/chat/completions"),
            (failure(exchange(ignored=["grammar"]), statement=words), "ignored without a word: grammar"),
            (failure(exchange(400, openai_error("stop: expected a text", "stop", "invalid_value")), statement=words),
             "POST /v1/chat/completions answered 400: stop: expected a text"),
            (failure(exchange(500, "Internal Server Error")), "POST /v1/chat/completions answered 500: Internal Server Error"),
            (failure(exchange(), error="Failed", message="Timeout (>30.0s) from pytest-timeout."), "took too long"),
            (failure(exchange(), error="KeyError", message="'timings'"), "the answer has no 'timings'"),
            (failure(exchange(), error="AttributeError", message="'X' object has no attribute 'usage'"), "the answer has no 'usage'"),
            (failure(exchange(), error="Failed", message="DID NOT RAISE <class 'E'>"),
             "an answer where the test expects a refusal, asked POST /v1/chat/completions"),
            (failure(exchange(), message="assert '' is None"), "AssertionError, comparing '' with None, asked POST /v1/chat/completions"),
            (failure(exchange(), statement="assert len(a['delta'][\"content\"]) > 0, 'x'"), "AssertionError about delta.content, asked POST /v1/chat/completions"),
            (failure(exchange(), error="TypeError", statement=words), "TypeError, asked POST /v1/chat/completions"),
        ]
        for failed, name in cases:
            self.assertEqual(conformance.classify(failed), (conformance.UNEXPLAINED, name))


class Judging(unittest.TestCase):
    def entry(self, test, outcome, *exchanges, reason=""):
        return {"test": test, "outcome": outcome, "reason": reason, "error": "AssertionError", "message": "", "statement": "", "exchanges": list(exchanges)}

    def test_every_test_is_counted_once(self):
        nothing = exchange(404, openai_error("there is nothing at /slots", code="not_found"), path="/slots")
        run = conformance.judge([
            {"module": "d.py", "reason": "vllm.x is not installed"},
            {"collected": ["a.py::1", "a.py::2", "a.py::3", "b.py::4", "c.py::5"]},
            self.entry("a.py::1", "passed", exchange()),
            self.entry("a.py::2", "passed", nothing),
            self.entry("a.py::3", "failed", nothing),
            self.entry("b.py::4", "not run", reason="needs a server that was started with lora_files"),
        ])
        self.assertEqual(run.passed, ["a.py::1"])
        self.assertEqual(run.failed, [("a.py::3", "route", "POST /slots")])
        self.assertEqual([test for test, _ in run.not_run], ["d.py", "a.py::2", "b.py::4", "c.py::5"])

    def test_the_document_has_a_line_for_each_cause(self):
        failed = [("u/a.py::2[x|z]", "route", "GET /slots"), ("u/a.py::2[y]", "route", "GET /slots"), ("u/a.py::3", conformance.UNEXPLAINED, "why|\nnot")]
        not_run = [("u/a.py::4", "r"), ("u/a.py::5", "a.b is not installed"), ("u/a.py::6", "a.c is not installed")]
        run = conformance.Run(["u/a.py::1"], failed, not_run)
        text = conformance.document({SUITE: {"as is": run, "relaxed": run}}, ["a fact"])
        self.assertIn("| a suite | relaxed | 1 | 2 | 0 | 0 | 0 | 1 | 3 |\n", text)
        self.assertIn("| `route` | 2 | GET /slots (2) |\n", text)
        self.assertIn("| `UNEXPLAINED` | 1 | u/a.py::3: why\\| not |\n", text)
        self.assertIn("| not run | 3 | call a package that a stand-in replaces (2); r |\n", text)

    def test_the_section_of_lemonade_stays_in_the_page(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            self.assertEqual(conformance.lemonade_section(page), "")
            page.write_text("# Conformance\n")
            self.assertEqual(conformance.lemonade_section(page), "")
            page.write_text(f"# Conformance\n\n{conformance.LEMONADE}\n\n| a | passed | |\n")
            self.assertEqual(conformance.lemonade_section(page), f"\n{conformance.LEMONADE}\n\n| a | passed | |\n")


if __name__ == "__main__":
    unittest.main()

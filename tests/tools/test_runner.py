"""tools/test.py: how it counts. Each kind of error in a run must become a failure."""

import contextlib
import io
import sys
import threading
import unittest
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
spec = util.spec_from_file_location("runner", ROOT / "tools/test.py")
runner = util.module_from_spec(spec)
sys.modules["runner"] = runner  # dataclasses look up their module
spec.loader.exec_module(runner)

GOOD = """\
running 2 tests
test a::x ... ok
test a::y ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.08s
"""


class Cargo(unittest.TestCase):
    def failures(self, status, output, skips=()):
        return runner.cargo_result(status, output, list(skips)).failures

    def test_a_good_run(self):
        result = runner.cargo_result(0, GOOD, [])
        self.assertEqual((result.passed, result.failures, result.skipped), (2, [], []))

    def test_a_skipped_test_is_not_counted_as_passed(self):
        result = runner.cargo_result(0, GOOD, [("real-tokenizer", "a::y")])
        self.assertEqual((result.passed, result.failures, len(result.skipped)), (1, [], 1))

    def test_a_failed_test_is_named_once(self):
        bad = GOOD.replace("a::y ... ok", "a::y ... FAILED").replace("ok. 2 passed; 0 failed", "FAILED. 1 passed; 1 failed")
        self.assertEqual(self.failures(101, bad), ["rust: a::y"])

    def test_a_failed_test_is_reported_with_its_panic(self):
        panic = "thread 'a::y' panicked at tests/a.rs:3:5:\nassertion `left == right` failed\n  left: 1\n right: 2\n"
        section = f"failures:\n\n---- a::y stdout ----\na line before\n\n{panic}stack backtrace:\n   0: main\n\n\nfailures:\n    a::y\n\n"
        bad = GOOD.replace("a::y ... ok", "a::y ... FAILED").replace("ok. 2 passed; 0 failed", "FAILED. 1 passed; 1 failed")
        bad = bad.replace("test result:", section + "test result:", 1)
        expected = "rust: a::y" + "".join(f"\n    {line}" for line in panic.splitlines())
        self.assertEqual(self.failures(101, bad), [expected])

    def test_tests_that_never_end_are_named(self):
        long = "".join(f"test a::{name} has been running for over 60 seconds\n" for name in "xyz")
        failure = self.failures(None, f"running 3 tests\n{long}test a::y ... ok\n")[0]
        self.assertIn("did not finish in time", failure)
        self.assertTrue(failure.endswith("these tests still ran: a::x, a::z"), failure)

    def test_durations_follow_from_when_lines_arrive(self):
        arrived = [(10, "running 4 tests\n"), (12, "test a::y ... ok\n"), (13, "test b has been running for over 60 seconds\n"),
                   (17, "test a::x ... FAILED\n"), (18, "test c - should panic ... ok\n"), (20, "test b ... ok\n")]
        self.assertEqual(runner.durations(arrived, 2), [(2, "a::y"), (7, "a::x"), (1, "c"), (8, "b")])
        self.assertEqual(runner.durations([], 2), [])

    def test_ignored_filtered_empty_crashed_killed_and_unbuilt_runs_fail(self):
        for status, output in [
            (0, GOOD.replace("0 ignored", "1 ignored")),
            (0, GOOD.replace("0 filtered", "3 filtered")),
            (0, "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished\n"),
            (101, "running 2 tests\ntest a::x ... ok\n"),
            (None, "running 2 tests\n"),
            (101, "error: could not compile\n"),
            (1, GOOD),
            (0, ""),
        ]:
            self.assertTrue(self.failures(status, output), output)


class Unittest(unittest.TestCase):
    def test_counts(self):
        result = runner.unittest_result("t", 0, "Ran 7 tests in 0.001s\n\nOK\n")
        self.assertEqual((result.passed, result.failures), (7, []))
        for status, output in [(0, ""), (1, "Ran 7 tests in 1s\n"), (None, ""), (0, "Ran 7 tests in 1s\nOK (skipped=1)\n")]:
            self.assertTrue(runner.unittest_result("t", status, output).failures, output)
        self.assertEqual(runner.unittest_result("t", 1, "FAIL: test_a (x)\nRan 2 tests in 1s\n").passed, 1)


class Page(unittest.TestCase):
    GOOD = "ok a (0.1 s)\nFAILED b: text: never\npage: 1 passed, 1 failed\n"

    def test_counts(self):
        result = runner.browser_result("page", 1, self.GOOD)
        self.assertEqual((result.passed, result.failures), (1, ["page: b"]))
        for status, output in [(0, ""), (None, "ok a (0.1 s)\n"), (0, self.GOOD), (1, self.GOOD.replace("1 failed", "0 failed")),
                               (1, "page: 3 passed, 0 failed\n")]:
            self.assertNotEqual(runner.browser_result("page", status, output).failures, [], output)
            self.assertNotEqual(runner.browser_result("page", status, output).failures, ["page: b"], output)


class Counted(unittest.TestCase):
    GOOD = "ok a\nFAILED b: never\nSKIP radv: c\nx: 1 passed, 1 failed, 1 skipped\n"

    def test_counts(self):
        result = runner.counted("x", 1, self.GOOD)
        self.assertEqual((result.passed, result.failures, result.skipped), (1, ["x: b: never"], [("radv", "c")]))
        for status, output in [(0, ""), (None, "ok a\n"), (0, self.GOOD), (1, self.GOOD.replace("1 failed", "0 failed")),
                               (1, self.GOOD.replace("1 skipped", "0 skipped")), (1, "x: 3 passed, 0 failed, 0 skipped\n")]:
            self.assertNotIn(runner.counted("x", status, output).failures, ([], ["x: b: never"]), output)


class Processes(unittest.TestCase):
    def test_a_part_that_hangs_is_killed_and_fails(self):
        status, _ = runner.run(["sleep", "60"], seconds=1)
        self.assertIsNone(status)

    def test_parts_of_lanes_run_together_and_keep_their_output_apart(self):
        # Each part waits for the other one's, so one after the other they would never end.
        met = threading.Barrier(2, timeout=30)

        def part(name):
            def of():
                met.wait()
                runner.run(["sh", "-c", f"echo {name} says; sleep 0.2; echo {name} says more"])
                met.wait()
                return runner.Result(passed=1)
            return of

        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            ran = list(runner.each_result(["clients", "page"], {name: part(name) for name in ["clients", "page"]}))
        self.assertEqual([(name, result.passed) for name, result, _ in ran], [("clients", 1), ("page", 1)])
        for name in ["clients", "page"]:
            self.assertIn(f"\n== {name}: {name}\n{name} says\n{name} says more\n", output.getvalue())

    def test_pins_are_read_with_and_without_extras(self):
        self.assertEqual(runner.pins("# text\na-b==1.2\nlitellm[mcp]==3\n"), [("a-b", "1.2"), ("litellm", "3")])

    def test_skips_are_read_from_the_list(self):
        self.assertIn("real-tokenizer", runner.listed_skips())


if __name__ == "__main__":
    unittest.main()

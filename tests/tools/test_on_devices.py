"""tools/on_devices.py: what counts as a run of the suite on a device, and the table. These tests do not run the suite."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import devices  # noqa: E402
import on_devices  # noqa: E402

WHOLE = """
running 3 tests
test kernels::a ... ok
test kernels::b - should panic ... ok
test kernels::c ... FAILED

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 400 filtered out; finished in 1.00s
"""
DEVICE = devices.Device("somewhere", "a device", {"A": "b"}, ("wrapped",))


class Cells(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.enterContext(mock.patch.object(on_devices, "ROOT", Path(folder.name)))

    def cell(self, status, output, device=DEVICE):
        self.asked = []

        def run(command, env):
            self.asked.append((command, env))
            return status, output

        return on_devices.run_suite(run, device, "suite", ["kernels::"])

    def test_a_complete_run_is_counted_and_its_failures_are_named(self):
        cell = self.cell(101, WHOLE)
        self.assertEqual((cell.passed, cell.failures), (2, ["kernels::c"]))
        command, environment = self.asked[0]
        self.assertEqual(command[:3], ["wrapped", "suite", "kernels::"])
        self.assertEqual(environment["A"], "b")
        self.assertIn("somewhere", environment["MESA_SHADER_CACHE_DIR"])
        good = WHOLE.replace("c ... FAILED", "c ... ok").replace("FAILED. 2 passed; 1 failed", "ok. 3 passed; 0 failed")
        self.assertEqual((self.cell(0, good).passed, self.cell(0, good).failures), (3, []))

    def test_a_crashed_killed_or_empty_run_is_a_failure(self):
        for status, output in [(None, "running 3 tests\n"), (-11, "running 3 tests\ntest kernels::a ... ok\n"),
                               (0, WHOLE), (0, "test result: ok. 0 passed; 0 failed; 0 ignored"), (1, "")]:
            self.assertIn("no complete run", self.cell(status, output).failures[-1])

    def test_a_skipped_test_is_not_passed(self):
        def run(_command, env):
            Path(env["UNICORN_SKIP_LOG"]).write_text("no-matrices\tfast::tiles\n")
            return 0, "test fast::tiles ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored"

        cell = on_devices.run_suite(run, DEVICE, "suite", ["fast::"])
        self.assertEqual(cell.failures, ["skipped: no-matrices\tfast::tiles"])

    def test_with_the_layer_buffers_have_separate_allocations(self):
        self.cell(101, WHOLE, devices.DEVICES["gpu-assisted"])
        command, environment = self.asked[0]
        self.assertEqual(environment["UNICORN_TEST_BUFFERS_APART"], "1")
        self.assertTrue(set(on_devices.PROVOKING) <= set(command))

    def test_only_their_own_suite_runs_the_tests_of_matrices(self):
        # Other devices would skip them, which is a failure.
        self.cell(0, WHOLE, DEVICE)
        self.assertTrue(set(on_devices.MATRICES["matrices"]) <= set(self.asked[0][0]))


class Table(unittest.TestCase):
    def test_the_table_has_each_device_or_the_reason_why_it_is_missing(self):
        good, bad = on_devices.Cell(5, [], 12.3), on_devices.Cell(4, ["kernels::c"], 9)
        text = on_devices.table([
            (DEVICE, "a driver", {"kernels": good, "goldens": bad}),
            (devices.DEVICES["swiftshader"], "", "swiftshader needs a folder"),
        ])
        self.assertIn("| somewhere | a driver | 5 passed, 12 s |  | 4 passed, **1 failed** |  |  |\n", text)
        self.assertIn("| swiftshader | swiftshader needs a folder |", text)

    def test_every_planned_device_and_test_exists(self):
        suite = "".join(path.read_text() for path in (ROOT / "tests").glob("*/*.rs"))
        for plan in [on_devices.CHEAP, on_devices.FULL]:
            for name, suites in plan.items():
                self.assertTrue(devices.DEVICES[name].runs)
                for filters in suites.values():
                    for wanted in filters:
                        module, _, test = wanted.rpartition("::")
                        self.assertTrue((ROOT / "tests" / (module.replace("::", "/") + ".rs")).is_file(), wanted)
                        self.assertIn(f"fn {test}", suite)
        for skipped in [on_devices.LARGE, on_devices.SLOW_TO_COMPILE, *on_devices.PROVOKING]:
            self.assertIn(f"fn {skipped.rpartition('::')[2]}(", suite)


if __name__ == "__main__":
    unittest.main()

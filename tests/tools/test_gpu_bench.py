"""The script that a volunteer runs, with fake binaries that log their arguments and fail on demand."""

import io
import json
import os
import subprocess
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Both binaries.
UNICORN = r"""#!/bin/sh
echo "$@" >>"$LOG"
env | sed -n 's/^\(UNICORN_[A-Z_]*\)=.*/\1/p' >>"$LOG.env"
case "$1" in
    devices) printf '[0] A "GPU"\\x\n\tusable yes\n' ;;
    "$BROKEN") echo "error: it broke" >&2; exit 1 ;;
    kernels | model) echo "{\"benchmark\": \"$1\", \"seconds\": 1.5}" ;;
    synth) for last; do :; done; mkdir "$last" && echo x >"$last/shared.safetensors" ;;
esac
"""
SUITE = r"""#!/bin/sh
[ -e "$UNICORN_TEST_ROOT/tests/skips.toml" ] || exit 3
[ "$UNICORN_TEST_VALIDATION" = 0 ] || exit 4
[ -x "$UNICORN_TEST_ROOT/unicorn" ] || exit 5
echo "test kernels::one ... ok"
echo "test kernels::two has been running for over 60 seconds"
echo "test kernels::two ... ok"
[ -z "$HANGS" ] || exit 124
[ -z "$BAD" ] || echo "test golden::$BAD ... FAILED"
[ -n "$BAD" ] && echo "test result: FAILED. 2 passed; 1 failed; 0 ignored" && exit 101
echo "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.00s"
"""


class GpuBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "carried here"
        self.folder.mkdir()
        (self.folder / "run.sh").write_bytes((ROOT / "tools/gpu_bench_run.sh").read_bytes())
        (self.folder / "run.sh").chmod(0o755)
        (self.folder / "commit").write_text("abc123\n")
        with tarfile.open(self.folder / "all.tar.xz", mode="w:xz") as archive:
            for name, script in [("unicorn", UNICORN), ("unicorn-lab", UNICORN), ("suite", SUITE)]:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(script), 0o755
                archive.addfile(entry, io.BytesIO(script.encode()))
            archive.add(ROOT / "tests/skips.toml", "tree/tests/skips.toml")
        self.log = self.folder / "log"

    def run_script(self, *arguments, **variables):
        environment = {**os.environ, "LOG": str(self.log), "BROKEN": "", "BAD": "", "HANGS": "", **variables}
        command = [self.folder / "run.sh", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        result = self.folder / "result.json"
        return done.returncode, done.stderr, json.loads(result.read_text()) if result.exists() else None

    # The suite runs twice: for models and for kernels.
    def test_everything_goes_into_one_json(self):
        status, said, result = self.run_script(UNICORN_MODEL_PATH="/elsewhere")
        self.assertEqual((status, result["problems"]), (0, []), said)
        self.assertEqual(result["checks"], {"passed": 4, "failed": 0, "failures": []})
        self.assertEqual((result["commit"], result["small"]), ("abc123", False))
        self.assertEqual(result["devices"], ['[0] A "GPU"\\x', " usable yes"])
        self.assertEqual(result["kernels"]["benchmark"], "kernels")
        self.assertEqual([result[name]["benchmark"] for name in ("gemma-3-4b", "gemma-3-27b")], ["model", "model"])
        asked = self.log.read_text().splitlines()
        self.assertEqual([line.split()[0] for line in asked], ["devices", "kernels", "synth", "model", "synth", "model"])
        self.assertFalse(any((self.folder / "work" / model).exists() for model in ("4b", "27b")), "the models are removed")
        # The user's own settings must not affect the measurement.
        self.assertNotIn("UNICORN_MODEL_PATH", (self.folder / "log.env").read_text())

    def test_small_sizes_and_a_device_can_be_requested(self):
        status, said, result = self.run_script("--small", "--device", "Radeon 7", "--allow-software-vulkan")
        self.assertEqual((status, result["small"], result["gemma-3-27b"]), (0, True, None), said)
        asked = self.log.read_text()
        self.assertIn("gemma-3-270m", asked)
        self.assertNotIn("gemma-3-4b", asked)
        for name in ("UNICORN_HARDWARE_DEVICE", "UNICORN_TEST_DEVICE", "UNICORN_HARDWARE_ALLOW_SOFTWARE_VULKAN"):
            self.assertIn(name, (self.folder / "log.env").read_text())

    def test_a_failed_measurement_is_named_and_the_others_run(self):
        status, said, result = self.run_script("--no-27b", BAD="logits_match", BROKEN="kernels")
        self.assertEqual(status, 1, said)
        self.assertEqual(result["checks"], {"passed": 4, "failed": 2, "failures": ["golden::logits_match"] * 2})
        self.assertEqual(result["problems"], ["kernels: exit code 1: error: it broke"])
        self.assertEqual((result["kernels"], result["gemma-3-27b"]), (None, None))
        self.assertEqual(result["gemma-3-4b"]["benchmark"], "model")

    def test_checks_that_do_not_finish_are_a_problem_with_partial_counts(self):
        status, said, result = self.run_script("--small", HANGS="1")
        self.assertEqual((status, result["checks"]["passed"]), (1, 4), said)
        self.assertIn("checks of models: did not finish, exit code 124", result["problems"][0])
        self.assertIn("checks of kernels: did not finish", result["problems"][1])
        self.assertEqual(result["kernels"]["benchmark"], "kernels")

    def test_a_model_that_does_not_fit_on_the_disk_is_skipped(self):
        tools = self.folder / "tools"
        tools.mkdir()
        (tools / "df").write_text("#!/bin/sh\necho header\necho disk 99 90 9000000 9% /\n")
        (tools / "df").chmod(0o755)
        status, said, result = self.run_script(PATH=f"{tools}:{os.environ['PATH']}")
        self.assertEqual(status, 1, said)
        self.assertEqual(result["gemma-3-4b"]["benchmark"], "model")
        self.assertIsNone(result["gemma-3-27b"])
        self.assertRegex(result["problems"][0], "27b: skipped: .* has 9 GB free, and it needs 18")

    def test_no_model_starts_after_the_time_limit(self):
        _, said, result = self.run_script(GPU_BENCH_BUDGET_S="0")
        self.assertEqual([problem.split(":")[0] for problem in result["problems"]], ["4b", "27b"], said)

    def test_unknown_options_are_refused(self):
        status, said, result = self.run_script("--fast")
        self.assertEqual((status, result), (2, None))
        self.assertIn("unknown option --fast", said)


if __name__ == "__main__":
    unittest.main()

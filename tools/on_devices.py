"""Runs kernels and goldens on the devices that replace GPUs, and writes a table of the results.

Every run is the binary of the test suite, with filters, in the environment of one device of `tools/devices.py`. If a
device lacks a feature, the error of the suite names it and counts as a failure, so no run passes without computing.
"""

import datetime
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import devices
from revision import revision

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / ".cache/test/devices.md"
# An embedding of 2.8 GB, which does not test the driver's compiler.
LARGE = "kernels::twins::the_27b_embedding_works_at_full_size"
# These tests provoke a message of the API checks, which are disabled in the GPU-assisted layer, and an access out of
# bounds, which the layer prevents.
PROVOKING = ["kernels::twins::validation_is_loaded_and_catches_a_violation", "kernels::twins::a_write_beyond_a_buffer_ends_at_its_guard_page"]
# With LLVM 19, as in trixie-backports, and vectors of 128 bits, lavapipe compiles one of this test's kernels for more than
# three minutes, longer than a step may take. The machine's own lavapipe runs the test.
SLOW_TO_COMPILE = "kernels::twins::benchmark_cases_run_and_write_numbers"
# Buffers with guard pages take more memory than is planned.
PLANNED = "engine::draft::a_load_with_a_draft_takes_the_planned_memory"
SUITES = {
    "kernels": ["kernels::twins::"],
    "order": ["kernels::hazards::kernels_compute_the_same"],
    "goldens": ["model::golden::"],
    # Bits of products, and bits of logits and answers: alone, batched, in chunks, from the cache, and speculated.
    "fast": ["kernels::fast::every_width", "kernels::fast::two_products", "kernels::fast::activations", "kernels::fast::logits_in_int8", "kernels::fast::answers_in_int8"],
}
# Tests that only Mesa 26's software Vulkan can compute.
MATRICES = {"matrices": [
    "kernels::fast::tiles_that_subgroups_multiply", "kernels::twins::attention_by_tiles_that_subgroups_multiply",
]}
# Suites that are cheap enough for every run of the tests: other devices compile the kernels for many minutes.
CHEAP = {
    "guard-pages": {"kernels": ["kernels::twins::qkv_store", "kernels::twins::rms_norm", "kernels::twins::npu_queries"]},
    "lavapipe-26": MATRICES,
}
FULL = {name: SUITES for name in [
    "lavapipe", "lavapipe-26", "lavapipe-26-subgroup-4", "lavapipe-26-subgroup-16", "lavapipe-26-announces-32", "swiftshader",
]}
FULL["guard-pages"] = SUITES | {"goldens": ["model::golden::", "model::self_test::", "engine::batching::", "engine::draft::"]}
FULL["lavapipe-26"] = SUITES | MATRICES
# SwiftShader is slow, so it runs the three reference models without their variations.
FULL["swiftshader"] = SUITES | {"goldens": ["model::golden::tiny"]}
# The layer checks each access, which makes even small models slow, so it runs one golden.
FULL["gpu-assisted"] = {"kernels": ["kernels::twins::"], "goldens": ["model::golden::tiny_a"]}


@dataclass
class Cell:
    """One suite on one device."""

    passed: int = 0
    failures: list = field(default_factory=list)
    seconds: float = 0

    def text(self):
        if self.failures:
            return f"{self.passed} passed, **{len(self.failures)} failed**"
        return f"{self.passed} passed, {self.seconds:.0f} s"


def unusable(device):
    """Why a command cannot run in the device's wrapper, in one line. None = it can."""
    done = subprocess.run([*device.wrapper, "true"], capture_output=True, text=True, check=False)
    return f"{device.name}: {done.stderr.strip().splitlines()[-1:]}" if done.returncode else None


def suite_binary():
    """Builds the suite, and returns its path."""
    built = subprocess.run(
        ["cargo", "test", "--locked", "--no-run", "--test", "suite", "--message-format", "json"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )
    if built.returncode != 0:
        raise devices.DevicesError(f"the suite does not build (exit status {built.returncode})")
    for line in reversed(built.stdout.splitlines()):
        message = json.loads(line)
        if message.get("executable") and message.get("target", {}).get("name") == "suite":
            return message["executable"]
    raise devices.DevicesError("cargo built no test binary `suite`")


def run_suite(run, device, binary, filters):
    """The result of one cell. `run(command, env=...)` returns the exit status (None = the process was killed) and the
    output."""
    skips = ["--skip", LARGE]
    environment = dict(device.environment)
    if device.name == "gpu-assisted":
        skips += [argument for test in PROVOKING for argument in ("--skip", test)]
    if device.name == "lavapipe-26-subgroup-4":
        skips += ["--skip", SLOW_TO_COMPILE]
    if device.name == "guard-pages":
        skips += ["--skip", PLANNED]
    if filters != MATRICES["matrices"]:
        skips += [argument for test in MATRICES["matrices"] for argument in ("--skip", test)]
    # Each driver has its own cache: drivers do not share compiled shaders, but would share the size limit of the cache.
    cache = ROOT / ".cache/mesa-devices" / device.name
    cache.mkdir(parents=True, exist_ok=True)
    environment.setdefault("MESA_SHADER_CACHE_DIR", str(cache))
    skipped = ROOT / ".cache/test/skips-of-a-device.log"
    skipped.parent.mkdir(parents=True, exist_ok=True)
    skipped.write_text("")
    environment["UNICORN_SKIP_LOG"] = str(skipped)
    began = time.monotonic()
    status, output = run([*device.wrapper, binary, *filters, *skips], env=environment)
    cell = Cell(seconds=time.monotonic() - began)
    cell.failures = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", output, re.MULTILINE)
    line = re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed", output, re.MULTILINE)
    if line:
        cell.passed = int(line[1])
    # The GPU-assisted layer aborts when a process exits with a device in a static variable, as the suite does.
    status = 0 if device.name == "gpu-assisted" and line and not cell.failures and status == -6 else status
    if not line or (status != 0) != bool(cell.failures) or cell.passed + len(cell.failures) == 0:
        cell.failures.append(f"no complete run of {' '.join(filters)} (exit status {status})")
    cell.failures += [f"skipped: {line}" for line in skipped.read_text().splitlines()]
    return cell


def name_of(device, binary_of_program):
    """The name of the device, and its driver."""
    done = subprocess.run(device.command([binary_of_program, "devices"]), cwd=ROOT, capture_output=True, text=True, check=False)
    name = re.search(r"^0: (.+)$", done.stdout, re.MULTILINE)
    driver = re.search(r"^ +driver +(.+)$", done.stdout, re.MULTILINE)
    return name[1] if name else "?", driver[1] if driver else "?"


def rows(run, plan):
    """For each device of `plan` (name -> suites): its cells by suite, or the reason why it cannot be used here."""
    binary = suite_binary()
    for name, suites in plan.items():
        device = devices.DEVICES[name]
        lacking = device.lacking() or unusable(device)
        if lacking:
            yield device, lacking
            continue
        yield device, {suite: run_suite(run, device, binary, filters) for suite, filters in suites.items()}


def table(results):
    """The table with its date. `results` = (device, driver's name, cells or the reason why there are none)."""
    suites = list(SUITES | MATRICES)
    lines = [
        f"{datetime.date.today()}, commit {revision()}, `make test-devices`",
        "",
        "| device | driver | " + " | ".join(suites) + " |",
        "|---|---|" + "---|" * len(suites),
    ]
    for device, driver, cells in results:
        if isinstance(cells, str):
            lines.append(f"| {device.name} | {cells} |" + " |" * len(suites))
        else:
            each = [cells[suite].text() if suite in cells else "" for suite in suites]
            lines.append(f"| {device.name} | {driver} | " + " | ".join(each) + " |")
    return "\n".join(lines) + "\n"


def all_devices(run):
    """Runs every suite on every device, writes the table, and returns the cells, with the reasons for devices that did
    not run."""
    program = ROOT / "target/debug/unicorn"
    results = []
    for device, cells in rows(run, FULL):
        name, driver = ("", "") if isinstance(cells, str) else name_of(device, program)
        results.append((device, f"{name}, {driver}", cells))
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(results))
    print(TABLE.read_text(), flush=True)
    return [(device, cells) for device, _, cells in results]


if __name__ == "__main__":
    sys.exit("this is part of tools/test.py; run `make test-devices`")

#!/usr/bin/env python3
"""Builds target/gpu-bench: a folder with one script that checks and measures Unicorn on another machine's GPU.

The folder has one archive with both binaries, the test suite and the data that it reads, and tools/gpu_bench_run.sh as
run.sh. It runs on machines whose glibc is at least as new as the printed version.
"""

import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "target" / "gpu-bench"
# The size limit of the folder: volunteers copy it.
MOST_BYTES = 60 << 20
# Files of the repository that the suites of GPU work read.
DATA = ["tests/data", "tests/skips.toml", "models/demo"]


def run(*command):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: exit code {done.returncode}")
    return done.stdout


def built(name, *arguments):
    """The executable of the target `name`, which cargo builds with these arguments, among others."""
    lines = run("cargo", *arguments, "--locked", "--message-format=json-render-diagnostics").splitlines()
    messages = [message for message in map(json.loads, lines) if message.get("executable")]
    return Path(next(message["executable"] for message in messages if message["target"]["name"] == name))


def glibc_of(binary):
    """The newest glibc version that a binary needs."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", binary.read_bytes())
    return max((int(major), int(minor)) for major, minor in versions)


def pack(binaries):
    """Writes the archive: the binaries without their symbols, and below `tree` the data."""
    def plain(entry):
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    # The binaries have much in common, and the demo model: the dictionary holds all of them.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
    if platform.machine() == "x86_64":
        filters.insert(0, {"id": lzma.FILTER_X86})
    with lzma.open(FOLDER / "all.tar.xz", "wb", filters=filters) as packed, tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=packed, mode="w|") as archive:
            for name, binary in binaries.items():
                bare = Path(scratch) / name
                run("strip", "-o", str(bare), str(binary))
                archive.add(bare, name, filter=plain)
            for path in DATA:
                archive.add(ROOT / path, f"tree/{path}", filter=plain)


def main():
    binaries = {name: built(name, "build", "--bin", name) for name in ["unicorn", "unicorn-lab"]}
    # The suite is built as in `make test`: the CPU twins of kernels are optimised, and assertions are enabled.
    binaries["suite"] = built("suite", "test", "--no-run", "--test", "suite")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    glibc = max(map(glibc_of, binaries.values()))
    pack(binaries)
    shutil.copy(ROOT / "tools/gpu_bench_run.sh", FOLDER / "run.sh")
    commit = run("git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+").strip()
    (FOLDER / "commit").write_text(commit + "\n")
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{os.path.relpath(FOLDER)}: {size / (1 << 20):.1f} MiB of commit {commit}, for glibc {glibc[0]}.{glibc[1]} and later")
    print("copy it to a machine with a GPU and a Vulkan driver, and run ./run.sh there: a quarter of an hour, and one JSON, result.json")
    if size > MOST_BYTES:
        sys.exit(f"error: {size} bytes exceed the limit of {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()

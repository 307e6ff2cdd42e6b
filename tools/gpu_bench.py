#!/usr/bin/env python3
"""Builds target/gpu-bench: a folder with one script that checks and measures Unicorn on another machine's GPU.

The folder has both binaries and the test suite, stripped and compressed, the data that the suite reads, and
tools/gpu_bench_run.sh as run.sh. It runs on machines whose glibc is at least as new as the printed version.
"""

import gzip
import json
import os
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


def built(*arguments):
    """The executable that cargo builds with these arguments."""
    lines = run("cargo", *arguments, "--locked", "--message-format=json-render-diagnostics").splitlines()
    executables = [message.get("executable") for message in map(json.loads, lines)]
    return Path([path for path in executables if path][-1])


def stripped(binary, name):
    """Packs a binary without its symbols, and returns the newest glibc version that it needs."""
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch) / name
        run("strip", "-o", str(bare), str(binary))
        with open(bare, "rb") as source, gzip.GzipFile(FOLDER / f"{name}.gz", "wb", 9, mtime=0) as packed:
            shutil.copyfileobj(source, packed)
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", binary.read_bytes())
    return max((int(major), int(minor)) for major, minor in versions)


def pack_data():
    def plain(entry):
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with gzip.GzipFile(FOLDER / "data.tar.gz", "wb", 9, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in DATA:
            archive.add(ROOT / path, path, filter=plain)


def main():
    binaries = {name: built("build", "--bin", name) for name in ["unicorn", "unicorn-lab"]}
    # The suite is built as in `make test`: the CPU twins of kernels are optimised, and assertions are enabled.
    binaries["suite"] = built("test", "--no-run", "--test", "suite")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    glibc = max(stripped(binary, name) for name, binary in binaries.items())
    pack_data()
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

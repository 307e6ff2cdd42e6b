#!/usr/bin/env python3
"""Builds a release of the commit that is checked out: target/release-VERSION/unicorn-VERSION-linux-ARCH.tar.gz.

    tools/release.py           one archive, and its SHA-256 (`make release`)
    tools/release.py --twice   builds it in two folders, and fails unless both archives are the same to the bit

The sources are those of the commit, whatever else lies in the working tree. Nothing of the machine gets into the
archive: paths are replaced, times are the commit's, files belong to root, and the order is fixed. Whoever has the same
toolchain (`rust-version` and the linker of the same distribution) gets the same archive.
"""

import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What `make install` needs, and what its reader wants to read.
FILES = ["LICENSE", "README.md", "CHANGELOG.md", "config", "docs/operations.md", "tools/install.sh"]
# Where sources and dependencies seem to lie.
SOURCES, DEPENDENCIES, TOOLCHAIN = "/unicorn", "/cargo", "/rust"


def said(*command, folder=ROOT):
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build(commit, time, folder):
    """Builds the commit's binary in a folder, and returns its path."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=sources, input=archive, check=True)
    cargo_home = os.environ.get("CARGO_HOME") or Path.home() / ".cargo"
    seem = {folder: SOURCES, cargo_home: DEPENDENCIES, said("rustc", "--print", "sysroot"): TOOLCHAIN}
    rust = [f"--remap-path-prefix={path}={name}" for path, name in seem.items()]
    c = " ".join(f"-ffile-prefix-map={path}={name}" for path, name in seem.items())
    environment = {
        **os.environ,
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join([*rust, "-Cstrip=symbols"]),
        "CARGO_INCREMENTAL": "0",
        "CARGO_TARGET_DIR": str(folder / "target"),
        "CFLAGS": c,
        "CXXFLAGS": c,
        "SOURCE_DATE_EPOCH": time,
        "UNICORN_BUILD_COMMIT": commit,
    }
    subprocess.run(["cargo", "build", "--locked", "--bin", "unicorn"], cwd=sources, env=environment, check=True)
    return sources, folder / "target/debug/unicorn"


def pack(sources, binary, time, name, archive):
    """Writes the archive, and returns its SHA-256."""

    def plain(entry):
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = int(time)
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with gzip.GzipFile(archive, "wb", 9, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(binary, f"{name}/unicorn", filter=plain)
        for file in FILES:
            tar.add(sources / file, f"{name}/{file}", filter=plain)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def main(arguments):
    if arguments not in ([], ["--twice"]):
        sys.exit(__doc__)
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["version"]
    commit = said("git", "rev-parse", "--short=12", "HEAD")
    time = said("git", "show", "-s", "--format=%ct", commit)
    name = f"unicorn-{version}-linux-{platform.machine()}"
    result = ROOT / "target" / f"release-{version}"
    result.mkdir(parents=True, exist_ok=True)
    sums = []
    for turn in ["one", "another"][: 1 + len(arguments)]:
        with tempfile.TemporaryDirectory(prefix=f"unicorn-{turn}-") as folder:
            sources, binary = build(commit, time, Path(folder))
            archive = Path(folder) / "archive.tar.gz"
            sums.append(pack(sources, binary, time, name, archive))
            shutil.copyfile(archive, result / f"{name}.tar.gz")
        print(f"{sums[-1]}  {name}.tar.gz of commit {commit}")
    if len(set(sums)) != 1:
        sys.exit("error: two builds of one commit differ")
    (result / f"{name}.tar.gz.sha256").write_text(f"{sums[0]}  {name}.tar.gz\n")
    print(f"it lies in {os.path.relpath(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])

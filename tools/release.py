#!/usr/bin/env python3
"""Builds a release of the checked-out commit in target/release-VERSION: an archive,
unicorn-VERSION-linux-ARCH.tar.gz, and a Debian package, unicorn-execution-engine_VERSION-1_ARCH.deb.

    tools/release.py           both, and their SHA-256 (`make release`)
    tools/release.py --twice   builds them in two folders, and fails unless both have the same bits
    tools/release.py --deb BINARY FOLDER
                               writes a Debian package of an existing binary, for tests

Only files of the commit are used, and no other files of the working tree. The archive contains nothing of the machine:
paths are replaced, times are the commit's, files belong to root, and the order is fixed. The same toolchain
(`rust-version` and the linker of the same distribution) always produces the same files.
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
CARGO_DEB, CARGO_DEB_VERSION = ROOT / ".cache/cargo-deb", "3.8.0"
# The files that `make install` needs, and documents for users.
FILES = ["LICENSE", "README.md", "CHANGELOG.md", "config", "docs/install.md", "docs/operations.md", "tools/install.sh",
         "src/api/page/libraries/licences.txt"]
# The paths that replace those of sources and dependencies.
SOURCES, DEPENDENCIES, TOOLCHAIN = "/unicorn", "/cargo", "/rust"


def said(*command, folder=ROOT, environment=None):
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


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


def archive(sources, binary, time, name, path):
    """Writes the archive."""

    def plain(entry):
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = int(time)
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with gzip.GzipFile(path, "wb", 9, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(binary, f"{name}/unicorn", filter=plain)
        for file in FILES:
            tar.add(sources / file, f"{name}/{file}", filter=plain)


def cargo_deb():
    """The path of the program. The first call builds it."""
    program = CARGO_DEB / "bin/cargo-deb"
    if not program.exists() or CARGO_DEB_VERSION not in said(program, "--version"):
        subprocess.run(["cargo", "install", "--quiet", "--locked", f"--version={CARGO_DEB_VERSION}", f"--root={CARGO_DEB}", "cargo-deb"],
                       check=True)
    return program


def deb(sources, binary, time, folder, version=None):
    """Writes the Debian package into a folder, and returns its path. It has the files that `make install` installs."""
    stage = sources / "target/package"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    subprocess.run(["sh", sources / "tools/install.sh", binary], env={**os.environ, "DESTDIR": str(stage), "PREFIX": "/usr"}, check=True)
    version = [f"--deb-version={version}"] if version else []
    out = said(cargo_deb(), "--quiet", "--no-build", "--no-strip", f"--output={folder}/", *version, folder=sources,
               environment={**os.environ, "SOURCE_DATE_EPOCH": time})
    return Path(out.splitlines()[-1])


def main(arguments):
    if arguments[:1] == ["--deb"] and len(arguments) == 3:
        return print(deb(ROOT, Path(arguments[1]).resolve(), said("git", "show", "-s", "--format=%ct", "HEAD"), Path(arguments[2]).resolve()))
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
            folder = Path(folder)
            sources, binary = build(commit, time, folder)
            archive(sources, binary, time, name, folder / f"{name}.tar.gz")
            files = [folder / f"{name}.tar.gz", deb(sources, binary, time, folder)]
            sums.append("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))
            for file in files:
                shutil.copyfile(file, result / file.name)
        print(f"{sums[-1]}of commit {commit}")
    if len(set(sums)) != 1:
        sys.exit("error: two builds of one commit differ")
    (result / "SHA256SUMS").write_text(sums[0])
    print(f"the files are in {os.path.relpath(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])

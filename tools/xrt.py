#!/usr/bin/env python3
"""Fetches XRT, the runtime of the NPU, from Debian's next release, into a folder for tests.

    tools/xrt.py     makes both folders, if they do not exist, and prints them

`.cache/xrt` has, unpacked from the archive of this machine's own apt sources: XRT with its plugin for the NPU, its
headers, `xclbinutil`, and all libraries that they need, including the C library. They are newer than in Debian 12, so a
program runs with their own dynamic linker (`command`). Nothing is installed on the machine. The file `versions` in the
folder has each package with its version and checksum.

`.cache/xrt-2.13` has the XRT of Debian 12 and 13. It has no `hw_context`, and the same library name as 2.25.
"""

import hashlib
import sys
from pathlib import Path

import devices
import setup
from devices import DevicesError

FOLDER = devices.ROOT / ".cache/xrt"
OLD = devices.ROOT / ".cache/xrt-2.13"
# Debian's next release is the first that has XRT with a plugin for the NPU.
SUITE = "forky"
# Packages that are unpacked with all their dependencies.
PROGRAMS = ("libxrt2", "libxrt-npu2", "libxrt-utils")
# The package of the headers depends on all of Python, which no test needs.
HEADERS = ("libxrt-dev",)
OLD_SUITE = "trixie"
# Its other dependencies are in the folder of the newer XRT.
OLD_PACKAGES = ("libxrt1", "libboost-filesystem1.83.0")
LINKER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def command(arguments, preload=(), before=()):
    """The command that runs a program with the libraries of `.cache/xrt`. Libraries in the folders `before` have
    priority."""
    preloaded = ["--preload", ":".join(map(str, preload))] if preload else []
    folders = ":".join(str(folder / LIBRARIES) for folder in (*before, FOLDER))
    return [str(FOLDER / LINKER), "--library-path", folders, *preloaded, *map(str, arguments)]


def versions(files):
    """A line for each package: name, version, architecture, and SHA-256."""
    return "".join(f"{file.stem.replace('_', ' ')} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)


def fill(work, into, sources, whole, alone):
    """Unpacks packages: `whole` with all their dependencies, `alone` without."""
    apt = devices.PrivateApt(work / "apt", sources)
    if whole:
        apt.download(whole, with_dependencies=True)
    files = apt.download(alone, with_dependencies=False)
    for file in files:
        devices.unpack(file, into)
    (into / "versions").write_text(versions(files))


def make(say, folder=FOLDER, suite=SUITE, whole=PROGRAMS, alone=HEADERS):
    """Makes `.cache/xrt`, and returns it."""
    release = setup.os_release(Path("/etc/os-release").read_text())
    source = devices.mirror(setup.read_sources(), release.get("VERSION_CODENAME", ""))
    if release.get("ID") != "debian" or source is None:
        raise DevicesError("XRT for tests comes from Debian's own archive, and no apt source of this machine names it")
    text = devices.stanza(source.uri, [suite], source.signed_by)
    recipe = devices.recipe_of(text, whole, alone)
    devices.make_folder(folder, recipe, lambda work, into: fill(work, into, text, whole, alone), say)
    return folder


def make_old(say, folder=OLD):
    """Makes `.cache/xrt-2.13`, and returns it."""
    return make(say, folder, OLD_SUITE, (), OLD_PACKAGES)


if __name__ == "__main__":
    try:
        for maker in (make, make_old):
            print(maker(lambda line: print(f"xrt: {line}", file=sys.stderr, flush=True)))
    except DevicesError as error:
        sys.exit(f"xrt: {error}")

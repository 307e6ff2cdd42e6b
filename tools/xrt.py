#!/usr/bin/env python3
"""XRT, the runtime of the NPU, as Debian's next release has it, in a folder for tests.

    tools/xrt.py     makes both folders, if they are not there, and prints them

`.cache/xrt` holds, unpacked from the archive that this machine's own apt sources name: XRT with its plugin for the NPU,
its headers, `xclbinutil`, and all libraries that they need, the C library among them. They are newer than what Debian 12
has, so a program runs on them by their own dynamic linker (`command`). Nothing is installed on the machine. The file
`versions` in the folder has each package with its version and checksum.

`.cache/xrt-2.13` holds the XRT that Debian 12 and 13 have. It has no `hw_context`, and the library's name of 2.25.
"""

import hashlib
import sys
from pathlib import Path

import devices
import setup
from devices import DevicesError

FOLDER = devices.ROOT / ".cache/xrt"
OLD = devices.ROOT / ".cache/xrt-2.13"
# Debian's next release, and the first that has XRT with a plugin for the NPU.
SUITE = "forky"
# These come with all that they depend on.
PROGRAMS = ("libxrt2", "libxrt-npu2", "libxrt-utils")
# The headers' package depends on all of Python, which no test needs.
HEADERS = ("libxrt-dev",)
OLD_SUITE = "trixie"
# What else it needs is in the newer one's folder.
OLD_PACKAGES = ("libxrt1", "libboost-filesystem1.83.0")
LINKER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def command(arguments, preload=(), before=()):
    """The command that runs a program on the libraries of `.cache/xrt`, with those of the folders `before` preferred."""
    preloaded = ["--preload", ":".join(map(str, preload))] if preload else []
    folders = ":".join(str(folder / LIBRARIES) for folder in (*before, FOLDER))
    return [str(FOLDER / LINKER), "--library-path", folders, *preloaded, *map(str, arguments)]


def versions(files):
    """A line for each package: name, version, architecture, and SHA-256."""
    return "".join(f"{file.stem.replace('_', ' ')} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)


def fill(work, into, sources, whole, alone):
    """Unpacks packages: `whole` with all that they depend on, `alone` without."""
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

"""XRT, the runtime of the NPU, as Debian's next release has it, in a folder for tests.

    tools/xrt.py     prints the folder, after making it if it is not there

`.cache/xrt` holds, unpacked from the archive that this machine's own apt sources name: XRT with its plugin for the NPU,
its headers, `xclbinutil`, and all libraries that they need, the C library among them. They are newer than what Debian 12
has, so a program runs on them by their own dynamic linker (`command`). Nothing is installed on the machine. The file
`versions` in the folder has each package with its version and checksum.
"""

import hashlib
import sys
from pathlib import Path

import devices
import setup
from devices import DevicesError

FOLDER = devices.ROOT / ".cache/xrt"
# Debian's next release, and the first that has XRT with a plugin for the NPU.
SUITE = "forky"
# These come with all that they depend on.
PROGRAMS = ("libxrt2", "libxrt-npu2", "libxrt-utils")
# The headers' package depends on all of Python, which no test needs.
HEADERS = ("libxrt-dev",)
LINKER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def command(arguments, folder=FOLDER, preload=()):
    """The command that runs a program on the libraries of `folder`."""
    preloaded = ["--preload", ":".join(map(str, preload))] if preload else []
    return [str(folder / LINKER), "--library-path", str(folder / LIBRARIES), *preloaded, *map(str, arguments)]


def versions(files):
    """A line for each package: name, version, architecture, and SHA-256."""
    return "".join(f"{file.stem.replace('_', ' ')} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)


def fill(work, into, sources):
    apt = devices.PrivateApt(work / "apt", sources)
    apt.download(PROGRAMS, with_dependencies=True)
    files = apt.download(HEADERS, with_dependencies=False)
    for file in files:
        devices.unpack(file, into)
    (into / "versions").write_text(versions(files))


def make(say, folder=FOLDER):
    """Makes `.cache/xrt`, and returns it."""
    release = setup.os_release(Path("/etc/os-release").read_text())
    source = devices.mirror(setup.read_sources(), release.get("VERSION_CODENAME", ""))
    if release.get("ID") != "debian" or source is None:
        raise DevicesError("XRT for tests comes from Debian's own archive, and no apt source of this machine names it")
    text = devices.stanza(source.uri, [SUITE], source.signed_by)
    devices.make_folder(folder, devices.recipe_of(text, PROGRAMS, HEADERS), lambda work, into: fill(work, into, text), say)
    return folder


if __name__ == "__main__":
    try:
        print(make(lambda line: print(f"xrt: {line}", file=sys.stderr, flush=True)))
    except DevicesError as error:
        sys.exit(f"xrt: {error}")

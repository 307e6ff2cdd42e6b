#!/usr/bin/env python3
"""Tests the README's promise: `make serve` and `make test` work on a new machine without any files of the project.

    tools/fresh_machine.py bookworm

The machine is a new chroot of that release, made by debootstrap (`tools/setup.py service` installs it), with the
packages that the README requires: a C++ compiler, make and Python 3. It uses this machine's Rust, network and
certificates, and the files of HEAD. Packages come from the archive of this machine's own apt sources, or from `MIRROR`.
If the archive does not have the release, nothing is run, and the exit status is 3. Needs root, 20 GB of disk, and an
hour on two cores.

The chroot is `.cache/fresh-RELEASE`. It is removed after both commands have passed, and kept for inspection otherwise.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import devices
import setup

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["g++", "make", "python3", "ca-certificates"]
NETWORK = ["/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"]
HOME = "home"
# What a command in the chroot sees in addition to its own files.
MOUNTS = """
set -eu
fresh=$1; shift
# A process whose root is the root of a mount namespace, which a chroot is not, may create namespaces, as test devices
# need.
mount --bind "$fresh" "$fresh"
mount -t proc proc "$fresh/proc"
mount --rbind /dev "$fresh/dev"
mount --rbind /sys "$fresh/sys"
for bind in $BINDS; do
    mount --bind "${bind%%=*}" "$fresh${bind#*=}"
done
cd "$fresh"
mkdir -p .before
pivot_root . .before
umount -l .before
exec /usr/bin/env -i HOME="$FOLDER" LANG=C.UTF-8 PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c "cd /src && $*"
"""
ADDRESS = "http://localhost:8010"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
SERVE_SECONDS = 3600
TEST_SECONDS = 5400


class NotRun(Exception):
    """Why this release cannot be tested here."""


def own_release():
    return setup.os_release(Path("/etc/os-release").read_text()).get("VERSION_CODENAME", "")


def archive(release):
    """The address of an archive that has `release`."""
    own = own_release()
    source = devices.mirror(setup.read_sources(), own)
    address = os.environ.get("MIRROR") or (source and source.uri)
    if not address:
        raise NotRun(f"no apt source of this machine serves {own or 'its release'}, and MIRROR names none")
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/dists/{release}/Release", timeout=60).close()
    except (urllib.error.URLError, OSError) as error:
        raise NotRun(f"the archive of this machine's apt sources has no {release} ({error}); MIRROR can name another") from error
    return address


def sources(release, address):
    """The apt sources of `release`: the archive, and updates and security fixes from the addresses that this machine
    uses."""
    lines = [f"deb {address} {release} main"]
    own = own_release()
    for source in [] if "MIRROR" in os.environ else setup.read_sources():
        lines += [f"deb {source.uri} {release}-{kind} main" for kind in ("updates", "security") if f"{own}-{kind}" in source.suites]
    return "\n".join(lines) + "\n"


def bootstrap(release, fresh, packages):
    """Makes a machine of that release in a folder, with this machine's network and certificates."""
    address = archive(release)
    if fresh.exists():
        shutil.rmtree(fresh)
    components = "main,universe" if "ubuntu" in address else "main"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--components={components}", f"--include={','.join(packages)}", release, fresh, address],
        check=True, stdout=subprocess.DEVNULL,
    )
    if components == "main":
        (fresh / "etc/apt/sources.list").write_text(sources(release, address))
    for path in NETWORK:
        (fresh / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, fresh / path[1:])


def toolchain():
    """This machine's Rust: the folder of toolchains, and the folder of cargo's programs."""
    home = Path.home()
    return os.environ.get("RUSTUP_HOME", home / ".rustup"), Path(os.environ.get("CARGO_HOME", home / ".cargo")) / "bin"


def make(release, fresh):
    bootstrap(release, fresh, PACKAGES)
    for folder in [fresh / "src", fresh / HOME / ".rustup", fresh / HOME / ".cargo" / "bin"]:
        folder.mkdir(parents=True)
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", fresh / "src"], input=files, check=True)


def start(fresh, command, binds=None, **options):
    """Starts `command` in the machine. Its processes and mounts end with it. `binds` = folders of this machine, by
    their path in the new one."""
    env = {**os.environ, "FOLDER": f"/{HOME}", "BINDS": " ".join(f"{here}={there}" for there, here in (binds or {}).items())}
    inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", MOUNTS, "sh", str(fresh), command]
    return subprocess.Popen(inside, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def start_with_rust(fresh, command):
    rustup, programs = toolchain()
    return start(fresh, command, {f"/{HOME}/.rustup": rustup, f"/{HOME}/.cargo/bin": programs})


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class NoServer(Exception):
    """What happened instead of the server becoming ready."""


def ask(url, body=None, seconds=60, key=None):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.load(response)


def first_answer(process, address, seconds, key=None):
    """Waits until a starting server is ready, and asks it one question. Stops it, and returns the answer."""
    try:
        end = time.monotonic() + seconds
        while True:
            if process.poll() is not None:
                raise NoServer(f"it exited with {process.returncode}")
            try:
                ask(f"{address}/health")
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise NoServer(f"it was not ready after {seconds} s ({error})") from error
                time.sleep(0.2)
        return ask(f"{address}/v1/chat/completions", QUESTION, key=key)["choices"][0]["message"]["content"]
    finally:
        stop(process)


def serve(fresh):
    """Runs `make serve` until it has answered one question; returns the answer."""
    try:
        return first_answer(start_with_rust(fresh, "make serve"), ADDRESS, SERVE_SECONDS)
    except NoServer as why:
        raise SystemExit(f"`make serve`: {why}") from why


def test(fresh):
    process = start_with_rust(fresh, "make test")
    try:
        if process.wait(TEST_SECONDS) != 0:
            raise SystemExit(f"`make test` exited with {process.returncode}")
    except subprocess.TimeoutExpired:
        raise SystemExit(f"`make test` took longer than {TEST_SECONDS} s") from None
    finally:
        stop(process)


def main(arguments):
    if len(arguments) != 1:
        raise SystemExit(f"usage: {sys.argv[0]} RELEASE")
    release = arguments[0]
    fresh = ROOT / ".cache" / f"fresh-{release}"
    try:
        make(release, fresh)
    except NotRun as why:
        print(f"{release}: not run: {why}")
        sys.exit(3)
    name = setup.os_release((fresh / "etc/os-release").read_text())["PRETTY_NAME"]
    begun = time.monotonic()
    answer = serve(fresh)
    served = time.monotonic()
    test(fresh)
    tested = time.monotonic()
    shutil.rmtree(fresh)
    print(f"{name}: `make serve` answered {answer!r} after {served - begun:.0f} s, `make test` passed in {tested - served:.0f} s more")


if __name__ == "__main__":
    main(sys.argv[1:])

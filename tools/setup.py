#!/usr/bin/env python3
"""Installs the packages that running or testing Unicorn needs and this machine lacks.

    tools/setup.py run     the Vulkan loader and Mesa's Vulkan drivers, version 24 or later
    tools/setup.py smollm2 the packages of `run`, and Python's venv module, to fetch SmolLM2
    tools/setup.py test    also the validation layers, curl, Python's venv module and systemd-analyze; and Chromium,
                           Node.js, npm and HAProxy for the tests of the page, of clients and of several servers,
                           which are skipped without them
    tools/setup.py measure the packages of `run`, and fio to measure the disk's speed
    tools/setup.py service the packages of `run`, and tools to make and boot a container with systemd
    tools/setup.py release the packages of `run`, and the tool that finds a package's dependencies for cargo-deb
    tools/setup.py packages the packages of `release`, and tools to make a new machine in a folder and to build a container
    tools/setup.py devices nothing on the machine; devices that replace GPUs, in .cache/devices (tools/devices.py)

Works on Debian 12, Debian 13 and Ubuntu (24.04 or later), as root or with sudo. If the release's own Mesa is too old
and the distribution has backports (Debian 12), the backports suite is added to the machine's own sources, with the same
mirror, key and component (main). A pin limits backports to the packages named here and their dependencies. Each run
asks dpkg which packages are installed: there is no stamp file, and a second run takes a fraction of a second. No
package is ever removed. If a source was added without success, it is removed again.

UNICORN_SKIP_SETUP=1 skips everything, for machines whose Vulkan comes from somewhere else.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import devices

MESA_MAJOR = 24
RUST_MINOR = 88
APT = Path("/etc/apt")
OWN_SOURCE = APT / "sources.list.d/unicorn-backports.sources"
OWN_PIN = APT / "preferences.d/unicorn-backports"
UPDATE_SECONDS = 300
INSTALL_SECONDS = 1200


class SetupError(Exception):
    """An error in one line: what happened, and what to do."""


@dataclass(frozen=True)
class Need:
    """A package, and the lowest sufficient upstream major version."""

    package: str
    major: int = 0
    # The command that the package provides. If the machine already has the command, the package is not needed.
    command: str = ""


RUN = [Need("libvulkan1"), Need("mesa-vulkan-drivers", MESA_MAJOR)]
TEST = RUN + [
    Need("vulkan-validationlayers"), Need("curl"), Need("ca-certificates"), Need("python3-venv"),
    Need("systemd", command="systemd-analyze"),
]
# Ubuntu has Chromium only as a snap, on which tests cannot rely. tests/skips.toml lists the tests that need these
# packages.
BROWSER = [Need("chromium", command="chromium"), Need("nodejs", command="node"), Need("npm", command="npm")]
# A test runs two servers behind HAProxy. The service that Debian's package starts listens on no port.
PROXY = [Need("haproxy", command="haproxy")]
MEASURE = RUN + [Need("fio")]
SERVICE = RUN + [Need("debootstrap", command="debootstrap"), Need("systemd-container", command="systemd-nspawn")]
RELEASE = RUN + [Need("dpkg-dev", command="dpkg-shlibdeps")]
PACKAGES = RELEASE + [Need("debootstrap", command="debootstrap"), Need("buildah", command="buildah")]
NEEDS = {"run": RUN, "smollm2": RUN + [Need("python3-venv")], "test": TEST, "measure": MEASURE, "service": SERVICE, "release": RELEASE, "packages": PACKAGES}
WISHES = {"test": BROWSER + PROXY}


# --- installed packages -------------------------------------------------------------------------------


def major(version):
    """Upstream major of a Debian version: `1:25.0.7-2~bpo12+1` -> 25. 0 = the version does not begin with a number."""
    match = re.match(r"(?:\d+:)?(\d+)", version)
    return int(match.group(1)) if match else 0


def installed_versions(packages):
    """Versions of the fully installed packages among `packages`."""
    out = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}\t${db:Status-Status}\t${Version}\n", *packages],
        capture_output=True, text=True, check=False,  # exits 1 if a package is unknown
    ).stdout
    rows = (line.split("\t") for line in out.splitlines())
    return {name: version for name, status, version in rows if status == "installed"}


def missing(needs):
    needs = [need for need in needs if not (need.command and shutil.which(need.command))]
    have = installed_versions([need.package for need in needs]) if needs else {}
    return [need for need in needs if need.package not in have or major(have[need.package]) < need.major]


def os_release(text):
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip().strip("\"'") for key, value in pairs}


def check_toolchain():
    cargo = shutil.which("cargo") or shutil.which("cargo", path=os.path.expanduser("~/.cargo/bin"))
    if not cargo:
        raise SetupError("cargo not found: install Rust 1.%d or later (https://rustup.rs)" % RUST_MINOR)
    version = subprocess.run([cargo, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"cargo (\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < (1, RUST_MINOR):
        raise SetupError(f"{cargo} is {version.strip() or 'not working'}; 1.{RUST_MINOR} or later is needed: rustup update")
    if not any(map(shutil.which, ["c++", "g++", "clang++"])):
        raise SetupError("no C++ compiler found (the shader compiler is built from source): apt-get install g++")


# --- the machine's own apt sources ----------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One archive: its address, and the key that signs it ('' = apt's default key ring)."""

    uri: str
    suites: tuple
    signed_by: str = ""
    options: tuple = ()


def parse_deb822(text):
    """The enabled binary sources of a `*.sources` file."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    sources = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields, last = {}, None
        for line in stanza.splitlines():
            if line[:1] in " \t" and last:
                fields[last] += "\n" + line
            elif ":" in line:
                last, value = line.split(":", 1)
                last = last.strip().lower()
                fields[last] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off", "without", "disable")
        if enabled and "deb" in fields.get("types", "").split() and "main" in fields.get("components", "").split():
            for uri in fields.get("uris", "").split():
                sources.append(Source(uri, tuple(fields.get("suites", "").split()), fields.get("signed-by", "")))
    return sources


def parse_one_line(text):
    """The binary sources of a `sources.list` file."""
    sources = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line)
        if match and "main" in match[4].split():
            options = dict(option.split("=", 1) for option in (match[1] or "").split() if "=" in option)
            sources.append(Source(match[2], (match[3],), options.get("signed-by", "").replace(",", " ")))
    return sources


def read_sources(apt=APT):
    sources = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if path.is_file() and path.suffix in (".sources", ".list"):
            text = path.read_text(errors="replace")
            sources += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    return sources


def backports_source(sources, codename):
    """The text of the source file for backports, from the archive that serves the release itself. None = there is
    none."""
    source = devices.mirror(sources, codename)
    text = source and devices.stanza(source.uri, [f"{codename}-backports"], source.signed_by)
    return text and f"# Added by Unicorn's tools/setup.py for Mesa's Vulkan drivers.\n{text}"


def backports_pin(codename):
    return (
        "# Added by Unicorn's tools/setup.py: packages come from backports only on request.\n"
        f"Package: *\nPin: release n={codename}-backports\nPin-Priority: 100\n"
    )


# --- acting as root -------------------------------------------------------------------------------------


class Root:
    """Runs commands as root: directly, or through sudo."""

    def __init__(self):
        if os.geteuid() == 0:
            self.prefix = []
        elif not shutil.which("sudo"):
            raise SetupError("packages are missing, and this is neither root nor a machine with sudo: "
                             "run `python3 tools/setup.py test` as root once")
        else:
            self.prefix = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
            if subprocess.run([*self.prefix, "true"], check=False).returncode != 0:
                raise SetupError("packages are missing, and sudo was refused: "
                                 "run `python3 tools/setup.py test` as root once")

    def run(self, command, seconds, stdin=None):
        """Exit status and output, with both streams together."""
        try:
            done = subprocess.run(
                [*self.prefix, "env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C", *command],
                input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
            )
        except subprocess.TimeoutExpired as expired:
            raise SetupError(f"`{' '.join(command)}` did not finish within {seconds} s: is the mirror reachable?") from expired
        return done.returncode, done.stdout

    def write(self, path, text):
        code, out = self.run(["tee", str(path)], 30, stdin=text)
        if code != 0:
            raise SetupError(f"cannot write {path}: {out.strip()}")

    def remove(self, *paths):
        self.run(["rm", "-f", *map(str, paths)], 30)


def apt_options():
    return ["-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=2"]


def update(root):
    """Refreshes the package lists. Returns the first failure, or '' if there was none."""
    code, out = root.run(["apt-get", *apt_options(), "update"], UPDATE_SECONDS)
    failures = [line for line in out.splitlines() if re.match(r"(E:|Err:|W: Failed to fetch)", line)]
    return failures[0] if failures else ("" if code == 0 else out.strip().splitlines()[-1])


def available_versions(package):
    """Version -> suites that offer it, from `apt-cache madison`."""
    out = subprocess.run(["apt-cache", "madison", package], capture_output=True, text=True, check=False).stdout
    versions = {}
    for line in out.splitlines():
        _, version, origin = (part.strip() for part in line.split("|"))
        words = origin.split()
        if len(words) > 1:
            versions.setdefault(version, []).append(words[1].split("/")[0])
    return versions


def choose(need, versions, backports):
    """The argument for apt: the package from the release itself if it is new enough, otherwise from backports. None =
    both are too old. `versions` = the result of `available_versions`, newest first."""
    for version, suites in versions.items():
        if major(version) >= need.major and any(suite != backports for suite in suites):
            return need.package
    for version, suites in versions.items():
        if major(version) >= need.major and backports in suites:
            return f"{need.package}/{backports}"
    return None


def install(needs, release):
    root = Root()
    codename = release.get("VERSION_CODENAME", "")
    backports = f"{codename}-backports"
    name = release.get("PRETTY_NAME", "this system")
    say("installing " + ", ".join(need.package for need in needs))
    trouble = update(root)

    def wanted():
        return {need: choose(need, available_versions(need.package), backports) for need in needs}

    choice, added = wanted(), False
    try:
        lacking = [need for need, ask in choice.items() if ask is None]
        if trouble and any(not available_versions(need.package) for need in lacking):
            raise SetupError(unavailable(lacking[0], name, release, trouble))
        has_backports = any(backports in source.suites for source in read_sources())
        if lacking and release.get("ID") == "debian" and not has_backports:
            text = backports_source(read_sources(), codename)
            if text is None:
                raise SetupError(f"no source for {codename} main in /etc/apt: cannot tell which mirror to take {backports} from")
            say(f"adding {backports} ({OWN_SOURCE}): {name} itself has no {lacking[0].package} {lacking[0].major or ''}".rstrip())
            root.write(OWN_PIN, backports_pin(codename))
            root.write(OWN_SOURCE, text)
            added = True
            trouble = update(root)
            choice = wanted()
        for need, ask in choice.items():
            if ask is None:
                raise SetupError(unavailable(need, name, release, trouble))
        code, out = root.run(
            ["apt-get", *apt_options(), "install", "-y", "--no-remove", "--no-install-recommends", *choice.values()],
            INSTALL_SECONDS,
        )
        if code != 0:
            reasons = [line for line in out.splitlines() if line.startswith("E:")] or out.strip().splitlines()[-1:]
            raise SetupError(f"apt-get could not install {' '.join(choice.values())}: {reasons[0]}")
        still = missing(needs)
        if still:
            raise SetupError(f"apt-get reported success, but {still[0].package} is not installed in the required version")
    except BaseException:
        if added:
            root.remove(OWN_SOURCE, OWN_PIN)
            root.run(["apt-get", *apt_options(), "update"], UPDATE_SECONDS)
        raise


def unavailable(need, name, release, trouble):
    versions = available_versions(need.package)
    if trouble:
        return f"{need.package} is missing and apt cannot fetch its lists (offline?): {trouble}"
    if versions and need.major:
        newest = max(versions, key=major)
        hint = "use Ubuntu 24.04 or later" if release.get("ID") == "ubuntu" else "use Debian 12 or later"
        return f"{name} offers {need.package} {newest}, but version {need.major} or later is needed: {hint}"
    hint = "; is the component `universe` enabled?" if release.get("ID") == "ubuntu" else ""
    return f"{name} offers no package {need.package}{hint}"


def say(text):
    print(f"setup: {text}", flush=True)


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in [*NEEDS, "devices"]:
        raise SetupError(f"usage: tools/setup.py {'|'.join(NEEDS)}|devices")
    path = Path("/etc/os-release")
    release = os_release(path.read_text()) if path.exists() else {}
    if arguments[0] == "devices":
        devices.make(read_sources(), release, say)
        return
    check_toolchain()
    if os.environ.get("UNICORN_SKIP_SETUP") == "1":
        say("UNICORN_SKIP_SETUP=1: packages are not checked")
        return
    needs = NEEDS[arguments[0]]
    if release.get("ID") not in ("debian", "ubuntu") or not shutil.which("apt-get"):
        raise SetupError(
            f"{release.get('PRETTY_NAME', 'this system')} is neither Debian nor Ubuntu: install the Vulkan loader, Mesa's Vulkan "
            f"drivers {MESA_MAJOR} or later and (for tests) the validation layers, curl, HAProxy and Python's venv yourself, "
            "then set UNICORN_SKIP_SETUP=1"
        )
    lacking = missing(needs)
    if lacking:
        install(lacking, release)
    wished = missing(WISHES.get(arguments[0], []))
    if wished:
        try:
            install(wished, release)
        except SetupError as error:
            say(f"without {', '.join(need.package for need in wished)}: {error}")
    have = installed_versions([need.package for need in needs])
    say(", ".join(f"{package} {version}" for package, version in have.items()))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SetupError, devices.DevicesError) as error:
        print(f"setup: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

"""The devices that replace GPUs in tests: how they are installed, and how a test selects one.

`make(...)`, which `tools/setup.py devices` calls, fills `.cache/devices/` from the machine's own apt mirror. It changes
nothing else on the machine:

    mesa26/    Mesa 26 of Debian's trixie-backports and all its dependencies, unpacked: lavapipe, RADV, and the shim
               with which RADV opens a GPU that is not present. It needs a newer C library than Debian 12 has, so programs
               see it in an overlay: `tools/with_mesa26.sh`
    chromium/  SwiftShader, and the Vulkan validation layer 1.4 with its manifest and its settings for GPU-assisted
               validation

A folder gets its name once it is complete. It contains the recipe that made it. A second run reuses it.

`DEVICES` gives, by name, the environment and the wrapper command that select a device. Everything except the overlay is
in the environment, so tests in any language can use the table:

    devices.DEVICES["lavapipe-26"].command(["target/debug/unicorn", "devices"])
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache/devices"
MESA26, CHROMIUM = FOLDER / "mesa26", FOLDER / "chromium"
LAYER_FLAW = CHROMIUM / "layer-is-too-old"
# The file with the recipe of a folder.
RECIPE = "recipe"

MESA26_SUITES = ("trixie", "trixie-backports")
MESA26_PACKAGES = ("libvulkan1", "mesa-vulkan-drivers", "mesa-drm-shim")
# The layer of Chromium 150 reports races of a shared variable between an invocation and itself. The layer of 156
# reports none. Debian's release may still have an old Chromium that its security fixes have replaced.
LAYER_MAJOR = 156
CHROMIUM_FILES = ("libvk_swiftshader.so", "vk_swiftshader_icd.json", "libVkLayer_khronos_validation.so")
UPDATE_SECONDS = 300
DOWNLOAD_SECONDS = 1200
UNPACK_SECONDS = 300

LAYER_MANIFEST = """\
{
    "file_format_version": "1.2.0",
    "layer": {
        "name": "VK_LAYER_KHRONOS_validation",
        "type": "GLOBAL",
        "library_path": "./libVkLayer_khronos_validation.so",
        "api_version": "1.4.0",
        "implementation_version": "1",
        "description": "Khronos validation layer, as Chromium brings it",
        "instance_extensions": [
            { "name": "VK_EXT_debug_utils", "spec_version": "2" },
            { "name": "VK_EXT_validation_features", "spec_version": "6" },
            { "name": "VK_EXT_layer_settings", "spec_version": "2" }
        ]
    }
}
"""

# The layer checks the bounds of buffer addresses, and races of shared memory. The installed layer checks the use of the
# API in other runs. The filter drops the layer's message about features that it enables for itself.
LAYER_SETTINGS = """\
khronos_validation.gpuav_enable = true
khronos_validation.gpuav_safe_mode = true
khronos_validation.validate_core = false
khronos_validation.message_id_filter = WARNING-Setting-Limit-Adjusted
"""


class DevicesError(Exception):
    """An error in one line: what happened, and what to do."""


# --- how a device is chosen -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A device that replaces a GPU, and the way to select it."""

    name: str
    what: str
    environment: dict = field(default_factory=dict)
    wrapper: tuple = ()
    # A path that must exist: a folder of `.cache/devices`, or the manifest of an installed driver.
    needs: Path | None = None
    # A file with one line that says why the device cannot be used. It exists only in this case.
    flaw: Path | None = None
    # Whether submitted work is computed. Otherwise the device only compiles.
    runs: bool = True

    def lacking(self):
        """Why the device cannot be used here, in one line. None = it can be used."""
        if self.flaw and self.flaw.exists():
            return f"{self.name}: {self.flaw.read_text().strip()}"
        if self.needs is None or self.needs.exists():
            return None
        how = "make setup-devices" if self.needs.is_relative_to(FOLDER) else "make setup"
        return f"{self.name} needs {self.needs}, which does not exist: `{how}`"

    def command(self, arguments):
        """The command that runs `arguments` on the device, environment included."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items()), *self.wrapper, *arguments]


def driver(manifest):
    """The environment that shows only one driver to the loader. Loaders before 1.3.207 use the older name."""
    return {"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}


def machine_driver(name):
    """The manifest of an installed driver. Some distributions put the architecture into its name."""
    paths = [Path(f"/usr/share/vulkan/icd.d/{name}_icd{architecture}.json") for architecture in ("", ".x86_64", ".aarch64")]
    return next((path for path in paths if path.exists()), paths[0])


def llvm_release(manifest):
    """The release of LLVM with which the driver of a manifest compiles. None = it uses none, or does not load."""
    try:
        library = json.loads(manifest.read_text())["ICD"]["library_path"]
    except (OSError, ValueError, KeyError):
        return None
    # A name without a folder is for the system's search path.
    path = manifest.parent / library if "/" in library else library
    loaded = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", loaded, str(path)], capture_output=True, text=True, check=False).stdout
    return release_of_llvm(maps)


def release_of_llvm(maps):
    """Debian's libraries are libLLVM-15.so.1 and libLLVM.so.19.1."""
    found = re.search(r"/libLLVM(?:-|\.so\.)(\d+)", maps)
    return int(found[1]) if found else None


def lavapipe_26(name, description, subgroup):
    return Device(
        f"lavapipe-26-{name}", f"Mesa 26's software Vulkan, {description}",
        {"MESA26_DEVICE": "lavapipe", "LP_NATIVE_VECTOR_WIDTH": str(32 * subgroup)}, WITH_MESA26, MESA26,
    )


def radv_26(chip, family):
    return Device(
        f"radv-26-{chip}", f"the compiler of Mesa 26 for {family}, over a shim",
        {"MESA26_DEVICE": chip, "MESA_SHADER_CACHE_DISABLE": "true"}, WITH_MESA26, MESA26, runs=False,
    )


def radv_25(family):
    manifest = machine_driver("radeon")
    return Device(
        f"radv-{family}", f"the compiler of the machine's own Mesa for {family}, as a null device",
        {**driver(manifest), "RADV_FORCE_FAMILY": family, "MESA_SHADER_CACHE_DISABLE": "true"}, (), manifest, runs=False,
    )


WITH_MESA26 = (str(ROOT / "tools/with_mesa26.sh"),)
LAVAPIPE = machine_driver("lvp")
DEVICES = {
    device.name: device
    for device in [
        Device("lavapipe", "the machine's own software Vulkan", driver(LAVAPIPE), (), LAVAPIPE),
        Device("lavapipe-26", "Mesa 26's software Vulkan, with cooperative matrices", {"MESA26_DEVICE": "lavapipe"}, WITH_MESA26, MESA26),
        Device(
            "guard-pages", "the machine's own software Vulkan, with a page after each buffer that no one may access",
            # The driver and the shaders are those of the other tests.
            {**driver(LAVAPIPE), "UNICORN_TEST_GUARD_PAGES": "1", "MESA_SHADER_CACHE_DIR": str(ROOT / ".cache/mesa")}, (), LAVAPIPE,
        ),
        *(lavapipe_26(f"subgroup-{n}", f"subgroups of {n}", n) for n in (4, 8, 16)),
        # The device reports vectors of more than 512 bits, but does not use them (LP_MAX_VECTOR_WIDTH).
        *(lavapipe_26(f"announces-{n}", f"which announces subgroups of {n} and computes in those of 16", n) for n in (32, 64)),
        Device("swiftshader", "Chromium's software Vulkan: no f16, int8 or 16-bit storage", driver(CHROMIUM / "vk_swiftshader_icd.json"), (), CHROMIUM),
        # The layer aborts a process that exits with an open device, as the test suite does. So the last line of the
        # suite is checked, not its exit status.
        Device(
            "gpu-assisted", "the machine's own software Vulkan under GPU-assisted validation",
            {**driver(LAVAPIPE), "UNICORN_TEST_BUFFERS_APART": "1", "VK_LAYER_PATH": str(CHROMIUM), "VK_LAYER_SETTINGS_PATH": str(CHROMIUM / "vk_layer_settings.txt")},
            (), CHROMIUM, LAYER_FLAW,
        ),
        *map(radv_25, ("phoenix", "gfx1150", "gfx1151")),
        radv_26("phoenix", "phoenix"), radv_26("strix1", "gfx1150"),
    ]
}


# --- how they are made ----------------------------------------------------------------------------------


def run(command, seconds, cwd=None):
    """Exit status and output, with both streams together."""
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=seconds, check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise DevicesError(f"`{command[0]}` did not finish within {seconds} s: is the mirror reachable?") from expired
    return done.returncode, done.stdout


def mirror(sources, codename):
    """The archive that serves the release itself. None = there is none."""
    return next((s for s in sources if codename in s.suites and not s.uri.startswith("cdrom:")), None)


def stanza(uri, suites, signed_by):
    """A source of `suites`, in apt's format."""
    lines = ["Types: deb", f"URIs: {uri}", f"Suites: {' '.join(suites)}", "Components: main"]
    if signed_by:
        # An inline key begins on the next line.
        lines.append(f"Signed-By:{'' if signed_by.startswith(chr(10)) else ' '}{signed_by}")
    return "\n".join(lines) + "\n"


def mesa26_sources(sources, codename):
    """The apt sources of Mesa 26's suites, at the mirror of the machine's release. None = the release has no mirror."""
    source = mirror(sources, codename)
    return source and stanza(source.uri, MESA26_SUITES, source.signed_by)


def release_sources(sources, codename):
    """The apt sources of the machine's own release, with its updates and security fixes. None = there are none."""
    def of_release(suite):
        return suite == codename or suite.startswith(f"{codename}-") and not suite.endswith("-backports")

    stanzas = []
    for source in sources:
        suites = [suite for suite in source.suites if of_release(suite)]
        if suites and not source.uri.startswith("cdrom:"):
            stanzas.append(stanza(source.uri, suites, source.signed_by))
    return "\n".join(stanzas) or None


def apt_settings(root, dump):
    """Settings of an apt that keeps all its files below `root`, and reaches mirrors as the machine's own apt does: with
    its proxies, without its hooks. `dump` = the output of `apt-config dump`."""
    kept = [line for line in dump.splitlines() if line.startswith("Acquire::") and not line.endswith('"";')]
    return "\n".join(kept + [
        f'Dir::State "{root}/state";',
        f'Dir::State::status "{root}/status";',
        f'Dir::Cache "{root}/cache";',
        f'Dir::Etc "{root}/etc";',
        f'Dir::Log "{root}/log";',
        # apt as root would download as a user without write permission here.
        'APT::Sandbox::User "root";',
        'APT::Install-Recommends "false";',
        'Acquire::Retries "2";',
        'Acquire::Languages "none";',
    ]) + "\n"


class PrivateApt:
    """apt with a separate folder instead of the machine's. It installs nothing."""

    def __init__(self, root, sources, release=None):
        self.root = root
        for folder in ("state/lists/partial", "cache/archives/partial", "etc/sources.list.d", "etc/apt.conf.d",
                       "etc/preferences.d", "log"):
            (root / folder).mkdir(parents=True)
        (root / "status").touch()
        (root / "etc/sources.list.d/unicorn.sources").write_text(sources)
        # Sources name keys in the machine's /etc by absolute paths. Sources without a key use this folder.
        trusted = Path("/etc/apt/trusted.gpg.d")
        if trusted.is_dir():
            (root / "etc/trusted.gpg.d").symlink_to(trusted)
        _, dump = run(["apt-config", "dump"], 30)
        settings = apt_settings(root, dump) + (f'APT::Default-Release "{release}";\n' if release else "")
        (root / "apt.conf").write_text(settings)

    def apt(self, *arguments, seconds):
        return run(["env", f"APT_CONFIG={self.root}/apt.conf", "apt-get", "-q", *arguments], seconds, cwd=self.root)

    def update(self):
        code, out = self.apt("update", seconds=UPDATE_SECONDS)
        trouble = [line for line in out.splitlines() if line.startswith(("E:", "Err:", "W: Failed to fetch"))]
        if code != 0 or trouble:
            # Several lines report one failure. The line with "W:" gives the cause.
            reason = max(trouble, key=lambda line: line.startswith("W:")) if trouble else (out.strip().splitlines() or ["no reason given"])[-1]
            raise DevicesError(f"apt cannot fetch the lists of the test devices' packages (offline?): {reason}")

    def download(self, packages, with_dependencies):
        """Downloads the packages, and returns their files."""
        self.update()
        how = ["install", "-y", "-d"] if with_dependencies else ["download"]
        code, out = self.apt(*how, *packages, seconds=DOWNLOAD_SECONDS)
        if code != 0:
            reasons = [line for line in out.splitlines() if line.startswith("E:")] or out.strip().splitlines()[-1:]
            raise DevicesError(f"apt could not download {' '.join(packages)}: {reasons[0]}")
        return sorted([*(self.root / "cache/archives").glob("*.deb"), *self.root.glob("*.deb")])


def unpack(package, into):
    code, out = run(["dpkg-deb", "-x", package, into], UNPACK_SECONDS)
    if code != 0:
        raise DevicesError(f"dpkg-deb could not unpack {package.name}: {out.strip().splitlines()[-1]}")


def make_mesa26(work, into, sources):
    apt = PrivateApt(work / "apt", sources, MESA26_SUITES[-1])
    for package in apt.download(MESA26_PACKAGES, with_dependencies=True):
        unpack(package, into)


def make_chromium(work, into, sources):
    apt = PrivateApt(work / "apt", sources)
    (package,) = apt.download(["chromium-common"], with_dependencies=False)
    unpack(package, work / "unpacked")
    version = package.name.split("_")[1]
    if int(version.split(".")[0]) < LAYER_MAJOR:
        why = f"the layer of Chromium {version} reports false races; Debian's security fixes have {LAYER_MAJOR} or later"
        (into / LAYER_FLAW.name).write_text(why + "\n")
    for name in CHROMIUM_FILES:
        file = work / "unpacked/usr/lib/chromium" / name
        if not file.is_file():
            raise DevicesError(f"chromium-common has no {name}: the package has changed, and tools/devices.py must be adapted")
        shutil.copy(file, into / name)
    (into / "VkLayer_khronos_validation.json").write_text(LAYER_MANIFEST)
    (into / "vk_layer_settings.txt").write_text(LAYER_SETTINGS)


def recipe_of(*parts):
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def make_folder(folder, recipe, make, say):
    """Calls `make(work, into)` to fill `folder`, unless the same `recipe` already made the folder."""
    mark = folder / RECIPE
    if mark.is_file() and mark.read_text() == recipe:
        say(f"{folder.name} exists: {folder}")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    say(f"making {folder}")
    # The work folder is a sibling, so that a complete result can be renamed to its place in one operation.
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as work:
        into = Path(work) / "made"
        into.mkdir()
        make(Path(work), into)
        (into / RECIPE).write_text(recipe)
        if folder.exists():
            folder.rename(Path(work) / "replaced")
        into.rename(folder)


def make(sources, release, say, folder=FOLDER):
    """Makes the missing folders of `.cache/devices`. `sources` = the machine's own apt sources (`setup.read_sources`),
    `release` = the content of /etc/os-release."""
    name, codename = release.get("PRETTY_NAME", "this system"), release.get("VERSION_CODENAME", "")
    tools = ["apt-get", "apt-config", "dpkg-deb", "unshare"]
    lacking = next((tool for tool in tools if not shutil.which(tool)), None)
    if release.get("ID") != "debian" or lacking:
        what = f"{lacking} does not exist" if lacking else f"{name} has none"
        raise DevicesError(f"the test devices come from Debian's own mirror, and {what}: use Debian 12 or 13")
    mesa26, chromium = mesa26_sources(sources, codename), release_sources(sources, codename)
    if mesa26 is None:
        raise DevicesError(f"no source for {codename} main in /etc/apt: it is unknown from which mirror to take the test devices from")
    make_folder(
        folder / MESA26.name, recipe_of(mesa26, MESA26_PACKAGES),
        lambda work, into: make_mesa26(work, into, mesa26), say,
    )
    make_folder(
        folder / CHROMIUM.name, recipe_of(chromium, LAYER_MAJOR, CHROMIUM_FILES, LAYER_MANIFEST, LAYER_SETTINGS),
        lambda work, into: make_chromium(work, into, chromium), say,
    )

#!/usr/bin/env python3
"""Installs the packages of a release as users would, on new machines with Debian 13, and requests an answer from each.

    tools/test_packages.py BINARY [deb] [archive] [container]

deb        the Debian package: installed, upgraded over a changed configuration, removed, installed again, purged
archive    the archive: unpacked, and installed by its own script
container  Containerfile built by buildah, its image run as its own user with the environment of compose.yaml

A machine is a folder that debootstrap fills. Its processes have separate mounts and process ids. systemd does not run
there (`make test-service` boots one). It computes on software Vulkan. The base images of Containerfile are made here in
the same way, because nothing is fetched from an image registry. So their names are tested, and their contents are not.
Needs root, buildah, debootstrap and cargo-deb (`make test-packages` installs them), and minutes.

Prints a line for each checked fact, and the time until the first answer for each way to install.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import fresh_machine
import release
from edge_server import free_port

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache/packages"
DEBIAN = "trixie"
RUST_IMAGE, DEBIAN_IMAGE = re.findall(r"(?m)^FROM (\S+)", (ROOT / "Containerfile").read_text())
NAME = "unicorn-execution-engine"
QUIET_APT = "DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 install -y --no-install-recommends"
# The same user as in the systemd unit.
AS_SERVICE = "setpriv --reuid=unicorn --regid=unicorn --init-groups env HOME=/var/lib/unicorn"
OLD, NEW = "0.0.9-1", "0.1.0-1"
READY_SECONDS = 300
COMMAND_SECONDS = 1200
EPOCH = "1700000000"


class Failed(Exception):
    """The fact that is not true."""


def must(holds, fact, seen=""):
    if not holds:
        raise Failed(f"{fact}: {seen}")
    print(f"ok: {fact}", flush=True)


class Machine:
    """A new machine, in a copy of a folder that debootstrap has filled."""

    def __init__(self, name):
        pristine, self.root = FOLDER / DEBIAN, FOLDER / name
        if not (pristine / "src").exists():
            fresh_machine.bootstrap(DEBIAN, pristine, ["ca-certificates"])
            (pristine / "src").mkdir()
        shutil.rmtree(self.root, ignore_errors=True)
        subprocess.run(["cp", "-a", pristine, self.root], check=True)

    def run(self, script):
        """Runs a script as root. Returns its exit status and its output."""
        process = fresh_machine.start(self.root, script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said, _ = process.communicate(timeout=COMMAND_SECONDS)
        finally:
            fresh_machine.stop(process)
        return process.returncode, said

    def does(self, script, fact, part=""):
        """Checks that a script succeeds and that `part` is in its output. Returns the output."""
        status, said = self.run(script)
        must(status == 0 and part in said, fact, f"`{script}` ended with {status}\n{said[-2000:]}")
        return said

    def has(self, path):
        return (self.root / path.lstrip("/")).exists()

    def answers(self, fact, command):
        """Serves the demo model, and checks that it answers."""
        with (FOLDER / "server.log").open("w") as log:
            serve = fresh_machine.start(self.root, f"exec {command}", stdout=log, stderr=log)
            answers_at(serve, fact, port_of(self.root / "etc/unicorn"))

    def remove(self):
        shutil.rmtree(self.root)


def port_of(folder):
    """The port in the files of /etc/unicorn."""
    files = [folder / "config.toml", *sorted((folder / "conf.d").glob("*.toml"))]
    ports = [tomllib.loads(file.read_text()).get("server", {}).get("port") for file in files]
    return next(port for port in reversed(ports) if port)


def answers_at(serve, fact, port, key=None):
    """Checks that a starting server answers, and stops it."""
    try:
        answer = fresh_machine.first_answer(serve, f"http://127.0.0.1:{port}", READY_SECONDS, key)
    except fresh_machine.NoServer as why:
        raise Failed(f"{fact}: {why}; {FOLDER / 'server.log'} has its output") from why
    must("Paris" in answer, fact, answer)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def config(port):
    return f"[hardware]\nallow_software_vulkan = true\n[server]\nport = {port}\n"


def test_deb(binary):
    with tempfile.TemporaryDirectory() as folder:
        packages = {version: release.deb(ROOT, binary, EPOCH, Path(folder), version) for version in [OLD, NEW]}
        machine = Machine("deb")
        for package in packages.values():
            shutil.copy(package, machine.root / "src")
    old, new = (f"./{packages[version].name}" for version in [OLD, NEW])

    machine.run("apt-get -q update")
    begun = time.monotonic()
    machine.does(f"{QUIET_APT} {old}", "the package installs, with the driver and the loader")
    installed = time.monotonic()
    # A file in addition to the package's own. An administrator would do this first.
    write(machine.root / "etc/unicorn/conf.d/10-here.toml", config(free_port()))
    machine.answers("it answers as the service's user, with the package's configuration", f"{AS_SERVICE} unicorn serve")
    print(f"time: deb: {installed - begun:.0f} s to install, {time.monotonic() - installed:.1f} s more to the first answer", flush=True)

    machine.does("unicorn --version", "`unicorn --version` names a driver", "driver    llvmpipe")
    machine.does("unicorn config check", "`unicorn config check` finds nothing")
    machine.does("id -nG unicorn", "its user is a member of render and video", "video")
    starts = "/etc/systemd/system/multi-user.target.wants/unicorn.service"
    must(os.path.lexists(machine.root / starts[1:]), "systemd starts it at boot")
    must(not (machine.root / "etc/systemd/system/sockets.target.wants").exists(), "and does not listen for it")
    pages = sorted(path.name for path in (machine.root / "usr/share/man/man1").glob("unicorn*"))
    must({"unicorn.1.gz", "unicorn-serve.1.gz"} <= set(pages), f"{len(pages)} manual pages exist", pages)
    machine.does("bash -c '. /usr/share/bash-completion/completions/unicorn; COMP_WORDS=(unicorn doc); COMP_CWORD=1; "
                 "_unicorn unicorn doc unicorn; echo ${COMPREPLY[@]}'", "bash completes a command", "doctor")
    status, said = machine.run(f"{QUIET_APT} --simulate unicorn")
    must(status != 0 or f"Remv {NAME}" in said, "Debian's package with a similar name conflicts with it", said)

    port = free_port()
    changed = config(port) + "# changed\n"
    write(machine.root / "etc/unicorn/config.toml", changed)
    (machine.root / "etc/unicorn/conf.d/10-here.toml").unlink()
    write(machine.root / "var/lib/unicorn/models/a/model", "gigabytes")
    machine.does("systemctl disable unicorn.service", "the administrator disables it")
    machine.does(f"{QUIET_APT} {new}", "an upgrade asks nothing", f"Setting up {NAME} ({NEW})")
    must((machine.root / "etc/unicorn/config.toml").read_text() == changed, "and keeps a changed configuration")
    machine.does("unicorn config show", "which counts", f"port = {port}")
    must(not os.path.lexists(machine.root / starts[1:]), "and a disabled service stays disabled")
    machine.answers("the new version answers", f"{AS_SERVICE} unicorn serve")

    machine.does(f"apt-get -q -y remove {NAME}", "it is removed")
    must(not machine.has("/usr/bin/unicorn") and machine.has("/etc/unicorn/config.toml"), "and leaves the configuration")
    (machine.root / "etc/unicorn/config.toml").unlink()
    machine.does(f"{QUIET_APT} {new}", "it is installed again")
    must(not machine.has("/etc/unicorn/config.toml"), "and does not bring back a file that the administrator has deleted")
    machine.does(f"apt-get -q -y purge {NAME}", "it is purged, and says where the models are", "/var/lib/unicorn")
    left = [path for path in ["/etc/unicorn", "/var/cache/unicorn", "/usr/lib/systemd/system/unicorn.service"] if machine.has(path)]
    must(not left, "no files of it are left", left)
    must((machine.root / "var/lib/unicorn/models/a/model").read_text() == "gigabytes", "but the models")
    said = machine.run("dpkg -l | grep unicorn; find /etc/systemd -name 'unicorn*'")[1]
    must(said == "", "dpkg and systemd no longer know it", said)
    machine.remove()


def test_archive(binary):
    machine = Machine("archive")
    release.archive(ROOT, binary, EPOCH, "unicorn", machine.root / "src/unicorn.tar.gz")
    machine.run("apt-get -q update")
    begun = time.monotonic()
    machine.does(f"{QUIET_APT} libvulkan1 mesa-vulkan-drivers systemd-standalone-sysusers", "the archive's needs are installed")
    machine.does("tar -xzf unicorn.tar.gz && cd unicorn && tools/install.sh ./unicorn", "its script installs it", "installed. Next")
    installed = time.monotonic()
    write(machine.root / "etc/unicorn/conf.d/10-here.toml", config(free_port()))
    machine.answers("it answers as the service's user", f"{AS_SERVICE} unicorn serve")
    print(f"time: archive: {installed - begun:.0f} s to install, {time.monotonic() - installed:.1f} s more to the first answer", flush=True)
    machine.does("unicorn config check", "`unicorn config check` finds nothing")
    must(machine.has("/usr/local/share/man/man1/unicorn-serve.1"), "manual pages exist")
    machine.remove()


class Images:
    """buildah, with images in a separate folder of this test."""

    def __init__(self, folder):
        storage = folder / "storage.conf"
        storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n')
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot"}

    def buildah(self, *arguments, **options):
        return subprocess.run(["buildah", *arguments], env=self.environment, stdout=subprocess.PIPE, text=True, check=True, **options).stdout.strip()

    def make(self, name, root, *more):
        """Makes an image from the files of a machine. `more` = folders that are copied into its /usr/local."""
        container = self.buildah("from", "scratch")
        mounted = self.buildah("mount", container)
        subprocess.run(["cp", "-a", f"{root}/.", mounted], check=True)
        for path in more:
            subprocess.run(["cp", "-a", path, f"{mounted}/usr/local/"], check=True)
        self.buildah("umount", container)
        self.buildah("commit", "--quiet", container, name)
        self.buildah("rm", container)

    def remove(self):
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")


def composed(machine):
    """compose.yaml as docker-compose reads it, on a host without a GPU and with one. Errors must name what is
    missing."""
    for file in ["compose.yaml", "compose.gpu.yaml", "Containerfile"]:
        shutil.copy(ROOT / file, machine.root / "src")
    machine.does(f"{QUIET_APT} docker-compose", "docker-compose is installed")
    config = "docker-compose config --format json"
    status, said = machine.run(config)
    must(status != 0 and "UNICORN_API_KEY" in said, "compose.yaml asks for a key", said)
    key, files = "UNICORN_API_KEY=0123456789abcdef", "COMPOSE_FILE=compose.yaml:compose.gpu.yaml"
    status, said = machine.run(f"{key} {files} {config}")
    must(status != 0 and "RENDER_GID" in said, "compose.gpu.yaml asks for a group", said)
    status, said = machine.run(f"{key} {files} RENDER_GID=105 {config} 2>/dev/null")
    must(status == 0, "docker-compose reads compose.yaml with compose.gpu.yaml", said)
    unicorn = json.loads(said)["services"]["unicorn"]
    must("/dev/dri" in json.dumps(unicorn["devices"]) and unicorn["group_add"] == ["105"], "the server gets /dev/dri and the host's group", unicorn)
    status, said = machine.run(f"{key} UNICORN_ALLOW_SOFTWARE_VULKAN=true COMMIT=abc {config} 2>/dev/null")
    must(status == 0, "docker-compose reads compose.yaml alone", said)
    services = json.loads(said)["services"]
    unicorn, webui = services["unicorn"], services["open-webui"]
    must(not {"devices", "group_add"} & set(unicorn), "a host without a GPU need not have /dev/dri", unicorn)
    must(unicorn["build"]["args"] == {"COMMIT": "abc"}, "the image gets its commit", unicorn)
    must(unicorn["ports"][0]["host_ip"] == "127.0.0.1", "only this machine reaches it", unicorn)
    pinned = (ROOT / "tests/openwebui/requirements.txt").read_text()
    version = webui["image"].rpartition(":v")[2]
    must(f"\nopen-webui=={version}\n" in pinned, f"Open WebUI is the version that is tested, {version}", webui["image"])
    must(webui["environment"]["OPENAI_API_BASE_URL"] == "http://unicorn:8010/v1", "Open WebUI asks the server", webui)
    return unicorn, webui["environment"]["OPENAI_API_KEY"]


def test_container(_binary):
    machine = Machine("container")
    machine.run("apt-get -q update")
    service, key = composed(machine)
    images = Images(FOLDER)
    images.make(DEBIAN_IMAGE, FOLDER / DEBIAN)
    machine.does(f"{QUIET_APT} g++", "the image that compiles has a compiler")
    sysroot = Path(subprocess.run(["rustc", "--print", "sysroot"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    images.make(RUST_IMAGE, machine.root, sysroot / "bin", sysroot / "lib")
    machine.remove()
    with tempfile.TemporaryDirectory() as sources:
        files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "x", "-C", sources], input=files, check=True)
        begun = time.monotonic()
        images.buildah("bud", "--pull-never", "--build-arg", "COMMIT=abc", "--tag", "unicorn", sources, stderr=subprocess.DEVNULL)
    built = time.monotonic()
    must(True, "Containerfile builds")

    about = json.loads(images.buildah("inspect", "--type", "image", "unicorn"))["OCIv1"]["config"]
    must(about["User"] == "unicorn", "the image has a user of its own", about)
    # This machine may itself be held to fewer.
    files = min(service["ulimits"]["nofile"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    container = images.buildah("from", "--pull-never", f"--ulimit=nofile={files}:{files}", "unicorn")
    port = free_port()
    variables = [f"--env={name}={value}" for name, value in {**service["environment"], "UNICORN_SERVER_PORT": port}.items()]
    command = ["buildah", "run", *variables, container, "--", *about["Entrypoint"], *about["Cmd"]]
    with (FOLDER / "server.log").open("w") as log:
        serve = subprocess.Popen(command, env=images.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        answers_at(serve, "it answers, and takes the key that Open WebUI has", port, key)
    print(f"time: container: {built - begun:.0f} s to build, {time.monotonic() - built:.1f} s more to the first answer", flush=True)
    said = images.buildah("run", container, "--", "sh", "-c", "unicorn --version; ls /var/cache/unicorn/*.bin")
    must(re.search(r"(?m)^commit +abc$", said) and ".bin" in said, "it knows its commit, and has kept its pipelines in the volume", said)
    said = images.buildah("run", container, "--", "sh", "-c", "id -un; curl --version; touch /var/lib/unicorn/models/a /var/cache/unicorn/a")
    must(said.startswith("unicorn\n") and "curl" in said, "its user may write models and shaders, and curl is there", said)
    images.remove()


PARTS = {"deb": test_deb, "archive": test_archive, "container": test_container}


def main(arguments):
    if not arguments or not set(arguments[1:]) <= set(PARTS):
        sys.exit(__doc__)
    binary = Path(arguments[0]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or PARTS:
        try:
            PARTS[name](binary)
        except Failed as failed:
            sys.exit(f"failed: {name}: {failed}")
    print("all of it holds")


if __name__ == "__main__":
    main(sys.argv[1:])

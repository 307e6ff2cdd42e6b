"""`make install`: where files go, which files stay unchanged, and that systemd accepts the unit and rates it as
closed."""

import json
import os
import re
import subprocess
import tempfile
import tomllib
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# systemd's exposure level, out of 100. It calls levels up to 20 safe, and levels up to 50 OK.
MOST_EXPOSED = 30
# Writes what the binary writes about its own command line.
BINARY = """#!/bin/sh
case $1 in
man-pages) mkdir -p "$2" && touch "$2/unicorn.1" "$2/unicorn-serve.1" ;;
completions) echo "of $2" ;;
esac
"""


def run(*command, **variables):
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def without_options(section):
    """The sections of a configuration, also those inside others, without their options."""
    return {name: without_options(value) for name, value in section.items() if isinstance(value, dict)}


def names_of_options(section):
    for name, value in section.items():
        yield from names_of_options(value) if isinstance(value, dict) else [name]


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.binary = self.folder / "built"
        self.binary.write_text(BINARY)
        self.binary.chmod(0o755)
        # A prefix outside the machine's own, because systemd-analyze checks that the binary exists.
        self.prefix = self.folder / "usr"

    def install(self, **variables):
        destination = {"DESTDIR": str(self.folder / "root"), "PREFIX": str(self.prefix), **variables}
        return run("make", "--no-print-directory", "install", f"UNICORN={self.binary}", **destination)

    def root(self, path):
        return self.folder / "root" / str(path).lstrip("/")

    def test_binary_unit_user_and_configuration_are_installed(self):
        status, said = self.install()
        self.assertEqual((status, said), (0, ""))
        self.assertTrue(os.access(self.root(self.prefix / "bin/unicorn"), os.X_OK))
        unit = self.root(self.prefix / "lib/systemd/system/unicorn.service").read_text()
        self.assertIn(f"ExecStart={self.prefix}/bin/unicorn serve\n", unit)
        self.assertNotIn("/usr/local", re.sub(r"(?m)^#.*$", "", unit))
        user = self.root(self.prefix / "lib/sysusers.d/unicorn.conf").read_text()
        for line in ["m unicorn render", "m unicorn video"]:
            self.assertIn(line, user)

    def test_manual_pages_and_completions_are_where_shells_search(self):
        stale = self.root(self.prefix / "share/man/man1/unicorn-fly.1")
        stale.parent.mkdir(parents=True)
        stale.touch()
        self.install()
        share = self.root(self.prefix / "share")
        self.assertEqual(sorted(p.name for p in (share / "man/man1").iterdir()), ["unicorn-serve.1", "unicorn.1"])
        for path, shell in [("bash-completion/completions/unicorn", "bash"), ("zsh/site-functions/_unicorn", "zsh"),
                            ("fish/vendor_completions.d/unicorn.fish", "fish")]:
            self.assertEqual((share / path).read_text(), f"of {shell}\n")

    def test_the_npu_shim_is_installed_if_it_was_built(self):
        shim = self.prefix / "lib/unicorn/libunicorn_npu.so"
        self.install()
        self.assertFalse(self.root(shim).exists())
        (self.folder / "libunicorn_npu.so").write_text("built")
        self.assertEqual(self.install()[0], 0)
        self.assertEqual(self.root(shim).read_text(), "built")
        destination = {"DESTDIR": str(self.folder / "root"), "PREFIX": str(self.prefix)}
        self.assertEqual(run("make", "--no-print-directory", "uninstall", **destination)[0], 0)
        self.assertFalse(self.root(shim).exists())

    def test_the_debian_package_has_all_installed_files_and_valid_scripts(self):
        self.install(PREFIX="/usr")
        about = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["metadata"]["deb"]
        stage = "target/package/"
        installed = {str(p.relative_to(self.folder / "root")) for p in (self.folder / "root").rglob("*") if p.is_file()}
        packed = set()
        for source, _, _ in about["assets"]:
            found = {str(p.relative_to(self.folder / "root")) for p in (self.folder / "root").glob(source.removeprefix(stage))} \
                if source.startswith(stage) else set(map(str, ROOT.glob(source)))
            self.assertTrue(found, f"no file is {source}")
            packed |= found
        self.assertEqual(installed - packed, set())
        for script in ["postinst", "prerm", "postrm"]:
            self.assertEqual(run("sh", "-n", f"{about['maintainer-scripts']}/{script}"), (0, ""))

    def test_compose_runs_the_tested_version_of_open_webui(self):
        version = re.search(r"(?m)^open-webui==(.*)$", (ROOT / "tests/openwebui/requirements.txt").read_text())[1]
        self.assertIn(f"image: ghcr.io/open-webui/open-webui:v{version}\n", (ROOT / "compose.yaml").read_text())

    def test_the_container_keeps_its_cache_and_pins_its_base_images(self):
        recipe = (ROOT / "Containerfile").read_text()
        compose, gpu = ((ROOT / name).read_text() for name in ["compose.yaml", "compose.gpu.yaml"])
        for image in re.findall(r"(?m)^FROM (\S+)", recipe):
            self.assertRegex(image, r":(\d+\.\d+\.\d+|[a-z]+-\d{8})-", "a tag must be a fixed version")
        # The container's root is read-only, so every written file must be in a volume of both files.
        self.assertIn("\n    read_only: true\n", compose)
        volumes = json.loads(re.search(r"(?m)^VOLUME (.*)$", recipe)[1])
        folders = dict(re.findall(r"(\w+_DIR)=(\S+)", recipe))
        self.assertEqual(set(folders), {"UNICORN_CACHE_DIR", "MESA_SHADER_CACHE_DIR", "UNICORN_MODELS_DIR"})
        for folder in folders.values():
            self.assertIn(folder, volumes)
            self.assertRegex(compose, rf"(?m)^      - \w+:{folder}$")
        # A host without a GPU has neither the device nor the group.
        for needs in ["/dev/dri\n", "RENDER_GID:?"]:
            self.assertNotIn(needs, compose)
            self.assertIn(needs, gpu)
        self.assertIn("ARG COMMIT\n", recipe)
        self.assertIn('COMMIT: "${COMMIT:-}"\n', compose)

    def test_the_configuration_has_every_option_and_sets_only_what_is_pulled(self):
        self.install()
        path = self.root("/etc/unicorn/config.toml")
        defaults = tomllib.loads((ROOT / "config/default.toml").read_text())
        installed = tomllib.loads(path.read_text())
        self.assertEqual(installed, {**without_options(defaults), "models": {"dir": "/var/lib/unicorn/models", "pulled": True}})
        for option in names_of_options(defaults):
            self.assertRegex(path.read_text(), rf"(?m)^#?{option} = ")
        self.assertEqual([p.name for p in path.parent.iterdir()], ["config.toml"])

        path.write_text("[server]\nport = 1\n")
        status, said = self.install()
        self.assertEqual(status, 0)
        self.assertIn("stays as it is", said)
        self.assertEqual(path.read_text(), "[server]\nport = 1\n")

    def test_a_missing_binary_is_an_error(self):
        self.binary.unlink()
        status, said = self.install()
        self.assertNotEqual(status, 0)
        self.assertIn("make build", said)
        self.assertFalse((self.folder / "root").exists())

    def test_uninstalling_leaves_the_configuration(self):
        self.install()
        destination = {"DESTDIR": str(self.folder / "root"), "PREFIX": str(self.prefix)}
        self.assertEqual(run("make", "--no-print-directory", "uninstall", **destination)[0], 0)
        left = [str(p.relative_to(self.folder / "root")) for p in (self.folder / "root").rglob("*") if p.is_file()]
        self.assertEqual(left, ["etc/unicorn/config.toml"])

    def test_systemd_accepts_the_unit_and_rates_it_as_closed(self):
        self.install()
        unit = self.root(self.prefix / "lib/systemd/system/unicorn.service")
        self.assertEqual(run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(unit))[0], 0)
        open_unit = self.folder / "open.service"
        open_unit.write_text("[Service]\nExecStart=/bin/true\n")
        judged = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(open_unit))
        self.assertNotEqual(judged[0], 0, "the threshold must refuse an open unit")

        # systemd-analyze checks that the binary exists at the unit's path.
        target = self.prefix / "bin/unicorn"
        target.parent.mkdir(parents=True)
        target.write_text("#!/bin/sh\n")
        target.chmod(0o755)
        status, said = run("systemd-analyze", "verify", "--man=no", str(unit), str(unit.with_suffix(".socket")))
        self.assertEqual((status, said), (0, ""))

    def test_an_error_that_a_restart_cannot_fix_is_not_restarted(self):
        unit = (ROOT / "config/unicorn.service").read_text()
        for line in ["Type=notify", "WatchdogSec=60", "Restart=on-failure", "RestartPreventExitStatus=2 76 78", "ExecReload=/bin/kill -HUP $MAINPID",
                     "LimitMEMLOCK=infinity", "LimitCORE=0", "SupplementaryGroups=render video"]:
            self.assertIn(f"\n{line}\n", unit)
        # The software driver compiles while it runs.
        self.assertNotRegex(unit, r"(?m)^MemoryDenyWriteExecute")


if __name__ == "__main__":
    unittest.main()

"""`make install`: where files go, which files stay unchanged, and that systemd accepts the unit and rates it as
closed."""

import os
import re
import subprocess
import tempfile
import tomllib
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# systemd's exposure level, out of 100: it calls levels up to 20 safe, and levels up to 50 OK.
MOST_EXPOSED = 30


def run(*command, **variables):
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.binary = self.folder / "built"
        self.binary.write_text("#!/bin/sh\n")
        self.binary.chmod(0o755)
        # A prefix outside the machine's own, because systemd-analyze checks that the binary exists.
        self.prefix = self.folder / "usr"

    def install(self, **variables):
        destination = {"DESTDIR": str(self.folder / "root"), "PREFIX": str(self.prefix), **variables}
        return run("make", "--no-print-directory", "install", f"UNICORN={self.binary}", **destination)

    def root(self, path):
        return self.folder / "root" / str(path).lstrip("/")

    def test_binary_unit_user_and_configuration_lie_where_they_belong(self):
        status, said = self.install()
        self.assertEqual((status, said), (0, ""))
        self.assertTrue(os.access(self.root(self.prefix / "bin/unicorn"), os.X_OK))
        unit = self.root(self.prefix / "lib/systemd/system/unicorn.service").read_text()
        self.assertIn(f"ExecStart={self.prefix}/bin/unicorn serve\n", unit)
        self.assertNotIn("/usr/local", re.sub(r"(?m)^#.*$", "", unit))
        user = self.root(self.prefix / "lib/sysusers.d/unicorn.conf").read_text()
        for line in ["m unicorn render", "m unicorn video"]:
            self.assertIn(line, user)

    def test_the_configuration_has_every_option_and_pins_none_but_the_folder_of_models(self):
        self.install()
        path = self.root("/etc/unicorn/config.toml")
        defaults = tomllib.loads((ROOT / "config/default.toml").read_text())
        installed = tomllib.loads(path.read_text())
        self.assertEqual(installed, {**{section: {} for section in defaults}, "models": {"dir": "/var/lib/unicorn/models"}})
        for options in defaults.values():
            for option in options:
                self.assertRegex(path.read_text(), rf"(?m)^#?{option} = ")
        self.assertEqual([p.name for p in path.parent.iterdir()], ["config.toml"])

        path.write_text("[server]\nport = 1\n")
        status, said = self.install()
        self.assertEqual(status, 0)
        self.assertIn("stays as it is", said)
        self.assertEqual(path.read_text(), "[server]\nport = 1\n")

    def test_a_binary_that_is_not_built_is_an_error(self):
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

    def test_systemd_takes_the_unit_and_finds_it_closed(self):
        self.install()
        unit = self.root(self.prefix / "lib/systemd/system/unicorn.service")
        self.assertEqual(run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(unit))[0], 0)
        open_unit = self.folder / "open.service"
        open_unit.write_text("[Service]\nExecStart=/bin/true\n")
        judged = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(open_unit))
        self.assertNotEqual(judged[0], 0, "the threshold refuses nothing")

        # systemd-analyze looks for the binary at the unit's path.
        target = self.prefix / "bin/unicorn"
        target.parent.mkdir(parents=True)
        target.write_text("#!/bin/sh\n")
        target.chmod(0o755)
        status, said = run("systemd-analyze", "verify", "--man=no", str(unit), str(unit.with_suffix(".socket")))
        self.assertEqual((status, said), (0, ""))

    def test_what_another_start_does_not_mend_is_not_started_again(self):
        unit = (ROOT / "config/unicorn.service").read_text()
        for line in ["Type=notify", "WatchdogSec=60", "Restart=on-failure", "RestartPreventExitStatus=2 76 78", "ExecReload=/bin/kill -HUP $MAINPID",
                     "LimitMEMLOCK=infinity", "LimitCORE=0", "SupplementaryGroups=render video"]:
            self.assertIn(f"\n{line}\n", unit)
        # The software driver compiles while it runs.
        self.assertNotRegex(unit, r"(?m)^MemoryDenyWriteExecute")


if __name__ == "__main__":
    unittest.main()

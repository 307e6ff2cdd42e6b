"""tools/devices.py: apt's sources and settings, when a folder is made, and the choice of a device. Needs no network."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import devices  # noqa: E402
import setup  # noqa: E402

SOURCES = setup.parse_deb822("""\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: https://elsewhere.example
Suites: nodistro
Components: main
""")
BOOKWORM = {"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)", "VERSION_CODENAME": "bookworm"}


class Sources(unittest.TestCase):
    def test_mesa26_comes_from_the_mirror_of_the_release_with_its_key(self):
        self.assertEqual(devices.mesa26_sources(SOURCES, "bookworm").splitlines(), [
            "Types: deb", "URIs: http://mirror.example/debian", "Suites: trixie trixie-backports", "Components: main",
            "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg",
        ])

    def test_chromium_comes_only_from_the_release_its_updates_and_fixes(self):
        text = devices.release_sources(SOURCES, "bookworm")
        self.assertIn("Suites: bookworm bookworm-updates\n", text)
        self.assertIn("URIs: http://security.example/debian-security\nSuites: bookworm-security\n", text)
        self.assertNotIn("backports", text)
        self.assertNotIn("elsewhere", text)

    def test_without_a_source_of_the_release_there_are_no_sources(self):
        self.assertIsNone(devices.mesa26_sources(SOURCES, "sid"))
        self.assertIsNone(devices.release_sources(SOURCES, "sid"))

    def test_apt_uses_the_machines_proxies_but_not_its_hooks_and_folders(self):
        dump = '\n'.join([
            'Dir::State "var/lib/apt";', 'Acquire::http "";', 'Acquire::http::Proxy "http://proxy.example:3128";',
            'APT::Update::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";',
        ])
        settings = devices.apt_settings("/tmp/apt", dump)
        self.assertIn('Acquire::http::Proxy "http://proxy.example:3128";\n', settings)
        self.assertIn('Dir::State "/tmp/apt/state";\n', settings)
        for absent in ["Post-Invoke", "var/lib/apt", 'Acquire::http "";']:
            self.assertNotIn(absent, settings)


class Folders(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "devices/mesa26"
        self.said = []

    def make(self, recipe, content):
        made = []

        def fill(work, into):
            made.append(recipe)
            (into / "file").write_text(content)

        devices.make_folder(self.folder, recipe, fill, self.said.append)
        return made

    def test_a_folder_is_made_once_for_each_recipe(self):
        self.assertEqual(self.make("one", "1"), ["one"])
        self.assertEqual(self.make("one", "2"), [])
        self.assertEqual((self.folder / "file").read_text(), "1")
        self.assertEqual(self.make("two", "2"), ["two"])
        self.assertEqual((self.folder / "file").read_text(), "2")
        self.assertEqual([path.name for path in self.folder.parent.iterdir()], ["mesa26"])

    def test_a_failure_leaves_no_new_folder_and_keeps_the_old_one(self):
        self.make("one", "1")

        def fail(work, into):
            (into / "file").write_text("half")
            raise devices.DevicesError("offline")

        with self.assertRaises(devices.DevicesError):
            devices.make_folder(self.folder, "two", fail, self.said.append)
        self.assertEqual((self.folder / "file").read_text(), "1")
        self.assertEqual([path.name for path in self.folder.parent.iterdir()], ["mesa26"])

    def test_a_missing_debian_mirror_is_a_one_line_error(self):
        for release, sources, expected in [
            ({"ID": "fedora", "PRETTY_NAME": "Fedora 43"}, [], "Fedora 43 has none"),
            (BOOKWORM, [], "no source for bookworm main in /etc/apt"),
        ]:
            with self.assertRaises(devices.DevicesError) as caught:
                devices.make(sources, release, self.said.append, self.folder.parent)
            self.assertIn(expected, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    def test_failed_package_lists_are_reported_with_the_cause(self):
        original = devices.run
        devices.run = lambda command, seconds, cwd=None: (0, "Err:1 http://mirror.example\nW: Failed to fetch http://mirror.example/debian\nW: more")
        self.addCleanup(setattr, devices, "run", original)
        with self.assertRaises(devices.DevicesError) as caught:
            devices.PrivateApt(self.folder, "Types: deb\n").update()
        self.assertIn("offline?): W: Failed to fetch http://mirror.example/debian", str(caught.exception))


class Choice(unittest.TestCase):
    def test_every_device_has_its_name_and_reports_what_it_lacks(self):
        for name, device in devices.DEVICES.items():
            self.assertEqual(device.name, name)
        nowhere = devices.Device("x", "nothing", needs=devices.FOLDER / "nowhere")
        self.assertEqual(nowhere.lacking(), f"x needs {devices.FOLDER}/nowhere, which does not exist: `make setup-devices`")
        self.assertIsNone(devices.Device("x", "nothing").lacking())
        with tempfile.TemporaryDirectory() as folder:
            flaw = Path(folder) / "flaw"
            flawed = devices.Device("x", "nothing", flaw=flaw)
            self.assertIsNone(flawed.lacking())
            flaw.write_text("it is too old\n")
            self.assertEqual(flawed.lacking(), "x: it is too old")

    def test_a_too_old_layer_is_reported_and_the_driver_stays_usable(self):
        for version, is_flawed in [("150.0.7871.100-1~deb12u1", True), ("156.0.1-1", False), ("160.1-2", False)]:
            with tempfile.TemporaryDirectory() as folder:
                work, into = Path(folder) / "work", Path(folder) / "into"
                (work / "unpacked/usr/lib/chromium").mkdir(parents=True)
                into.mkdir()
                for name in devices.CHROMIUM_FILES:
                    (work / "unpacked/usr/lib/chromium" / name).write_text(name)
                package = Path(f"chromium-common_{version}_amd64.deb")
                apt = mock.Mock(**{"return_value.download.return_value": [package]})
                with mock.patch.multiple(devices, PrivateApt=apt, unpack=mock.Mock()):
                    devices.make_chromium(work, into, "")
                self.assertEqual((into / devices.LAYER_FLAW.name).exists(), is_flawed, version)
                self.assertTrue((into / "libvk_swiftshader.so").exists())

    def test_a_command_has_its_environment_and_its_wrapper(self):
        command = devices.DEVICES["lavapipe-26-subgroup-16"].command(["unicorn", "devices"])
        self.assertEqual(command, [
            "env", "MESA26_DEVICE=lavapipe", "LP_NATIVE_VECTOR_WIDTH=512", str(ROOT / "tools/with_mesa26.sh"), "unicorn", "devices",
        ])

    def test_the_llvm_of_a_driver_is_known_by_the_library_that_it_loads(self):
        self.assertEqual(devices.release_of_llvm("7f00-7f01 r-xp 0 08:01 5 /lib/x86_64-linux-gnu/libLLVM-15.so.1\n"), 15)
        self.assertEqual(devices.release_of_llvm("7f00-7f01 r-xp 0 08:01 5 /usr/lib/libLLVM.so.19.1\n"), 19)
        self.assertIsNone(devices.release_of_llvm("7f00-7f01 r-xp 0 08:01 5 /usr/lib/libc.so.6\n"))
        self.assertIsNone(devices.llvm_release(ROOT / "no/manifest.json"))
        with tempfile.TemporaryDirectory() as folder:
            manifest = Path(folder) / "driver.json"
            manifest.write_text('{"ICD": {"library_path": "./absent.so"}}')
            self.assertIsNone(devices.llvm_release(manifest))

    def test_only_devices_that_compute_are_called_running(self):
        compiling = {name for name, device in devices.DEVICES.items() if not device.runs}
        self.assertEqual(compiling, {name for name in devices.DEVICES if name.startswith("radv")})

    def test_the_manifest_of_the_layer_names_the_library_next_to_it(self):
        self.assertIn(f'"./{devices.CHROMIUM_FILES[2]}"', devices.LAYER_MANIFEST)

    def test_an_overlay_without_its_folder_is_a_one_line_error(self):
        with tempfile.TemporaryDirectory() as elsewhere:
            script = Path(elsewhere) / "tools/with_mesa26.sh"
            script.parent.mkdir()
            script.write_text((ROOT / "tools/with_mesa26.sh").read_text())
            done = subprocess.run(["sh", script, "true"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("make setup-devices", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)


if __name__ == "__main__":
    unittest.main()

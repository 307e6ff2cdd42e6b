"""tools/xrt.py and tools/npu_shim.sh: where XRT comes from, and the errors on a machine without XRT. Needs no network."""

import os
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
import xrt  # noqa: E402

SOURCES = [setup.Source("http://mirror.example/debian", ("bookworm", "bookworm-updates"), "/usr/share/keyrings/a.gpg")]


class Xrt(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_xrt_is_fetched_once_from_the_mirror_of_the_release(self):
        release = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
        made = []
        with mock.patch.object(setup, "read_sources", lambda: SOURCES), mock.patch.object(setup, "os_release", lambda _: release), \
                mock.patch.object(xrt, "fill", lambda work, into, sources, whole, alone: made.append(sources)):
            for _ in range(2):
                self.assertEqual(xrt.make(lambda line: None, self.folder / "xrt"), self.folder / "xrt")
        self.assertEqual([text.splitlines() for text in made], [[
            "Types: deb", "URIs: http://mirror.example/debian", "Suites: forky", "Components: main",
            "Signed-By: /usr/share/keyrings/a.gpg",
        ]])

    def test_without_a_source_of_the_release_xrt_is_an_error(self):
        with mock.patch.object(setup, "read_sources", lambda: []), self.assertRaisesRegex(devices.DevicesError, "no apt source"):
            xrt.make(lambda line: None, self.folder / "xrt")

    def test_each_package_has_its_version_and_checksum(self):
        package = self.folder / "libxrt2_2.25.0-4_amd64.deb"
        package.write_bytes(b"")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        self.assertEqual(xrt.versions([package]), f"libxrt2 2.25.0-4 amd64 {empty}\n")

    def test_a_program_runs_with_the_dynamic_linker_of_the_folder(self):
        command = xrt.command(["program", "argument"], ["/y.so"], [Path("/x")])
        libraries = xrt.FOLDER / "usr/lib/x86_64-linux-gnu"
        folders = f"/x/usr/lib/x86_64-linux-gnu:{libraries}"
        self.assertEqual(command, [f"{libraries}/ld-linux-x86-64.so.2", "--library-path", folders, "--preload", "/y.so", "program", "argument"])


class Shim(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "include/xrt").mkdir(parents=True)

    def refused(self, part):
        environment = {**os.environ, "XRT_INCLUDE": str(self.folder / "include"), "XRT_LIBRARIES": str(self.folder / "lib")}
        done = subprocess.run([ROOT / "tools/npu_shim.sh", self.folder], env=environment, capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(part, done.stderr)
        self.assertTrue(done.stderr.splitlines()[-1].startswith("npu-shim: "), done.stderr)
        self.assertFalse((self.folder / "libunicorn_npu.so").exists())

    def test_missing_parts_of_xrt_are_named(self):
        self.refused("too old: it has no xrt/xrt_hw_context.h")
        (self.folder / "include/xrt/xrt_hw_context.h").touch()
        self.refused("no libxrt_coreutil.so in")
        (self.folder / "lib").mkdir()
        (self.folder / "lib/libxrt_coreutil.so").touch()
        self.refused("does not compile against the XRT of")


if __name__ == "__main__":
    unittest.main()

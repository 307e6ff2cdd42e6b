"""tools/setup.py: its decisions, from real sources files and versions. These tests do not change the system."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import setup  # noqa: E402

DEB822 = """\
Types: deb
# http://snapshot.debian.org/archive/debian/20250520T000000Z
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

INLINE_KEY = """\
Types: deb
URIs: https://mirror.example/debian
Suites: bookworm
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBFit
 -----END PGP PUBLIC KEY BLOCK-----
"""

ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb cdrom:[Debian GNU/Linux 12.0.0]/ bookworm main
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian.gpg] http://mirror.example/debian bookworm main contrib # the mirror
"""


class Sources(unittest.TestCase):
    def test_deb822_gives_the_mirror_and_the_key_of_the_release(self):
        text = setup.backports_source(setup.parse_deb822(DEB822), "bookworm")
        self.assertEqual(text.splitlines()[1:], [
            "Types: deb", "URIs: http://mirror.example/debian", "Suites: bookworm-backports", "Components: main",
            "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg",
        ])

    def test_an_inline_key_is_copied_completely(self):
        text = setup.backports_source(setup.parse_deb822(INLINE_KEY), "bookworm")
        self.assertIn("Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBFit\n", text)
        again = setup.parse_deb822(text)
        self.assertEqual(again[0].suites, ("bookworm-backports",))
        self.assertEqual(again[0].signed_by, setup.parse_deb822(INLINE_KEY)[0].signed_by)

    def test_one_line_sources_skip_comments_discs_and_source_packages(self):
        sources = setup.parse_one_line(ONE_LINE)
        text = setup.backports_source(sources, "bookworm")
        self.assertIn("URIs: http://mirror.example/debian\n", text)
        self.assertIn("Signed-By: /usr/share/keyrings/debian.gpg\n", text)
        self.assertNotIn("commented", text)

    def test_a_source_without_key_keeps_apts_own_key_ring(self):
        sources = setup.parse_one_line("deb http://mirror.example/debian bookworm main\n")
        self.assertNotIn("Signed-By", setup.backports_source(sources, "bookworm"))

    def test_disabled_and_foreign_sources_are_not_used_as_mirror(self):
        disabled = setup.parse_deb822("Enabled: no\n" + DEB822)
        self.assertIsNone(setup.backports_source(disabled, "bookworm"))
        foreign = setup.parse_deb822("Types: deb\nURIs: https://x.example\nSuites: nodistro\nComponents: main\n")
        self.assertIsNone(setup.backports_source(foreign, "bookworm"))

    def test_the_pin_covers_all_packages_of_backports_at_the_lowest_useful_priority(self):
        self.assertIn("Package: *\nPin: release n=bookworm-backports\nPin-Priority: 100\n", setup.backports_pin("bookworm"))


class Choice(unittest.TestCase):
    mesa = setup.Need("mesa-vulkan-drivers", 24)

    def choose(self, versions):
        return setup.choose(self.mesa, versions, "bookworm-backports")

    def test_the_release_is_preferred_if_it_is_new_enough(self):
        self.assertEqual(self.choose({"25.0.7-2": ["trixie"]}), "mesa-vulkan-drivers")

    def test_backports_are_used_only_if_the_release_is_too_old(self):
        versions = {"25.0.7-2~bpo12+1": ["bookworm-backports"], "22.3.6-1+deb12u1": ["bookworm"]}
        self.assertEqual(self.choose(versions), "mesa-vulkan-drivers/bookworm-backports")

    def test_too_old_everywhere_is_refused(self):
        self.assertIsNone(self.choose({"23.2.1-1ubuntu3.1~22.04.3": ["jammy-updates"]}))
        self.assertIsNone(self.choose({}))

    def test_the_error_for_ubuntu_2204_names_the_offered_version(self):
        release = {"ID": "ubuntu", "PRETTY_NAME": "Ubuntu 22.04.5 LTS"}
        original = setup.available_versions
        setup.available_versions = lambda _: {"23.2.1-1ubuntu3.1~22.04.3": ["jammy-updates"], "22.0.1-1ubuntu2": ["jammy"]}
        self.addCleanup(setattr, setup, "available_versions", original)
        message = setup.unavailable(self.mesa, release["PRETTY_NAME"], release, "")
        self.assertEqual(message, "Ubuntu 22.04.5 LTS offers mesa-vulkan-drivers 23.2.1-1ubuntu3.1~22.04.3, but version 24 or later "
                         "is needed: use Ubuntu 24.04 or later")

    def test_offline_is_named_as_the_cause(self):
        original = setup.available_versions
        setup.available_versions = lambda _: {}
        self.addCleanup(setattr, setup, "available_versions", original)
        message = setup.unavailable(self.mesa, "Debian", {"ID": "debian"}, "W: Failed to fetch http://mirror.example")
        self.assertIn("offline?", message)
        self.assertNotIn("\n", message)


class Missing(unittest.TestCase):
    def test_a_command_from_elsewhere_satisfies_a_need(self):
        there, nowhere = setup.Need("no-such-package", command="python3"), setup.Need("no-such-package", command="no-such-command")
        original = setup.installed_versions
        setup.installed_versions = lambda packages: {}
        self.addCleanup(setattr, setup, "installed_versions", original)
        self.assertEqual(setup.missing([there, nowhere]), [nowhere])
        self.assertEqual(setup.missing([there]), [])

    def test_an_optional_package_is_listed_as_a_skip(self):
        self.assertTrue(set(setup.WISHES) <= set(setup.NEEDS))
        self.assertIn("[browser]", (Path(__file__).resolve().parents[1] / "skips.toml").read_text())


class Versions(unittest.TestCase):
    def test_major(self):
        for version, expected in [("1:25.0.7-2~bpo12+1", 25), ("22.3.6-1+deb12u1", 22), ("24.2.8-1ubuntu1~24.04.1", 24), ("x", 0)]:
            self.assertEqual(setup.major(version), expected, version)

    def test_os_release(self):
        release = setup.os_release('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n# a=b\n')
        self.assertEqual(release, {"PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)", "ID": "debian"})


if __name__ == "__main__":
    unittest.main()

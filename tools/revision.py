"""The commit of the working tree, for reports."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def revision():
    """The short commit name, with a plus if files differ from it. `unknown` = no git, or no repository."""
    if not shutil.which("git"):
        return "unknown"
    describe = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"

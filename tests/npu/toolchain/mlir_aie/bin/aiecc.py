#!/usr/bin/env python3
"""mlir-aie's driver: writes a placeholder for the columns that the design names."""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import stand_in  # noqa: E402

stand_in.begin("aiecc.py")
options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if argument.startswith("--") and "=" in argument)
# The real one calls these.
assert shutil.which("xclbinutil"), "xclbinutil is not in PATH"
assert Path(options["peano"], "bin/clang++").exists(), options["peano"]
assert Path("attention.o").read_text() == "object\n"
columns = int(Path(sys.argv[-1]).read_text().split()[1])
bad = os.environ.get("STAND_IN_BAD")
Path(options["xclbin-name"]).write_bytes(stand_in.container(5 if bad == "xclbin" else columns))
Path(options["npu-insts-name"]).write_bytes(stand_in.instructions(columns)[: 40 if bad == "bin" else None])

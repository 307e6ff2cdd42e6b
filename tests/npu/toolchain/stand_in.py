"""What the stand-ins of the NPU's toolchain share. Each does little but write files that look like the real one's.

The tests of `unicorn npu build-kernels` steer them by variables of the environment:

    STAND_IN_LOG    a file that gets a line for each run of a tool
    STAND_IN_FAIL   the name of a tool that fails, after many lines of output
    STAND_IN_HANG   the name of a tool that starts a child, and never ends
    STAND_IN_BAD    `xclbin` or `bin`: a file that is written wrong

`python3 stand_in.py --record` writes tests/data/npu/xclbin/placeholder.bin.
"""

import os
import subprocess
import struct
import sys
import time
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data/npu/xclbin"


def begin(name):
    """Keeps the log, and fails or hangs where the test wants that."""
    log = os.environ.get("STAND_IN_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            print(name, *sys.argv[1:], file=file)
    if os.environ.get("STAND_IN_FAIL") == name:
        for line in range(100):
            print(f"{name}: line {line}", flush=True)
        print(f"{name}: \x1b[31mno such register\x1b[0m", file=sys.stderr)
        sys.exit(3)
    if os.environ.get("STAND_IN_HANG") == name:
        child = subprocess.Popen(["sleep", "600"])
        with open(f"{log}.child", "w", encoding="utf-8") as file:
            file.write(str(child.pid))
        time.sleep(600)


def container(columns):
    """The placeholder of tests/data/npu, for another width."""
    data = bytearray((DATA / "placeholder.xclbin").read_bytes())
    (count,) = struct.unpack_from("<I", data, 448)
    headers = [struct.unpack_from("<I20xQQ", data, 456 + 40 * i) for i in range(count)]
    (partition,) = [offset for kind, offset, _ in headers if kind == 32]
    struct.pack_into("<H", data, partition + 32, columns)
    return bytes(data)


def instructions(columns):
    """A transaction with each operation, in column 0."""
    address = 0x1D000
    operations = [
        [0, 0, address, 0, 7, 24],
        [1, 0, address, 32, 1, 2, 3, 4],
        [3, 0, address, 0, 7, 0xFF, 28],
        [4, 0, address, 0, 7, 0xFF, 28],
        *[[0x81, 48, 0, 0, 0, 0, address + 4, 0, argument, 0, 0, 0] for argument in range(5)],
        [0x80, 16, 0, 1 << 16 | 1 << 8],
    ]
    body = [word for operation in operations for word in operation]
    words = [6 << 24 | 3 << 16 | 1 << 8, 1 << 8 | columns, len(operations), 4 * (len(body) + 4), *body]
    return struct.pack(f"<{len(words)}I", *words)


if __name__ == "__main__" and sys.argv[1:] == ["--record"]:
    (DATA / "placeholder.bin").write_bytes(instructions(2))

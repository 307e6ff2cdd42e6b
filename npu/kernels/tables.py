"""The kernel's tables of exponentials, as a C header: `python3 tables.py > exp_tables.h`.

exp(x) is `whole[floor(x)] * part[x - floor(x)]` with 8 fractional bits. The entries are rounded to the nearest bf16,
like the entries of mlir-aie's aie_runtime_lib/AIE2/lut_based_ops.cpp. src/npu/tile.rs has the same entries. A table of
`aie::lut<4, bfloat16>` stores each group of 16 bytes twice in a row, and the table exists twice (AMD UG1603, "Lookup
Tables").
"""

import math
import struct

# Above this, exp is not a finite bf16. The kernel's arguments are 0 or less.
LARGEST = 88


def bf16(value):
    """The bits of the nearest bf16. A tie is rounded to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def whole():
    """exp(i) for i from -128 to 127, indexed by the two's complement of i."""
    signed = [i - 256 if i >= 128 else i for i in range(256)]
    return [bf16(math.exp(min(i, LARGEST))) if i > -88 else 0 for i in signed]


def part():
    """exp(i / 256)."""
    return [bf16(math.exp(i / 256)) for i in range(256)]


def twice(entries):
    return [entry for i in range(0, len(entries), 8) for entry in 2 * entries[i : i + 8]]


def header():
    lines = ["// Written by tables.py: exp(i) and exp(i / 256) as bf16, for aie::lut<4, bfloat16>.", "#pragma once"]
    for name, entries in [("whole", whole()), ("part", part())]:
        for copy in ("ab", "cd"):
            lines.append(f"alignas(aie::vector_decl_align) static const int16 exp_{name}_{copy}[512] = {{")
            doubled = twice(entries)
            lines += ["    " + ", ".join(map(str, doubled[i : i + 16])) + "," for i in range(0, 512, 16)]
            lines.append("};")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(header(), end="")

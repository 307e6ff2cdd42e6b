#!/usr/bin/env python3
"""Writes tests/data/gguf/blocks.safetensors: blocks of every quantized type that is read, and ggml's values of them.

    make_blocks.py --out ../../tests/data/gguf/blocks.safetensors        (README.md in this folder)

Every bit of a block is random and seeded, except that its f16 scales are finite. The values are those of
gguf.quants.dequantize, never of this script.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

SEED = 11
ROWS = 4
# Offsets of the f16 scales in a block of each type.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}


def finite_halves(rng, count):
    """Random f16 of every magnitude and sign, with subnormal numbers and both zeros, as bytes."""
    bits = rng.integers(0, 0x7C00, count, dtype=np.uint16)
    bits |= rng.integers(0, 2, count, dtype=np.uint16) << 15
    bits[:2] = [0, 0x8000]
    return bits.view(np.uint8).reshape(count, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rng = np.random.default_rng(SEED)
    tensors = {}
    for name, scales in SCALES.items():
        kind = GGMLQuantizationType[name]
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        # A row of several blocks.
        blocks_per_row = 2 if block_values == 256 else 3
        count = ROWS * blocks_per_row
        blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
        for at in scales:
            blocks[:, at:at + 2] = finite_halves(rng, count)
        blocks = blocks.reshape(ROWS, blocks_per_row * block_bytes)
        values = dequantize(blocks, kind)
        assert values.shape == (ROWS, blocks_per_row * block_values) and np.isfinite(values).all(), name
        tensors[name] = blocks
        tensors[f"{name}.values"] = values.astype(np.float32)
    save_file(tensors, out)


if __name__ == "__main__":
    main()

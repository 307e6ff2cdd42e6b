"""The core's C++ (npu/kernels/attention.cc) in a dispatch of a complete column, compared with exact attention.

The kernel is compiled for this machine with a stub of aie_api (tests/npu/host_aie_api). The schedule gives the
addresses for each core. The test reads the numbers there, converts them to the layout of the memory tile's DMA, and
writes the results of the core to the addresses of O. It does not show how mlir-aie, Peano and AIE2 behave.
"""

import array
import math
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "npu/kernels"))

import schedule  # noqa: E402
import tables  # noqa: E402
from schedule import CORES, Kernel  # noqa: E402
from simulator import Column  # noqa: E402

CALLS = {"begin": b"b", "queries": b"q", "begin_pass": b"p", "tile": b"t", "finish": b"f"}
# Half the error of an exponential: EXP_ERROR in src/npu/tile.rs, which derives the bound.
EXP_ERROR = 2.34 / 256


def to_bf16(x):
    return tables.bf16(x)


def from_bf16(bits):
    return array.array("f", array.array("I", [bits << 16]).tobytes())[0]


def permuted(elements, dimensions):
    """The bytes of an object after its layout."""
    indices = [0]
    for size, stride in dimensions:
        indices = [index + i * stride for index in indices for i in range(size)]
    return array.array(elements.typecode, [elements[i] for i in indices])


class Dispatch:
    """A job of one group with random inputs, whose scores have a deviation of about 3, and its kernel."""

    def __init__(self, kernel, rows, keys, row0, key0, window, seed):
        self.kernel, self.rows, self.keys, self.row0, self.key0, self.window = kernel, rows, keys, row0, key0, window
        rng = random.Random(seed)
        width, heads = kernel.head_dim, kernel.heads_per_group

        def numbers(count, scale):
            return array.array("H", [to_bf16(rng.gauss(0, scale)) for _ in range(count)])

        kv = kernel.keys * width
        words = [0x41584E55, 1, width, heads, 1, kernel.rows, kernel.keys, rows, keys, row0, key0, window or 0]
        words += [0] * (schedule.PARAM_WORDS - len(words))
        self.buffers = {
            "queries": numbers(heads * kernel.rows * width, 3 / math.sqrt(width)),
            "keys": numbers(kv, 1),
            "values": numbers(kv, 1),
            "params": array.array("H", array.array("I", words).tobytes()),
        }
        self.output = array.array("f", [math.nan]) * (heads * kernel.rows * width)

    def object(self, runs, layout):
        elements = array.array("H")
        for buffer, first, count in runs:
            elements.extend(self.buffers[buffer][first : first + count])
        return permuted(elements, layout).tobytes()

    def run(self, program):
        """Runs the column with the compiled core `program`, and fills `output`."""
        kernel = self.kernel
        column = Column(kernel, 0)
        column.run()
        size = kernel.object_elements
        blocks = {}
        for core in range(CORES):
            calls = bytearray()
            for who, function, objects, constant in column.log:
                if who != core:
                    continue
                calls += CALLS[function]
                if function in ("begin", "queries", "tile"):
                    calls += self.object(objects[0], schedule.key_layout(kernel))
                if function == "begin":
                    calls += constant.to_bytes(4, "little")
                if function == "tile":
                    calls += self.object(objects[1], schedule.value_layout(kernel))
            done = subprocess.run([program], input=calls, capture_output=True, check=True)
            results = array.array("f", done.stdout)
            for number in range(kernel.passes):
                block = results[number * size : (number + 1) * size]
                blocks[core, number] = permuted(block, schedule.output_layout(kernel))
        for first, length, core, number in column.written:
            self.output[first : first + length] = blocks[core, number]

    def worst(self, rows):
        """The largest error in these rows of each head, as a fraction of its bound."""
        kernel = self.kernel
        width = kernel.head_dim

        def vector(name, index):
            return [from_bf16(bits) for bits in self.buffers[name][index * width : (index + 1) * width]]

        wanted = range(self.keys)
        key_vectors = {key: vector("keys", key) for key in wanted}
        value_vectors = {key: vector("values", key) for key in wanted}
        worst = 0
        for head in range(kernel.heads_per_group):
            for row in rows:
                query = vector("queries", head * kernel.rows + row)
                position = self.row0 + row
                seen = [
                    key
                    for key in wanted
                    if self.key0 + key <= position and (not self.window or self.key0 + key + self.window > position)
                ]
                scores = {key: sum(map(float.__mul__, query, key_vectors[key])) for key in seen}
                largest = max(scores.values())
                weights = {key: math.exp(s - largest) for key, s in scores.items()}
                total = sum(weights.values())
                errors = {key: (largest - s + math.log(2)) / 256 + EXP_ERROR + 1e-3 for key, s in scores.items()}
                least = sum(weights[key] * math.exp(-errors[key]) for key in seen) / total
                at = (head * kernel.rows + row) * width
                for i in range(width):
                    exact = sum(weights[key] * value_vectors[key][i] for key in seen) / total
                    spread = (weights[k] * math.expm1(errors[k]) * abs(value_vectors[k][i] - exact) for k in seen)
                    bound = sum(spread) / total / least + 1e-4
                    part = abs(self.output[at + i] - exact) / bound
                    worst = max(worst, part if part == part else math.inf)
        return worst


class KernelOnTheHost(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        (Path(cls.folder.name) / "exp_tables.h").write_text(tables.header())

    def compiled(self, kernel, source=None):
        """The core for this kernel, from `source`, or from the kernel's own source with checks for undefined
        behaviour."""
        folder = Path(tempfile.mkdtemp(dir=self.folder.name))
        (folder / "attention.cc").write_text(source or (ROOT / "npu/kernels/attention.cc").read_text())
        compiler = next(filter(shutil.which, ["c++", "g++", "clang++"]))
        defines = {
            "HEAD_DIM": kernel.head_dim,
            "TILE": kernel.tile,
            "PASS_ROWS": kernel.pass_rows,
            "WALK_STEP": kernel.walk_step,
        }
        command = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", *[f"-D{n}={v}" for n, v in defines.items()]]
        command += [] if source else ["-fsanitize=undefined", "-fno-sanitize-recover"]
        command += [f"-I{ROOT / 'tests/npu/host_aie_api'}", f"-I{folder}", f"-I{self.folder.name}"]
        command += [str(ROOT / "tests/npu/core.cc"), "-o", str(folder / "core")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return folder / "core"

    def test_a_dispatch_is_within_the_bound(self):
        cases = [
            # 27B: all keys, with a job that ends inside a block and a tile; with a window only in the mask.
            (Kernel(128, 2, None, 256, 512, 1), (150, 391, 241, 0, None), [0, 1, 31, 32, 77, 149]),
            (Kernel(128, 2, None, 256, 512, 1), (256, 356, 100, 0, 64), [0, 40, 255]),
            # 1B: the windowed walk, whose first key is not the oldest key of the first row.
            (Kernel(256, 4, 512, 256, 1024, 1), (200, 715, 1027, 512, 512), [0, 15, 100, 199]),
            # 4B: the first rows of a text, which see few keys.
            (Kernel(256, 2, None, 256, 512, 1), (40, 40, 0, 0, 1024), [0, 1, 2, 16, 39]),
            # The demo model: the windowed walk, and four heads in a group.
            (Kernel(64, 2, 64, 256, 512, 1), (170, 250, 1040, 960, 64), [0, 31, 32, 64, 169]),
            (Kernel(64, 4, None, 256, 512, 1), (60, 130, 70, 0, None), [0, 31, 32, 59]),
        ]
        for seed, (kernel, job, rows) in enumerate(cases):
            with self.subTest(kernel=kernel, job=job):
                dispatch = Dispatch(kernel, *job, seed)
                dispatch.run(self.compiled(kernel))
                self.assertLess(dispatch.worst(rows), 0.75)

    def test_faults_of_the_source_exceed_the_bound(self):
        kernel = Kernel(128, 2, None, 256, 512, 1)
        source = (ROOT / "npu/kernels/attention.cc").read_text()
        for good, bad in [
            ("aie::le(key_positions, row_positions)", "aie::lt(key_positions, row_positions)"),
            ("aie::gt(aie::add(key_positions, state[WINDOW])", "aie::gt(aie::add(key_positions, state[WINDOW] + 1)"),
            ("last_key + window <= row_position", "last_key + window <= row_position + 40"),
            ("key_position > last_row ||", "key_position > row_position ||"),
            ("key_position + window > last_row)", "key_position + window > row_position)"),
            ("aie::store_v(sums, divided(aie::load_v<16>(sums), by));", ""),
            ("divided(aie::load_v<16>(output + i * 16), by)", "aie::load_v<16>(output + i * 16)"),
            ("state[ROW] += PASS_ROWS;", ""),
            ("words[i / 4 * 16 + i % 4]", "words[i]"),
            ("interleave_zip(left, right, 4)", "interleave_zip(left, right, 8)"),
            ("aie::mul(row_max(largest), LOG2_E)", "aie::mul(largest, LOG2_E)"),
        ]:
            with self.subTest(bad or f"without {good}"):
                self.assertIn(good, source)
                dispatch = Dispatch(kernel, 256, 356, 100, 0, 64, seed=9)
                dispatch.run(self.compiled(kernel, source.replace(good, bad)))
                self.assertGreater(dispatch.worst([0, 33, 100, 255]), 1.5)


if __name__ == "__main__":
    unittest.main()

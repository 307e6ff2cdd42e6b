"""The schedule of the NPU's attention kernel: its limits, and its simulation on addresses."""

import json
import random
import sys
import unittest
from collections import deque
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "npu/kernels"))

import schedule  # noqa: E402
import tables  # noqa: E402
from schedule import CORES, Kernel, ScheduleError  # noqa: E402
from simulator import Column, Deadlock, Recorder  # noqa: E402

# head_dim, heads in a group, window: 270M and 1B; 4B and 12B; 27B; the demo model.
GEMMA_3 = [(256, 4, 512), (256, 2, 1024), (128, 2, 1024), (64, 2, 64)]


def kernels(*buckets):
    """Kernels of every Gemma-3, with and without a window, for sizes (rows, keys)."""
    for head_dim, heads, window in GEMMA_3:
        for rows, keys in buckets:
            yield Kernel(head_dim, heads, None, rows, keys, 4)
            if rows + window + 32 <= keys:
                yield Kernel(head_dim, heads, window, rows, keys, 4)


def query_offset(kernel, group, core, number):
    """Where a core's block of a pass begins in Q and in O, in the layout [group][head][row][head_dim]."""
    head, block = divmod(core, kernel.blocks)
    row = number * kernel.pass_rows + block * kernel.tile
    return ((group * kernel.heads_per_group + head) * kernel.rows + row) * kernel.head_dim


def expected_log(kernel, group, core):
    """The calls of a core according to the contract: its own blocks of queries, and each tile of the pass in ascending
    order."""
    size = kernel.object_elements
    params = (("params", 0, 32), ("queries", 0, size - 32))
    log = [(core, "begin", (params,), core % kernel.blocks)]
    for number in range(kernel.passes):
        rows = ("block", core, number)
        log.append((core, "queries", ((("queries", query_offset(kernel, group, core, number), size),),), None))
        log.append((core, "begin_pass", (rows,), None))
        first, tiles = kernel.walk(number)
        for tile in range(first, first + tiles):
            offset = group * kernel.keys * kernel.head_dim + tile * size
            log.append((core, "tile", ((("keys", offset, size),), (("values", offset, size),), rows), None))
        log.append((core, "finish", (rows,), None))
    return log


def check_column(test, kernel, group, order=None, **changed):
    column = Column(kernel, group, **changed)
    column.run(order)
    for core in range(CORES):
        log = [call for call in column.log if call[0] == core]
        test.assertEqual(log, expected_log(kernel, group, core), f"core {core} of {kernel}")
    # Every number of the group's O is written once, by the core and in the pass that computed it.
    expected = {}
    for core in range(CORES):
        for number in range(kernel.passes):
            expected[query_offset(kernel, group, core, number)] = (kernel.object_elements, core, number)
    written = {}
    for first, length, core, number in column.written:
        test.assertNotIn(first, written)
        written[first] = (length, core, number)
    test.assertEqual(written, expected)


class Simulated(unittest.TestCase):
    def test_every_core_gets_its_queries_and_tiles_in_order_and_every_result_is_written_once(self):
        for kernel in kernels((256, 512), (256, 2048), (512, 2048)):
            check_column(self, kernel, group=0)
            check_column(self, kernel, group=3)

    def test_the_order_of_the_steps_does_not_change_results(self):
        kernel = Kernel(256, 2, 1024, 256, 2048, 2)
        for seed in range(5):
            check_column(self, kernel, 1, random.Random(seed))

    def test_one_object_of_each_fifo_is_enough(self):
        # A depth above one only allows overlap: no fifo needs more than one object to finish.
        kernel = Kernel(256, 4, None, 256, 512, 1)
        with mock.patch.multiple(schedule, MEM_TILE_DEPTH=1, CORE_DEPTH=1, OUTPUT_MEM_TILE_DEPTH=1):
            check_column(self, kernel, 0)

    def test_faults_are_found(self):
        kernel = Kernel(256, 2, None, 256, 512, 1)
        operations = list(schedule.sequence(kernel))
        values = next(i for i, (what, t) in enumerate(operations) if t.fifo == "values_in")

        def fails(error, operations=operations, programs=None):
            with self.assertRaises(error):
                check_column(self, kernel, 0, operations=operations, programs=programs)

        def changed(**fields):
            what, transfer = operations[values]
            return [*operations[:values], (what, replace(transfer, **fields)), *operations[values + 1 :]]

        # Transfers: missing, of the wrong keys, too short, too long, in the wrong order, output before the request.
        fails(Deadlock, operations[:values] + operations[values + 1 :])
        fails(AssertionError, changed(offset=kernel.object_elements))
        sizes = operations[values][1].sizes
        fails(ScheduleError, changed(sizes=(1, 1, 1, sizes[3] + kernel.object_elements)))
        fails(Deadlock, changed(sizes=(1, 1, 1, sizes[3] - 2)))
        swapped = list(operations)
        swapped[values - 1], swapped[values - 2] = swapped[values - 2], swapped[values - 1]
        fails(AssertionError, swapped)
        fails(Deadlock, [step for step in operations if step[1].fifo != "output" or step[0] == "await"])
        # Programs: a core that keeps the keys that it has read, one that stops early, one that takes the queries of
        # another core.
        def programs(change):
            all_steps = [deque(Recorder(kernel, core).steps) for core in range(CORES)]
            all_steps[2] = deque(change(list(all_steps[2])))
            return all_steps

        fails(Deadlock, programs=programs(lambda steps: [s for s in steps if s[:2] != ("release", "keys")]))
        fails(ScheduleError, programs=programs(lambda steps: steps[: len(steps) // 2]))
        fails(AssertionError, programs=[deque(Recorder(kernel, core ^ 1).steps) for core in range(CORES)])


class Limits(unittest.TestCase):
    def test_every_kernel_is_within_the_limits(self):
        buckets = [(rows, 512 << i) for rows in (256, 512) for i in range(9)]
        for kernel in kernels(*buckets):
            schedule.check(kernel)

    def test_the_budget_of_a_core(self):
        # The memory use of a core is known exactly. A core has 65536 bytes.
        for head_dim, total in [(256, 63488), (128, 64384), (64, 35712)]:
            kernel = Kernel(head_dim, 2, None, 256, 512, 1)
            self.assertEqual(sum(schedule.core_bytes(kernel).values()), total)
            self.assertEqual(schedule.core_bytes(kernel)["keys"], 2 * kernel.object_elements * 2)
            self.assertEqual(schedule.core_bytes(kernel)["output_core0"], kernel.object_elements * 4)

    def test_a_kernel_beyond_a_limit_is_refused(self):
        kernel = Kernel(256, 2, None, 512, 4096, 4)
        for name, value, text in [
            ("CORE_DEPTH", 3, "a core holds"),
            ("OUTPUT_CORE_DEPTH", 2, "a core holds"),
            ("MEM_TILE_DEPTH", 30, "a memory tile holds"),
            ("OUTPUT_MEM_TILE_DEPTH", 5, "descriptors|holds"),
            ("PASSES_IN_FLIGHT", 3, "are queued"),
            ("SHIM_QUEUE", 3, "are queued"),
            ("SHIM_DESCRIPTORS", 7, "descriptors"),
            ("SHIM_CHANNELS", 1, "channels"),
            ("CORE_CHANNELS", 1, "channels"),
            ("MEM_TILE_CHANNELS", 5, "channels"),
            ("CORE_DESCRIPTORS", 4, "descriptors"),
            ("MEM_TILE_DESCRIPTORS", 15, "descriptors"),
            ("MAX_WRAP", 127, "more than|fit a descriptor"),
            ("SHIM_STRIDE_WORDS", 65535, "fit a descriptor"),
            ("MEM_TILE_STRIDE_WORDS", 1023, "fit a descriptor"),
        ]:
            with self.subTest(name), mock.patch.object(schedule, name, value):
                self.assertRaisesRegex(ScheduleError, text, schedule.check, kernel)
        with mock.patch.object(Kernel, "tile", 32):
            self.assertRaisesRegex(ScheduleError, "a core holds", schedule.check, kernel)
        # Half a word cannot be transferred.
        params = schedule.linear("keys_in", 0, "params", 1, 32)
        self.assertRaisesRegex(ScheduleError, "whole words", schedule.check_sequence, [("start", params)])

    def test_no_kernel_has_another_shape(self):
        for shape in [(32, 2, None, 256, 512, 1), (64, 3, None, 256, 512, 1), (256, 3, None, 256, 512, 1), (256, 2, 1000, 256, 2048, 1)]:
            self.assertRaises(ScheduleError, Kernel, *shape)
        for bucket in [(128, 512, 1), (256, 600, 1), (256, 256, 1), (256, 1 << 18, 1), (256, 512, 5)]:
            self.assertRaises(ScheduleError, Kernel, 256, 2, None, *bucket)
        self.assertRaises(ScheduleError, Kernel, 256, 2, 1024, 512, 1024, 1)


class Layouts(unittest.TestCase):
    """A layout is the order in which a DMA reads an object. These tests compute the addresses that the kernel
    expects."""

    def order(self, dimensions):
        indices = [0]
        for size, stride in dimensions:
            indices = [index + i * stride for index in indices for i in range(size)]
        return indices

    def test_keys_and_values_have_the_layout_of_the_matrix_unit(self):
        for kernel in kernels((256, 512)):
            tile, width = kernel.tile, kernel.head_dim
            keys = self.order(schedule.key_layout(kernel))
            values = self.order(schedule.value_layout(kernel))
            self.assertEqual(sorted(keys), list(range(tile * width)))
            self.assertEqual(sorted(values), list(range(tile * width)))
            for key in range(tile):
                for i in range(width):
                    at = ((key // 4 * (width // 8) + i // 8) * 4 + key % 4) * 8 + i % 8
                    self.assertEqual(keys[at], key * width + i)
                    at = ((key // 8 * (width // 4) + i // 4) * 8 + key % 8) * 4 + i % 4
                    self.assertEqual(values[at], key * width + i)

    def test_results_leave_as_rows(self):
        for kernel in kernels((256, 512)):
            width = kernel.head_dim
            order = self.order(schedule.output_layout(kernel))
            for row in range(kernel.tile):
                for i in range(width):
                    at = ((row // 4 * (width // 4) + i // 4) * 4 + row % 4) * 4 + i % 4
                    self.assertEqual(order[row * width + i], at)

    def test_parameters_are_found_in_the_first_object(self):
        for kernel in kernels((256, 512)):
            order = self.order(schedule.key_layout(kernel))
            for word in range(schedule.PARAM_WORDS):
                for half in range(2):
                    self.assertEqual(order[2 * schedule.param_index(word) + half], 2 * word + half)


class Walks(unittest.TestCase):
    def test_a_pass_reads_every_key_that_its_rows_see(self):
        for kernel in kernels((256, 512), (512, 4096)):
            tile = kernel.tile
            if kernel.window is None:
                offsets = [0, 1, kernel.keys - kernel.rows]
            else:
                offsets = [kernel.window - 1, kernel.window + tile - 2]
            for number in range(kernel.passes):
                first, tiles = kernel.walk(number)
                self.assertLessEqual((first + tiles) * tile, kernel.keys)
                for offset in offsets:
                    # The first key that the first row of the pass sees, and the last row's own.
                    oldest = 0 if kernel.window is None else number * kernel.pass_rows + offset - kernel.window + 1
                    newest = offset + (number + 1) * kernel.pass_rows - 1
                    self.assertLessEqual(first * tile, oldest)
                    self.assertLess(newest, (first + tiles) * tile)

    def test_the_walks_equal_the_file_that_the_rust_tests_read(self):
        # python3 tests/tools/test_npu_schedule.py --record writes the file.
        self.assertEqual(list(schedule.walks()), json.loads(WALKS.read_text()))


class Tables(unittest.TestCase):
    def test_entries_equal_those_of_aie2_and_are_stored_four_times(self):
        whole, part = tables.whole(), tables.part()
        # mlir-aie's exp_ilut_ab at 1, -1, -80 and -128, and exp_flut_ab at 1/256, 128/256 and 255/256.
        self.assertEqual([whole[i] for i in (0, 1, 255, 176, 128)], [16256, 16430, 16060, 1472, 0])
        self.assertEqual([part[i] for i in (0, 1, 128, 255)], [16256, 16257, 16339, 16429])
        twice = tables.twice(part)
        self.assertEqual(twice[:24], part[:8] + part[:8] + part[8:16])
        self.assertEqual(2 * 2 * len(twice) * 2, schedule.TABLE_BYTES)
        header = tables.header()
        for name in ("exp_whole_ab", "exp_whole_cd", "exp_part_ab", "exp_part_cd"):
            self.assertIn(f"{name}[512]", header)


WALKS = ROOT / "tests/data/npu/walks.json"

if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        WALKS.write_text("[\n" + ",\n".join(json.dumps(walk) for walk in schedule.walks()) + "\n]\n")
    else:
        unittest.main()

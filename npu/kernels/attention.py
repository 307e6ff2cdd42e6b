"""Attention of a prompt's tokens on an NPU of a Ryzen AI 7040 or 8040, as an IRON design of mlir-aie; prints MLIR.

Unverified source: never compiled by mlir-aie, and never run on an NPU. Its toolchain (mlir-aie and Peano) is not
available where this project's tests run. The plan is in schedule.py, which needs no toolchain. A test runs this file
with a stand-in for mlir-aie.

    python3 attention.py --head-dim 256 --heads-per-group 2 [--window 1024] --rows 512 --keys 2048 --groups 4

The design uses mlir-aie's explicitly placed interface, `aie.dialects.aie` and `aie.dialects.aiex`. README.md has the
steps from here to an xclbin.
"""

import argparse
import sys

import numpy as np
from aie.dialects.aie import (
    AIEDevice,
    ObjectFifoPort,
    buffer,
    core,
    device,
    external_func,
    object_fifo,
    object_fifo_link,
    tile,
)
from aie.dialects.aiex import (
    dma_await_task,
    dma_free_task,
    dma_start_task,
    runtime_sequence,
    shim_dma_single_bd_task,
)
from aie.extras.context import mlir_mod_ctx
from aie.iron.controlflow import range_
from ml_dtypes import bfloat16

import schedule
from schedule import CORES, Kernel

OBJECT_FILE = "attention.o"
TYPES = {"bf16": bfloat16, "f32": np.float32, "i32": np.int32}
# The device by its number of columns. A partition has one column for each group of the bucket.
DEVICES = {1: AIEDevice.npu1_1col, 2: AIEDevice.npu1_2col, 3: AIEDevice.npu1_3col, 4: AIEDevice.npu1}


def array(elements, kind):
    return np.ndarray[(elements,), np.dtype[TYPES[kind]]]


class Port:
    """A fifo with the interface that schedule.core_program needs: one object at a time."""

    def __init__(self, fifo, port):
        self.fifo, self.port = fifo, port

    def acquire(self):
        return self.fifo.acquire(self.port, 1)

    def release(self):
        self.fifo.release(self.port, 1)


class Functions:
    """The functions of attention.cc, which receive the core's own buffers automatically."""

    def __init__(self, functions, buffers):
        self.functions, self.own = functions, buffers

    def begin(self, params, block):
        self.functions["begin"](params, self.own["state"], block)

    def queries(self, block):
        self.functions["queries"](block, self.own["queries"])

    def begin_pass(self, output):
        own = self.own
        self.functions["begin_pass"](output, own["sums"], own["exponents"], own["state"])

    def tile(self, keys, values, output):
        own = self.own
        rest = [own[name] for name in ("queries", "sums", "exponents", "scores", "weights", "state")]
        self.functions["tile"](keys, values, output, *rest)

    def finish(self, output):
        self.functions["finish"](output, self.own["sums"])


def declare_functions(kernel):
    own = {name: array(elements, kind) for name, (elements, kind) in schedule.core_buffers(kernel).items()}
    tile_type = array(kernel.object_elements, "bf16")
    output = array(kernel.object_elements, "f32")
    in_tile = [own[name] for name in ("queries", "sums", "exponents", "scores", "weights", "state")]
    inputs = {
        "begin": [tile_type, own["state"], np.int32],
        "queries": [tile_type, own["queries"]],
        "begin_pass": [output, own["sums"], own["exponents"], own["state"]],
        "tile": [tile_type, tile_type, output, *in_tile],
        "finish": [output, own["sums"]],
    }
    return {name: external_func(f"attention_{name}", inputs=types) for name, types in inputs.items()}


def make_fifos(kernel, column):
    """The fifos of a column, from their description, and their links."""
    places = {"shim": tile(column, 0), "mem": tile(column, 1)}
    places |= {f"core{i}": tile(column, 2 + i) for i in range(CORES)}
    made = {}
    for name, fifo in schedule.fifos(kernel).items():
        kind = "f32" if fifo.element_bytes == schedule.F32 else "bf16"
        elements = fifo.object_bytes // fifo.element_bytes
        # The joined output is read block by block, each block in the order of the layout.
        consumers = [places[consumer] for consumer in fifo.consumers]
        # The shim's end of a fifo has no objects. Its depth is the depth of the other end.
        depths = [depth or max(fifo.depths) for depth in fifo.depths]
        made[name] = object_fifo(
            f"{name}_{column}", places[fifo.producer], consumers, depths, array(elements, kind), list(fifo.to_stream)
        )
    object_fifo_link(made["keys_in"], made["keys"])
    object_fifo_link(made["values_in"], made["values"])
    offsets = [i * kernel.object_elements for i in range(CORES)]
    object_fifo_link([made[f"output_core{i}"] for i in range(CORES)], made["output"], offsets, [])
    return places, made


def make_core(kernel, place, index, made, functions):
    buffers = {
        name: buffer(place, array(elements, kind)) for name, (elements, kind) in schedule.core_buffers(kernel).items()
    }

    # The lengths of the loops differ between passes, so the index of a fifo's next object is known only at run time.
    @core(place, OBJECT_FILE, dynamic_objfifo_lowering=True, stack_size=schedule.STACK_BYTES)
    def body():
        for _ in range_(sys.maxsize):
            schedule.core_program(
                kernel,
                index,
                range_,
                Port(made["keys"], ObjectFifoPort.Consume),
                Port(made["values"], ObjectFifoPort.Consume),
                Port(made[f"output_core{index}"], ObjectFifoPort.Produce),
                Functions(functions, buffers),
            )


def make_sequence(kernel, columns):
    heads = kernel.groups * kernel.heads_per_group
    rows = heads * kernel.rows * kernel.head_dim
    keys = kernel.groups * kernel.keys * kernel.head_dim

    @runtime_sequence(
        array(rows, "bf16"),
        array(keys, "bf16"),
        array(keys, "bf16"),
        array(rows, "f32"),
        array(schedule.PARAM_WORDS, "i32"),
    )
    def sequence(queries, keys, values, output, params):
        buffers = {"queries": queries, "keys": keys, "values": values, "output": output, "params": params}
        # The tasks of each column in the order of their start, including tasks without a token.
        started = [[] for _ in range(kernel.groups)]
        for what, transfer in schedule.sequence(kernel):
            tasks = started[transfer.column]
            if what == "await":
                after = next(i for i, (_, other) in enumerate(tasks) if other is transfer)
                end = next((i for i in range(after + 1, len(tasks)) if tasks[i][1].has_token), len(tasks))
                dma_await_task(tasks[after][0])
                # The output has arrived, so these tasks are done too, and their descriptors are free.
                dma_free_task(*[task for task, other in tasks[:end] if not other.has_token])
                del tasks[:end]
                continue
            # The parameters' buffer has words, but their transfer counts elements of the fifo.
            per_word = 2 if transfer.buffer == "params" else 1
            *outer, inner = transfer.sizes
            task = shim_dma_single_bd_task(
                columns[transfer.column][transfer.fifo],
                buffers[transfer.buffer],
                offset=transfer.offset // per_word,
                sizes=[*outer, inner // per_word],
                strides=list(transfer.strides),
                issue_token=transfer.has_token,
            )
            dma_start_task(task)
            tasks.append((task, transfer))


def design(kernel):
    schedule.check(kernel)
    with mlir_mod_ctx() as context:

        @device(DEVICES[kernel.groups])
        def body():
            functions = declare_functions(kernel)
            columns = []
            for column in range(kernel.groups):
                places, made = make_fifos(kernel, column)
                columns.append(made)
                for index in range(CORES):
                    make_core(kernel, places[f"core{index}"], index, made, functions)
            make_sequence(kernel, columns)

        return context.module


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--heads-per-group", type=int, required=True)
    parser.add_argument("--window", type=int)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    arguments = parser.parse_args()
    try:
        kernel = Kernel(**vars(arguments))
        schedule.check(kernel)
    except schedule.ScheduleError as error:
        sys.exit(f"error: {error}")
    print(design(kernel))


if __name__ == "__main__":
    main()

"""The IRON design (npu/kernels/attention.py), run with a stub of mlir-aie that records all calls.

The test shows that the design makes the calls that schedule.py plans, and uses the functions of attention.cc. It does
not show whether the real mlir-aie accepts the design.
"""

import contextlib
import importlib
import io
import re
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "npu/kernels"))

import schedule  # noqa: E402
from schedule import CORES, Kernel  # noqa: E402
from simulator import Recorder  # noqa: E402


class Subscripted:
    """`np.ndarray` and `np.dtype`, as far as buffer types need them."""

    def __class_getitem__(cls, what):
        return (cls.__name__, what)


class ndarray(Subscripted):
    pass


class dtype(Subscripted):
    pass


class StandIn:
    """A stub of mlir-aie's modules. Records every call in order."""

    def __init__(self):
        self.fifos, self.links, self.cores, self.functions = {}, [], {}, {}
        self.buffers, self.tasks, self.device = [], [], None
        self.steps = None

    def modules(self):
        numpy = types.SimpleNamespace(ndarray=ndarray, dtype=dtype, float32="f32", int32="i32")
        devices = {f"npu1{end}": f"npu1{end}" for end in ("", "_1col", "_2col", "_3col")}
        aie = types.SimpleNamespace(
            AIEDevice=types.SimpleNamespace(**devices),
            ObjectFifoPort=types.SimpleNamespace(Consume="consume", Produce="produce"),
            buffer=self.buffer,
            core=self.core,
            device=self.make_device,
            external_func=self.external_func,
            object_fifo=self.object_fifo,
            object_fifo_link=lambda *link: self.links.append(link),
            tile=lambda column, row: (column, row),
        )
        aiex = types.SimpleNamespace(
            dma_await_task=lambda *tasks: self.end("await", tasks),
            dma_free_task=lambda *tasks: self.end("free", tasks),
            dma_start_task=lambda task: self.tasks.append(("start", task)),
            runtime_sequence=self.runtime_sequence,
            shim_dma_single_bd_task=self.task,
        )
        empty = types.SimpleNamespace()
        return {
            "numpy": numpy,
            "ml_dtypes": types.SimpleNamespace(bfloat16="bf16"),
            **{name: empty for name in ("aie", "aie.dialects", "aie.extras", "aie.iron")},
            "aie.dialects.aie": aie,
            "aie.dialects.aiex": aiex,
            "aie.extras.context": types.SimpleNamespace(mlir_mod_ctx=self.context),
            "aie.iron.controlflow": types.SimpleNamespace(range_=self.loop),
        }

    @contextlib.contextmanager
    def context(self):
        yield types.SimpleNamespace(module="module")

    def loop(self, start, stop=None, step=1):
        # The endless loop of a core is one dispatch here.
        return range(1) if start == sys.maxsize else range(start, stop, step)

    def make_device(self, device):
        self.device = device
        return lambda body: body()

    def buffer(self, place, kind):
        self.buffers.append((place, kind))
        return ("buffer", len(self.buffers) - 1)

    def object_fifo(self, name, producer, consumers, depths, kind, to_stream):
        assert name not in self.fifos and len(depths) == 1 + len(consumers) and min(depths) > 0
        fifo = types.SimpleNamespace(name=name, producer=producer, consumers=consumers, depths=depths, kind=kind)
        fifo.to_stream = to_stream
        fifo.acquire = lambda port, count: self.acquire(name, port, count)
        fifo.release = lambda port, count: self.steps.append(("release", name, port, count))
        self.fifos[name] = fifo
        return fifo

    def acquire(self, name, port, count):
        self.steps.append(("acquire", name, port, count))
        return ("object", len(self.steps))

    def external_func(self, name, inputs):
        self.functions[name] = inputs

        def call(*arguments):
            assert len(arguments) == len(inputs), name
            self.steps.append(("call", name, arguments))

        return call

    def core(self, place, object_file, dynamic_objfifo_lowering, stack_size):
        def run(body):
            assert dynamic_objfifo_lowering and stack_size == schedule.STACK_BYTES
            self.steps = self.cores[place] = []
            body()

        return run

    def runtime_sequence(self, *kinds):
        self.arguments = kinds
        return lambda body: body("queries", "keys", "values", "output", "params")

    def task(self, fifo, buffer, offset, sizes, strides, issue_token):
        return types.SimpleNamespace(
            fifo=fifo.name, buffer=buffer, offset=offset, sizes=sizes, strides=strides, token=issue_token, ended=[]
        )

    def end(self, how, tasks):
        for task in tasks:
            task.ended.append(how)
            self.tasks.append((how, task))


def made(kernel):
    stand_in = StandIn()
    with mock.patch.dict(sys.modules, stand_in.modules()):
        sys.modules.pop("attention", None)
        attention = importlib.import_module("attention")
        module = attention.design(kernel)
    sys.modules.pop("attention", None)
    return stand_in, module


KERNELS = [
    Kernel(256, 4, None, 256, 1024, 1),
    Kernel(256, 2, 1024, 512, 2048, 4),
    Kernel(128, 2, None, 512, 512, 3),
    Kernel(64, 2, 64, 256, 512, 2),
]


class Design(unittest.TestCase):
    def test_every_core_runs_the_program_of_the_simulator(self):
        for kernel in KERNELS:
            design, module = made(kernel)
            self.assertEqual(module, "module")
            self.assertEqual(design.device, "npu1" if kernel.groups == 4 else f"npu1_{kernel.groups}col")
            places = {(column, 2 + core) for column in range(kernel.groups) for core in range(CORES)}
            self.assertEqual(set(design.cores), places)
            for (column, row), steps in design.cores.items():
                core = row - 2
                names = {name: f"{name}_{column}" for name in ("keys", "values")}
                names["output"] = f"output_core{core}_{column}"
                expected = []
                for kind, name, *_ in Recorder(kernel, core).steps:
                    if kind == "call":
                        expected.append(("call", f"attention_{name}"))
                    else:
                        port = "produce" if name == "output" else "consume"
                        expected.append((kind, names[name], port, 1))
                self.assertEqual([step if step[0] != "call" else step[:2] for step in steps], expected)

    def test_fifos_buffers_and_links_are_the_planned_ones(self):
        for kernel in KERNELS:
            design, _ = made(kernel)
            self.assertEqual(len(design.fifos), kernel.groups * len(schedule.fifos(kernel)))
            for column in range(kernel.groups):
                places = {"shim": (column, 0), "mem": (column, 1)}
                places.update({f"core{i}": (column, 2 + i) for i in range(CORES)})
                for name, planned in schedule.fifos(kernel).items():
                    fifo = design.fifos[f"{name}_{column}"]
                    self.assertEqual(fifo.producer, places[planned.producer])
                    self.assertEqual(fifo.consumers, [places[consumer] for consumer in planned.consumers])
                    self.assertEqual(fifo.to_stream, list(planned.to_stream))
                    _, ((elements,), (_, kind)) = fifo.kind
                    self.assertEqual(elements * {"bf16": 2, "f32": 4}[kind], planned.object_bytes)
                    for depth, expected in zip(fifo.depths, planned.depths):
                        self.assertIn(expected, (0, depth))
            self.assertEqual(len(design.links), 3 * kernel.groups)
            sizes = sum(elements for _, ((elements,), _) in (kind for _, kind in design.buffers[:6]))
            self.assertEqual(sizes, sum(elements for elements, _ in schedule.core_buffers(kernel).values()))

    def test_the_sequence_starts_the_planned_transfers_and_ends_each_once(self):
        for kernel in KERNELS:
            design, _ = made(kernel)
            planned = [(what, transfer) for what, transfer in schedule.sequence(kernel)]
            started = [transfer for what, transfer in planned if what == "start"]
            tasks = [task for what, task in design.tasks if what == "start"]
            self.assertEqual(len(tasks), len(started))
            for task, transfer in zip(tasks, started):
                self.assertEqual(task.fifo, f"{transfer.fifo}_{transfer.column}")
                self.assertEqual((task.buffer, task.token), (transfer.buffer, transfer.has_token))
                # The buffer of the parameters has words. The other buffers have the elements of the fifo.
                per_word = 2 if transfer.buffer == "params" else 1
                self.assertEqual(task.offset * per_word, transfer.offset)
                self.assertEqual(task.sizes[3] * per_word, transfer.sizes[3])
                self.assertEqual((task.sizes[:3], task.strides), (list(transfer.sizes[:3]), list(transfer.strides)))
                self.assertEqual(task.ended, ["await" if transfer.has_token else "free"])
            # Waits are at the planned places.
            steps = [(what, task.offset) for what, task in design.tasks if what != "free" and task.token]
            outputs = [(what, transfer.offset) for what, transfer in planned if transfer.has_token]
            self.assertEqual(steps, outputs)

    def test_buffers_of_the_job_have_the_bytes_of_the_contract(self):
        kernel = Kernel(256, 2, 1024, 512, 2048, 4)
        design, _ = made(kernel)
        size = {"bf16": 2, "f32": 4, "i32": 4}
        sizes = [elements * size[kind] for _, ((elements,), (_, kind)) in design.arguments]
        rows, keys = 4 * 2 * 512 * 256, 4 * 2048 * 256
        self.assertEqual(sizes, [2 * rows, 2 * keys, 2 * keys, 4 * rows, 64])

    def test_called_functions_are_declared_in_the_source(self):
        design, _ = made(KERNELS[0])
        source = (ROOT / "npu/kernels/attention.cc").read_text()
        defined = dict(re.findall(r"^void (attention_\w+)\(([^)]*)\) \{", source, re.MULTILINE))
        self.assertEqual(set(defined), set(design.functions))
        c_type = {"bf16": "bfloat16", "f32": "float", "i32": "int32"}
        for name, inputs in design.functions.items():
            parameters = [re.match(r"(?:const )?(\w+) (\*?)", p.strip()).groups() for p in defined[name].split(",")]
            declared = [(c_type[k], "") if isinstance(k, str) else (c_type[k[1][1][1]], "*") for k in inputs]
            self.assertEqual(parameters, declared, name)
        # The buffers that a core passes have the types that the function declares.
        for place, steps in design.cores.items():
            for step in (step for step in steps if step[0] == "call"):
                for argument, declared in zip(step[2], design.functions[step[1]]):
                    if isinstance(argument, tuple) and argument[0] == "buffer":
                        self.assertEqual(design.buffers[argument[1]], (place, declared))

    def test_an_unsupported_shape_is_a_one_line_error(self):
        stand_in = StandIn()
        arguments = "attention.py --head-dim 32 --heads-per-group 2 --rows 256 --keys 512 --groups 1".split()
        with mock.patch.dict(sys.modules, stand_in.modules()), mock.patch.object(sys, "argv", arguments):
            attention = importlib.import_module("attention")
            with self.assertRaisesRegex(SystemExit, "error: no kernel has head_dim 32"):
                attention.main()
            arguments[2] = "256"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                attention.main()
            self.assertEqual(printed.getvalue(), "module\n")
        sys.modules.pop("attention", None)


if __name__ == "__main__":
    unittest.main()

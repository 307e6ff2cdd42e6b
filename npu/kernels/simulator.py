"""Runs the schedule of a column on addresses instead of numbers.

Every object is the list of the addresses from which it was read. The simulator has the depths of the fifos, the
broadcast, the join, the task queues of the shim and the waits of the sequence, but no time. A column is a network of
processes that read and write in a fixed order, and wait if a fifo is empty or full. So the order in which the processes
run has no effect on whether the column finishes, or on what each core receives. `order` shuffles it to test that.
"""

from collections import deque

import schedule
from schedule import CORES, ScheduleError


class Deadlock(ScheduleError):
    """No process can continue, but not all of them have finished."""


class Recorder:
    """Records the calls of a core's program, with Python's own loops."""

    def __init__(self, kernel, core):
        self.steps = []
        self.handles = 0
        fifos = [Port(self, name) for name in ("keys", "values", "output")]
        schedule.core_program(kernel, core, range, *fifos, self)

    def begin(self, params, block):
        self.steps.append(("call", "begin", (params,), block))

    def queries(self, block):
        self.steps.append(("call", "queries", (block,), None))

    def begin_pass(self, output):
        self.steps.append(("call", "begin_pass", (output,), None))

    def tile(self, keys, values, output):
        self.steps.append(("call", "tile", (keys, values, output), None))

    def finish(self, output):
        self.steps.append(("call", "finish", (output,), None))


class Port:
    """The recorder's side of a fifo."""

    def __init__(self, recorder, name):
        self.recorder, self.name = recorder, name

    def acquire(self):
        self.recorder.handles += 1
        self.recorder.steps.append(("acquire", self.name, self.recorder.handles))
        return self.recorder.handles

    def release(self):
        self.recorder.steps.append(("release", self.name))


class Column:
    """A simulated column. `log` has (core, function, objects, constant) of every call, and `written` has the addresses
    of O in the order in which they were written, each with (core, pass)."""

    def __init__(self, kernel, group, operations=None, programs=None):
        self.kernel = kernel
        self.fifos = schedule.fifos(kernel)
        every = list(schedule.sequence(kernel)) if operations is None else operations
        self.operations = deque(step for step in every if step[1].column == group)
        self.programs = programs or [deque(Recorder(kernel, core).steps) for core in range(CORES)]
        self.tasks = {name: deque() for name in ("keys_in", "values_in", "output")}
        self.done = []
        # The object that a shim is sending: its addresses until now, and the number of their elements.
        self.partial = {"keys_in": ([], 0), "values_in": ([], 0)}
        self.mem = {"keys": deque(), "values": deque()}
        self.inbox = [{"keys": deque(), "values": deque()} for _ in range(CORES)]
        self.held = [{} for _ in range(CORES)]
        self.owned = [{"keys": deque(), "values": deque(), "output": deque()} for _ in range(CORES)]
        self.outbox = [deque() for _ in range(CORES)]
        self.joined = [deque() for _ in range(CORES)]
        self.passes = [0] * CORES
        self.output_run = None
        self.log, self.written = [], []

    def run(self, order=None):
        """Runs to the end. Raises Deadlock, or ScheduleError if any object is left over."""
        movers = [self.host, lambda: self.send("keys_in", "keys"), lambda: self.send("values_in", "values")]
        movers += [lambda: self.broadcast("keys"), lambda: self.broadcast("values"), self.drain]
        for core in range(CORES):
            movers += [lambda core=core: self.step(core), lambda core=core: self.join(core)]
        moved = True
        while moved:
            if order:
                order.shuffle(movers)
            # Each mover moves once in turn, so that none of them gets far ahead of the others.
            moved = any([mover() for mover in movers])
        waiting = [f"core {i} has {len(p)} steps left, {p[0]}" for i, p in enumerate(self.programs) if p]
        waiting += [f"the sequence has {len(self.operations)} steps left"] if self.operations else []
        if waiting:
            raise Deadlock("; ".join(waiting))
        left = [name for name, tasks in self.tasks.items() if tasks] + [n for n, (_, c) in self.partial.items() if c]
        left += [n for n, objects in self.mem.items() if objects] + ["inbox" for box in self.inbox if any(box.values())]
        if left:
            raise ScheduleError(f"objects that no consumer reads are left over: {left}")

    def host(self):
        if not self.operations:
            return False
        what, transfer = self.operations[0]
        if what == "await":
            if transfer not in self.done:
                return False
        elif len(self.tasks[transfer.fifo]) >= schedule.SHIM_QUEUE:
            raise ScheduleError(f"the queue of {transfer.fifo} overflows")
        else:
            self.tasks[transfer.fifo].append([transfer, deque(transfer.runs())])
        self.operations.popleft()
        return True

    def send(self, shim, fifo):
        """The shim's DMA fills the next object of the memory tile."""
        tasks = self.tasks[shim]
        if not tasks or len(self.mem[fifo]) >= self.fifos[fifo].depths[0]:
            return False
        transfer, runs = tasks[0]
        addresses, count = self.partial[shim]
        first, length = runs.popleft()
        part = min(length, self.kernel.object_elements - count)
        if addresses and addresses[-1][0] == transfer.buffer and sum(addresses[-1][1:]) == first:
            addresses[-1] = (transfer.buffer, addresses[-1][1], addresses[-1][2] + part)
        else:
            addresses.append((transfer.buffer, first, part))
        if part < length:
            runs.appendleft((first + part, length - part))
        if not runs:
            tasks.popleft()
        self.partial[shim] = (addresses, count + part)
        if count + part == self.kernel.object_elements:
            self.mem[fifo].append(tuple(addresses))
            self.partial[shim] = ([], 0)
        return True

    def broadcast(self, fifo):
        """A stream to four cores moves only while all of them accept data."""
        depth = self.fifos[fifo].depths[1]
        rooms = [len(self.inbox[c][fifo]) + len(self.owned[c][fifo]) < depth for c in range(CORES)]
        if not self.mem[fifo] or not all(rooms):
            return False
        tile = self.mem[fifo].popleft()
        for core in range(CORES):
            self.inbox[core][fifo].append(tile)
        return True

    def step(self, core):
        if not self.programs[core]:
            return False
        kind, name, *rest = self.programs[core][0]
        if kind == "acquire" and name == "output":
            if len(self.outbox[core]) + len(self.owned[core][name]) >= self.fifos["output_core0"].depths[0]:
                return False
            self.owned[core][name].append(("block", core, self.passes[core]))
            self.held[core][rest[0]] = self.owned[core][name][-1]
            self.passes[core] += 1
        elif kind == "acquire":
            if not self.inbox[core][name]:
                return False
            self.owned[core][name].append(self.inbox[core][name].popleft())
            self.held[core][rest[0]] = self.owned[core][name][-1]
        elif kind == "release":
            freed = self.owned[core][name].popleft()
            if name == "output":
                self.outbox[core].append(freed)
        else:
            handles, constant = rest
            self.log.append((core, name, tuple(self.held[core][handle] for handle in handles), constant))
        self.programs[core].popleft()
        return True

    def join(self, core):
        if not self.outbox[core] or len(self.joined[core]) >= self.fifos["output"].depths[0]:
            return False
        self.joined[core].append(self.outbox[core].popleft())
        return True

    def drain(self):
        """The shim's DMA writes an object: the four cores' blocks, one after the other."""
        if not self.tasks["output"] or not all(self.joined):
            return False
        transfer, runs = self.tasks["output"].popleft()
        if transfer.elements() != CORES * self.kernel.object_elements:
            raise ScheduleError(f"an output is not one object: {transfer}")
        for core in range(CORES):
            _, _, number = self.joined[core].popleft()
            left = self.kernel.object_elements
            while left:
                first, length = runs.popleft()
                part = min(left, length)
                self.written.append((first, part, core, number))
                if part < length:
                    runs.appendleft((first + part, length - part))
                left -= part
        self.done.append(transfer)
        return True

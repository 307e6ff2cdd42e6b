"""What moves where in the attention kernel for the NPU of a Ryzen AI 7040 or 8040 (`npu1`: 4 columns of 4 cores).

Plain Python without dependencies. `attention.py` makes the compiler's input from it, and `simulator.py` runs it, so
both use one description of the walk over the keys, the object fifos, the memory and the order of transfers. The walk is
also `Shape::walk` in src/npu/contract.rs. Tests compare both with tests/data/npu/walks.json.

A column computes one KV head. Its four cores share the query heads: with two heads in a group, each head has two blocks
of rows at a time, with four heads one. That is a *pass*. All cores of a column read the same keys and values.

    DDR --K, and Q and the parameters before it--> memory tile --broadcast--> 4 cores
    DDR --V------------------------------------->  memory tile --broadcast--> 4 cores
    DDR <--O------------------------------------   memory tile <------------- 4 cores, joined

A core has two input streams, so Q comes on the stream of K: a block of queries has the size of a tile of keys. Each
core receives all four blocks of a pass, and keeps its own. The first object of a dispatch begins with the 16 words of
parameters.
"""

from dataclasses import dataclass

CORES = 4
BF16 = 2
F32 = 4

# Limits of the AIE2 array of npu1: AMD AM020 (memories, DMA channels, buffer descriptors) and AM025 (widths of the
# fields of a descriptor). A word is 4 bytes.
CORE_BYTES = 64 * 1024
MEM_TILE_BYTES = 512 * 1024
CORE_CHANNELS = 2
MEM_TILE_CHANNELS = 6
SHIM_CHANNELS = 2
CORE_DESCRIPTORS = 16
# A memory tile has 48. Channels with even numbers use the first half, channels with odd numbers the second half.
MEM_TILE_DESCRIPTORS = 24
SHIM_DESCRIPTORS = 16
SHIM_QUEUE = 4
MAX_WRAP = 1023
SHIM_STRIDE_WORDS = 1 << 20
MEM_TILE_STRIDE_WORDS = 1 << 17

# Number of objects that a fifo holds in the memory tile and in a core.
MEM_TILE_DEPTH = 4
CORE_DEPTH = 2
OUTPUT_MEM_TILE_DEPTH = 2
OUTPUT_CORE_DEPTH = 1

# Number of passes whose transfers are started before the first of these passes is known to be done.
PASSES_IN_FLIGHT = 2

PARAM_WORDS = 16
STACK_BYTES = 1024
# Two tables of 256 bf16. Each entry is stored four times, for four parallel reads (AMD UG1603, "Lookup Tables").
TABLE_BYTES = 2 * 256 * 4 * BF16


class ScheduleError(Exception):
    """An impossible kernel, or a schedule that exceeds a limit of the array."""


@dataclass(frozen=True)
class Kernel:
    """A shape and a bucket, as in src/npu/contract.rs."""

    head_dim: int
    heads_per_group: int
    window: int | None
    rows: int
    keys: int
    groups: int

    def __post_init__(self):
        if self.head_dim not in (64, 128, 256) or self.heads_per_group not in (2, 4):
            raise ScheduleError(f"no kernel has head_dim {self.head_dim} and {self.heads_per_group} heads in a group")
        is_bucket = 512 <= self.keys <= 131072 and self.keys & (self.keys - 1) == 0
        if self.rows not in (256, 512) or not is_bucket or not 1 <= self.groups <= 4:
            raise ScheduleError(f"no bucket has {self.rows} rows, {self.keys} keys and {self.groups} groups")
        if self.window is not None and (self.window % self.tile or not self.tile <= self.window <= 1 << 16):
            raise ScheduleError(f"a window of {self.window} is not a multiple of {self.tile}")
        if self.rows + (self.window + self.tile if self.window else 0) > self.keys:
            raise ScheduleError(f"{self.keys} keys are too few for {self.rows} rows and a window of {self.window}")

    @property
    def tile(self):
        """Rows of a block of queries, and keys of a tile."""
        return 32 if self.head_dim <= 128 else 16

    @property
    def blocks(self):
        """Blocks of rows of one head in a pass."""
        return CORES // self.heads_per_group

    @property
    def pass_rows(self):
        return self.blocks * self.tile

    @property
    def passes(self):
        return self.rows // self.pass_rows

    @property
    def object_elements(self):
        """Numbers in a tile of keys or values, or in a block of queries."""
        return self.tile * self.head_dim

    @property
    def walk_step(self):
        """Number of tiles from the first tile of a pass to the first tile of the next pass."""
        return 0 if self.window is None else self.blocks

    def walk(self, number):
        """The first tile of keys that pass `number` reads, and the total number of tiles that it reads."""
        if self.window is None:
            return 0, (self.keys - self.rows) // self.tile + (number + 1) * self.blocks
        return number * self.walk_step, self.window // self.tile + self.blocks + 1


# --- memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fifo:
    """An object fifo. `depths` has the depth in the producer's tile and in each consumer's tile; 0 in DDR."""

    name: str
    producer: str
    consumers: tuple
    depths: tuple
    object_bytes: int
    # (size, stride) in elements, the outermost first: the order in which the producer's DMA reads an object.
    to_stream: tuple = ()
    element_bytes: int = BF16


def key_layout(kernel):
    """A tile of keys, or a block of queries, as 4 x 8 tiles of `aie::mmul<4, 8, 4>`: [rows / 4][head_dim / 8][4][8]."""
    return ((kernel.tile // 4, 4 * kernel.head_dim), (kernel.head_dim // 8, 8), (4, kernel.head_dim), (8, 1))


def value_layout(kernel):
    """A tile of values as 8 x 4 tiles: [keys / 8][head_dim / 4][8][4]."""
    return ((kernel.tile // 8, 8 * kernel.head_dim), (kernel.head_dim // 4, 4), (8, kernel.head_dim), (4, 1))


def output_layout(kernel):
    """A core's 4 x 4 tiles of O, [rows / 4][head_dim / 4][4][4], read as rows."""
    return ((kernel.tile // 4, 4 * kernel.head_dim), (4, 4), (kernel.head_dim // 4, 16), (4, 1))


def param_index(word):
    """The position of word `word` of the parameters in the first object, in words, after `key_layout`."""
    return word // 4 * 16 + word % 4


def fifos(kernel):
    """The object fifos of a column, by name. `keys_in` is linked to `keys`, and `values_in` to `values`. The outputs of
    the cores are joined into `output`."""
    cores = tuple(f"core{i}" for i in range(CORES))
    tile_bytes = kernel.object_elements * BF16
    block_bytes = kernel.object_elements * F32
    to_cores = (MEM_TILE_DEPTH, *[CORE_DEPTH] * CORES)
    all_fifos = [
        Fifo("keys_in", "shim", ("mem",), (0, MEM_TILE_DEPTH), tile_bytes),
        Fifo("keys", "mem", cores, to_cores, tile_bytes, key_layout(kernel)),
        Fifo("values_in", "shim", ("mem",), (0, MEM_TILE_DEPTH), tile_bytes),
        Fifo("values", "mem", cores, to_cores, tile_bytes, value_layout(kernel)),
        Fifo(
            "output", "mem", ("shim",), (OUTPUT_MEM_TILE_DEPTH, 0), CORES * block_bytes, output_layout(kernel), F32
        ),
    ]
    for core in cores:
        depths = (OUTPUT_CORE_DEPTH, OUTPUT_MEM_TILE_DEPTH)
        all_fifos.append(Fifo(f"output_{core}", core, ("mem",), depths, block_bytes, (), F32))
    return {fifo.name: fifo for fifo in all_fifos}


def core_buffers(kernel):
    """A core's own buffers: (elements, type) by name."""
    return {
        "queries": (kernel.object_elements, "bf16"),
        # For each row, the power of two and the sum of weights, each four times, because a tile of the matrix unit is 4
        # wide.
        "exponents": (4 * kernel.tile, "i32"),
        "sums": (4 * kernel.tile, "f32"),
        # Four rows of scores and of weights at a time.
        "scores": (4 * kernel.tile, "f32"),
        "weights": (4 * kernel.tile, "bf16"),
        # The parameters, and the core's position in the job.
        "state": (2 * PARAM_WORDS, "i32"),
    }


def core_bytes(kernel):
    """The contents of a core's memory: bytes by name."""
    size = {"bf16": BF16, "f32": F32, "i32": F32}
    lies = {name: elements * size[kind] for name, (elements, kind) in core_buffers(kernel).items()}
    for fifo in fifos(kernel).values():
        for tile, depth in zip((fifo.producer, *fifo.consumers), fifo.depths):
            if tile == "core0":
                lies[fifo.name] = depth * fifo.object_bytes
    return {**lies, "tables": TABLE_BYTES, "stack": STACK_BYTES}


def mem_tile_bytes(kernel):
    """The contents of the memory tile: bytes by name. Linked fifos share their objects, so each link counts once."""
    every = fifos(kernel)
    return {name: every[name].depths[0] * every[name].object_bytes for name in ("keys", "values", "output")}


# --- the cores ------------------------------------------------------------------------------------------


def core_program(kernel, core, loop, keys, values, output, call):
    """One dispatch on core `core`. `loop` is `range`, or the compiler's loop with the same arguments. `keys`, `values`
    and `output` have `acquire` and `release`. `call` has the kernel's functions.

    The end of a loop is a number that is known here, or the counter of another loop, because the compiler's counters
    are values on the core.
    """
    call.begin(keys.acquire(), core % kernel.blocks)
    keys.release()
    first, tiles = kernel.walk(0)
    if kernel.window is None:
        # The counter of the passes is the number of tiles that each pass reads.
        passes = loop(tiles, tiles + kernel.passes * kernel.blocks, kernel.blocks)
    else:
        passes = loop(0, kernel.passes, 1)
    for counter in passes:
        for slot in range(CORES):
            block = keys.acquire()
            if slot == core:
                call.queries(block)
            keys.release()
        rows = output.acquire()
        call.begin_pass(rows)
        for _ in loop(0, counter if kernel.window is None else tiles, 1):
            call.tile(keys.acquire(), values.acquire(), rows)
            keys.release()
            values.release()
        call.finish(rows)
        output.release()


# --- the transfers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A task of a column's shim DMA between a buffer of the job and a fifo. Sizes and strides are in elements, the
    outermost first."""

    fifo: str
    column: int
    buffer: str
    offset: int
    sizes: tuple
    strides: tuple
    element_bytes: int
    # A token tells the host's sequence that the task is done.
    has_token: bool = False

    def elements(self):
        count = 1
        for size in self.sizes:
            count *= size
        return count

    def runs(self):
        """(first element, number of elements) of each contiguous range, in the order of the transfer."""
        *outer, inner = zip(self.sizes, self.strides)
        starts = [self.offset]
        for size, stride in outer:
            starts = [start + i * stride for start in starts for i in range(size)]
        merged = []
        for start in starts:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + inner[0])
            else:
                merged.append((start, inner[0]))
        return merged


def rows_of_pass(kernel, group, number, fifo, buffer, element_bytes, has_token=False):
    """Q or O of a pass: the same rows of each head of the group."""
    head = kernel.rows * kernel.head_dim
    offset = group * kernel.heads_per_group * head + number * kernel.pass_rows * kernel.head_dim
    sizes = (1, kernel.heads_per_group, kernel.pass_rows, kernel.head_dim)
    strides = (0, head, kernel.head_dim, 1)
    return Transfer(fifo, group, buffer, offset, sizes, strides, element_bytes, has_token)


def linear(fifo, group, buffer, offset, elements):
    return Transfer(fifo, group, buffer, offset, (1, 1, 1, elements), (0, 0, 0, 1), BF16)


def sequence(kernel):
    """The steps of the host's sequence, in order: ("start", transfer), and ("await", transfer) for a transfer with a
    token. When a pass's output has arrived, its cores have read all their inputs."""
    waiting = []
    for group in range(kernel.groups):
        # 16 words are 32 numbers of two bytes. The rest of the object is the beginning of Q, which no core reads from
        # it.
        yield "start", linear("keys_in", group, "params", 0, 2 * PARAM_WORDS)
        yield "start", linear("keys_in", group, "queries", 0, kernel.object_elements - 2 * PARAM_WORDS)
    for number in range(kernel.passes):
        # The two tasks of the parameters use two of the queue's four places until pass 0 is done.
        in_flight = 1 if number == 1 else PASSES_IN_FLIGHT
        while len(waiting) >= in_flight:
            for output in waiting.pop(0):
                yield "await", output
        outputs = []
        for group in range(kernel.groups):
            outputs.append(rows_of_pass(kernel, group, number, "output", "output", F32, has_token=True))
            yield "start", outputs[-1]
            yield "start", rows_of_pass(kernel, group, number, "keys_in", "queries", BF16)
            first, tiles = kernel.walk(number)
            offset = (group * kernel.keys + first * kernel.tile) * kernel.head_dim
            yield "start", linear("keys_in", group, "keys", offset, tiles * kernel.object_elements)
            yield "start", linear("values_in", group, "values", offset, tiles * kernel.object_elements)
        waiting.append(outputs)
    for outputs in waiting:
        for output in outputs:
            yield "await", output


# --- limits ---------------------------------------------------------------------------------------------


def check(kernel):
    """Raises ScheduleError if the kernel exceeds a limit of the array."""
    check_memory("a core", core_bytes(kernel), CORE_BYTES)
    check_memory("a memory tile", mem_tile_bytes(kernel), MEM_TILE_BYTES)
    check_channels(fifos(kernel))
    for fifo in fifos(kernel).values():
        if fifo.to_stream:
            check_dimensions(fifo.name, fifo.to_stream, fifo.element_bytes, MEM_TILE_STRIDE_WORDS)
    check_sequence(sequence(kernel))


def check_memory(place, lies, most):
    total = sum(lies.values())
    if total > most:
        raise ScheduleError(f"{place} holds {total} bytes, and has {most}: {lies}")


def check_channels(every):
    """Checks the DMA channels and buffer descriptors of each tile. A fifo between two tiles uses a channel of each, and
    a descriptor for each object there. A joined fifo uses a descriptor for each part of an object."""
    limits = {"shim": SHIM_CHANNELS, "mem": MEM_TILE_CHANNELS}
    into, out, descriptors = {}, {}, {}
    for fifo in every.values():
        out.setdefault(fifo.producer, []).append(fifo)
        parts = CORES if fifo.name == "output" else 1
        take_descriptors(descriptors, fifo.producer, len(out[fifo.producer]), fifo.depths[0] * parts)
        for consumer, depth in zip(fifo.consumers, fifo.depths[1:]):
            into.setdefault(consumer, []).append(fifo)
            take_descriptors(descriptors, consumer, len(into[consumer]), depth)
    for direction in (into, out):
        for tile, used in direction.items():
            most = limits.get(tile, CORE_CHANNELS)
            if len(used) > most:
                raise ScheduleError(f"{tile} needs {len(used)} channels in one direction, and has {most}")
    for (tile, half), used in descriptors.items():
        most = MEM_TILE_DESCRIPTORS if tile == "mem" else CORE_DESCRIPTORS
        if used > most:
            raise ScheduleError(f"{tile} needs {used} descriptors (half {half}), and has {most}")


def take_descriptors(descriptors, tile, channel, count):
    # Objects in DDR use descriptors of the sequence.
    half = channel % 2 if tile == "mem" else 0
    descriptors[tile, half] = descriptors.get((tile, half), 0) + count


def check_dimensions(name, dimensions, element_bytes, most_stride):
    """Checks the fields of a descriptor, which count words of 4 bytes. The innermost range must be whole words."""
    *outer, (size, stride) = dimensions
    if len(dimensions) > 4 or stride != 1 or size * element_bytes % 4:
        raise ScheduleError(f"{name}: {dimensions} is no access of whole words in 4 dimensions")
    if size * element_bytes // 4 > MAX_WRAP:
        raise ScheduleError(f"{name}: {size} elements are more than {MAX_WRAP} words")
    for position, (size, stride) in enumerate(outer):
        words = stride * element_bytes
        # The outermost size is the length of the whole, or the repetition. It has no wrap limit.
        if (position > 0 and size > MAX_WRAP) or words % 4 or words // 4 > most_stride:
            raise ScheduleError(f"{name}: size {size}, stride {stride} does not fit a descriptor")


def check_sequence(operations):
    """Checks each channel's queue and each shim's descriptors. A task counts until a token reports that it is done. The
    tasks of a pass are started after its output, and they are done when the output is done."""
    started = {}
    for what, transfer in operations:
        tasks = started.setdefault(transfer.column, [])
        if what == "await":
            # Tasks that start before the next output belong to this pass, or to an earlier pass.
            after = tasks.index(transfer) + 1
            while after < len(tasks) and not tasks[after].has_token:
                after += 1
            del tasks[:after]
            continue
        tasks.append(transfer)
        queued = sum(task.fifo == transfer.fifo for task in tasks)
        if queued > SHIM_QUEUE:
            raise ScheduleError(f"{queued} tasks of {transfer.fifo} are queued, and {SHIM_QUEUE} have a place")
        if len(tasks) > SHIM_DESCRIPTORS:
            raise ScheduleError(f"{len(tasks)} tasks of a shim, which has {SHIM_DESCRIPTORS} descriptors")
        if transfer.sizes[:3] != (1, 1, 1):
            dimensions = tuple(zip(transfer.sizes, transfer.strides))
            check_dimensions(transfer.fifo, dimensions, transfer.element_bytes, SHIM_STRIDE_WORDS)
        elif transfer.elements() * transfer.element_bytes % 4 or transfer.offset * transfer.element_bytes % 4:
            raise ScheduleError(f"{transfer.fifo}: a transfer of no whole words: {transfer}")


# --- for the tests --------------------------------------------------------------------------------------


def walks():
    """The walks of kernels for every Gemma-3 and the demo model. The Rust tests read them from
    tests/data/npu/walks.json."""
    shapes = [(256, 4, 512), (256, 2, 1024), (128, 2, 1024), (64, 2, 64)]
    for head_dim, heads_per_group, window in shapes:
        full = [(256, 512, None), (512, 4096, None), (512, 131072, None)]
        for rows, keys, walked in [*full, (256, 2048, window), (512, 2048, window)]:
            kernel = Kernel(head_dim, heads_per_group, walked, rows, keys, 1)
            yield {
                "head_dim": head_dim,
                "heads_per_group": heads_per_group,
                "window": walked,
                "rows": rows,
                "keys": keys,
                "tile": kernel.tile,
                "passes": [list(kernel.walk(number)) for number in range(kernel.passes)],
            }

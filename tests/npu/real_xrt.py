#!/usr/bin/env python3
"""The shim and the real XRT over a kernel driver that is none: the whole way of a dispatch but the silicon.

    tests/npu/real_xrt.py     after `cargo build --examples`; prints a line for each check, and counts them

`tools/xrt.py` unpacks XRT 2.25 with its plugin for the NPU. Here the shim is built against its headers, an xclbin is made by
its `xclbinutil`, and `npu_host` (tests/npu/host) computes through the shim and XRT. Below them, fake_amdxdna/driver.c answers
the ioctls, decodes each command and computes the attention that the command's addresses ask for. So these checks prove the
order of the calls, flags, banks, the words of the packet and the layout of the buffers, and that what came back is what the
kernel's model says, to the bit. They say nothing about the NPU itself.

Needs a mount namespace, where a node and a folder of sysfs can be put; without one, or without Debian's archive, the checks
are skipped.

Memory that another device shares is a file here, which the driver imports as it would a dma-buf. So the checks of it prove
which memory a command names and what XRT does on the way; that a GPU's memory can be imported, only a GPU and an NPU show.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/clients")]
import xrt  # noqa: E402
from devices import DevicesError  # noqa: E402
from session import Report  # noqa: E402

EXAMPLES = ROOT / "target/debug/examples"
HOST, MODEL = EXAMPLES / "npu_host", EXAMPLES / "libnpu_double.so"
DRIVER = ROOT / "tests/npu/fake_amdxdna/driver.c"
SECONDS = 120
# Head_dim, heads in a group, window (0: none), groups, first row, rows: both head sizes, a windowed kernel and one that
# walks over all keys, one to four groups, rows that fill no tile.
JOBS = ["128/2/0/4/0/64", "128/2/0/1/100/17", "256/4/0/1/0/16", "256/2/512/2/1000/33", "128/2/0/4/0/64"]
# The layout of the first job: Q, K, V, O in bytes, and the 16 words.
FIRST_BYTES = [4 * 2 * 256 * 128 * 2, 4 * 512 * 128 * 2, 4 * 512 * 128 * 2, 4 * 2 * 256 * 128 * 4, 64]
# Where the arrays of the first job lie in shared memory, in two dispatches: Q at the offset, and K, V and O each this much
# further in memory of their own.
APART = 4096
SHARED_OFFSETS = [64, 1 << 20]
SHARED_JOBS = [f"{JOBS[0]}@{offset}" for offset in SHARED_OFFSETS]
BO_SHARE, BO_HEAP, BO_DEVICE, BO_COMMAND = 1, 2, 3, 4
TO_DEVICE, FROM_DEVICE = 0, 1
# A command of type ERT_START_CU in its first state, followed by 16 words: one of compute units, and 15 of arguments.
HEADER = 0x30010001
INSTRUCTION_WORDS, FIRST_INSTRUCTION = 64, 0x06050403
PDI_ID, UNIT_ID = "0x01", "0x901"

# What a program sees: the node, and the driver's folder with one Phoenix in it.
MACHINE = """
set -eu
mount -t tmpfs none /sys/devices
mount -t tmpfs none /sys/bus/pci
mkdir -p /dev/accel
mount -t tmpfs none /dev/accel
: >/dev/accel/accel0
npu=/sys/devices/pci0000:00/0000:06:00.1
mkdir -p $npu/accel/accel0 /sys/bus/pci/drivers/amdxdna /sys/bus/pci/devices
for fact in device_type=0 vbnv=RyzenAI-npu1 vendor=0x1022 device=0x1502 revision=0x00 fw_version=1.5.5.391; do
    echo "${fact#*=}" >"$npu/${fact%%=*}"
done
ln -s $npu /sys/bus/pci/drivers/amdxdna/0000:06:00.1
ln -s $npu /sys/bus/pci/devices/0000:06:00.1
exec "$@"
"""
# A machine with the driver's folder and no NPU in it.
NO_MACHINE = 'set -eu; mount -t tmpfs none /sys/bus/pci; mkdir -p /sys/bus/pci/drivers/amdxdna; exec "$@"'


# --- the container --------------------------------------------------------------------------------------


def memory(tag, kilobytes):
    return {"m_type": "MEM_DRAM", "m_used": "1", "m_sizeKB": kilobytes, "m_tag": tag, "m_base_address": "0x4000000"}


def argument(name, offset, kind, place=None):
    return {"name": name, "address-qualifier": "GLOBAL" if place else "SCALAR", "type": kind, "offset": hex(offset)} | (
        {"memory-connection": place} if place else {}
    )


def sections(banks):
    """What an xclbin of MLIR_AIE says: memories, the kernel's arguments, and the partition of four columns."""
    arguments = [argument("opcode", 0, "uint64_t"), argument("instr", 8, "char *", "SRAM"), argument("ninstr", 0x10, "uint32_t")]
    arguments += [argument(f"bo{n}", 0x14 + 8 * n, "void*", "HOST") for n in range(5)]
    group = {"name": "DPU", "type": "PRIMARY", "pdi_id": PDI_ID, "dpu_kernel_ids": [UNIT_ID], "pre_cdo_groups": ["0xC1"]}
    pdi = {"uuid": "00000000-0000-0000-0000-000000001234", "file_name": "./placeholder.pdi", "cdo_groups": [group]}
    return {
        "MEM_TOPOLOGY": {"mem_topology": {"m_count": "2", "m_mem_data": [memory(*bank) for bank in banks]}},
        "AIE_PARTITION": {"aie_partition": {
            "name": "QoS", "operations_per_cycle": "2048", "inference_fingerprint": "23423", "pre_post_fingerprint": "12345",
            "partition": {"column_width": 4, "start_columns": [1]}, "PDIs": [pdi],
        }},
        "KERNELS": {"ps-kernels": {"kernels": [{
            "name": "MLIR_AIE", "type": "dpu", "extended-data": {"subtype": "DPU", "functional": "0", "dpu_kernel_id": UNIT_ID},
            "arguments": arguments, "instances": [{"name": "MLIRAIE"}],
        }]}},
    }


def make_xclbin(folder, banks=(("HOST", "0x10000"), ("SRAM", "0xc000"))):
    """A container that XRT takes, whose configuration of the NPU is a placeholder."""
    (folder / "placeholder.pdi").write_bytes(bytes(4096))
    for name, section in sections(banks).items():
        (folder / f"{name}.json").write_text(json.dumps(section))
    path = folder / "kernel.xclbin"
    run(xrt.command([
        xrt.FOLDER / "usr/bin/xclbinutil", "--add-replace-section", "MEM_TOPOLOGY:JSON:MEM_TOPOLOGY.json",
        "--add-section", "AIE_PARTITION:JSON:AIE_PARTITION.json", "--add-kernel", "KERNELS.json", "--output", path,
    ]), cwd=folder)
    return path


def run(command, **options):
    done = subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", timeout=SECONDS, check=False, **options,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout[-800:]}"
    return done.stdout


# --- a run ----------------------------------------------------------------------------------------------


def namespace():
    """The command that makes a mount namespace; None if the system allows none. Root in a container may lack the right,
    and have it in a user namespace."""
    for own in (["-m"] if os.geteuid() == 0 else []) + ["-rm"]:
        if shutil.which("unshare") and subprocess.run(["unshare", own, "true"], capture_output=True, check=False).returncode == 0:
            return ["unshare", own]
    return None


class Machine:
    """The shim, the driver and a container, and what becomes of jobs with them."""

    def __init__(self, folder, unshare):
        self.folder, self.unshare = folder, unshare
        self.driver, self.log = folder / "fake_amdxdna.so", folder / "calls"
        run([os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", self.driver, DRIVER])
        headers = {"XRT_INCLUDE": str(xrt.FOLDER / "usr/include"), "XRT_LIBRARIES": str(xrt.FOLDER / xrt.LIBRARIES)}
        run([ROOT / "tools/npu_shim.sh", folder], env={**os.environ, **headers})
        self.shim = folder / "libunicorn_npu.so"
        self.xclbin = make_xclbin(folder)

    def compute(self, jobs, fault="", script=MACHINE, deadline_ms=30000, xclbin=None, before=(), lacking=0, ini=""):
        """The lines of npu_host, and the calls that its driver saw. `ini` is XRT's configuration."""
        self.log.unlink(missing_ok=True)
        environment = {
            **os.environ, "FAKE_AMDXDNA_LOG": str(self.log), "FAKE_AMDXDNA_MODEL": str(MODEL), "FAKE_AMDXDNA_FAULT": fault,
            "DEADLINE_MS": str(deadline_ms), "LACKING": str(lacking),
        }
        program = xrt.command([HOST, self.shim, xclbin or self.xclbin, *jobs], [self.driver], before)
        if ini:
            # Root's XRT looks for it only in the program's folder, and the program is the linker here.
            place = self.folder / "with_ini"
            place.mkdir(exist_ok=True)
            program[0] = shutil.copy(program[0], place)
            (place / "xrt.ini").write_text(ini)
        done = subprocess.run(
            [*self.unshare, "sh", "-c", script, "sh", *program], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=SECONDS, check=False,
        )
        # XRT writes lines of its own to the standard output.
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, f"npu_host ended with {done.returncode} and said nothing: {done.stdout[-400:]} {done.stderr[-400:]}"
        calls = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return lines, calls


def named(calls, name):
    return [call for call in calls if call["call"] == name]


def expect(found, expected):
    assert found == expected, f"{found!r}, not {expected!r}"


# --- the checks -----------------------------------------------------------------------------------------


def attention_comes_back_to_the_bit(machine):
    (facts, *results), calls = machine.compute(JOBS)
    assert facts["xrt"] == "2.25" and not facts["is_double"] and "RyzenAI-npu1" in facts["device"], facts
    for job, result in zip(JOBS, results, strict=True):
        assert result.get("job") == job and result["wrong"] == 0 and result["numbers"] > 0, result
    expect([call["status"] for call in named(calls, "attend")], [0] * len(JOBS))
    # The last job has the first one's kernel.
    expect(len(named(calls, "create_hwctx")), len(JOBS) - 1)


def the_calls_have_their_order(machine):
    _, calls = machine.compute(JOBS[:1])
    steps = ["create_bo:2", "mmap", "create_hwctx", "create_bo:3", "config_hwctx", "create_bo:3", "create_bo:1", "create_bo:4", "exec_cmd", "attend"]
    found = [call["call"] + (f":{call['type']}" if call["call"] == "create_bo" else "") for call in calls]
    at = 0
    for step in steps:
        assert step in found[at:], f"no {step} after {found[:at]}: {found}"
        at += found[at:].index(step) + 1
    (heap,) = [call for call in named(calls, "create_bo") if call["type"] == BO_HEAP]
    expect(heap["bytes"], 64 << 20)
    (context,) = named(calls, "create_hwctx")
    expect((context["has_qos"], context["max_opc"], context["tiles"]), (1, 2048, 16))
    assert any(call["locked"] for call in named(calls, "mmap")), calls


def flags_and_banks_decide_where_buffers_lie(machine):
    """Host-only buffers are memory that is shared with the device; a cacheable one of the bank SRAM lies in its heap."""
    _, calls = machine.compute(JOBS[:1])
    buffers = named(calls, "buffer")
    expect([call["type"] for call in buffers], [BO_SHARE] * 5)
    expect([call["argument"] for call in buffers], [3, 4, 5, 6, 7])
    for call, least in zip(buffers, FIRST_BYTES, strict=True):
        assert call["bytes"] >= least and call["offset"] == 0, (call, least)
    (command,) = named(calls, "exec_cmd")
    expect(command["instructions"]["type"], BO_DEVICE)


def the_packet_has_its_words(machine):
    _, calls = machine.compute(JOBS[:1])
    (command,) = named(calls, "exec_cmd")
    found = {name: command[name] for name in ("type", "commands", "opcode", "words", "cu_mask")}
    expect(hex(command["header"]), hex(HEADER))
    assert found["opcode"] == 3 and found["words"] == INSTRUCTION_WORDS and found["cu_mask"] == 1, found
    expect(bos_of(calls, BO_COMMAND) > 0, True)
    expect(command["instructions"]["first"], FIRST_INSTRUCTION)


def bos_of(calls, kind):
    return sum(call["type"] == kind for call in named(calls, "create_bo"))


def fails(machine, code, part, jobs=None, **options):
    """The error of npu_host, which has this code, and this in its text; and the lines after it."""
    lines, calls = machine.compute(jobs or JOBS[:1], **options)
    bad = [n for n, line in enumerate(lines) if "error" in line]
    assert bad, lines
    error = lines[bad[0]]
    assert error["code"] == code and part in error["error"], error
    return lines[bad[0] + 1:], calls


def low_memlock_is_named(machine):
    fails(machine, "memlock-low", "LimitMEMLOCK=infinity", fault="memlock")


def held_columns_are_named(machine):
    fails(machine, "npu-no-columns", "other programs hold", fault="enospc")


def the_seventh_context_is_refused(machine):
    jobs = [f"128/2/0/{groups}/0/{rows}" for rows in (5, 257) for groups in (1, 2, 3, 4)]
    after, calls = fails(machine, "npu-no-columns", "6 contexts", jobs=jobs)
    expect(len(named(calls, "create_hwctx")), 8)
    expect([line["code"] for line in after], ["npu-no-columns"])


def a_closed_node_is_named(machine):
    fails(machine, "npu-group", "render", fault="group")


def a_machine_without_an_npu_is_named(machine):
    fails(machine, "npu-no-device", "unicorn doctor", script=NO_MACHINE)


def an_xrt_without_hw_context_is_named(machine):
    """XRT 2.13, whose library has the name of 2.25's."""
    fails(machine, "xrt-old", "XRT 2.13.0 is too old", before=[xrt.OLD])


def a_command_that_never_ends_poisons_what_comes_after(machine):
    after, calls = fails(machine, "npu-timeout", "did not answer in time", jobs=JOBS[:3], fault="silence", deadline_ms=300)
    expect([line["code"] for line in after], ["npu-timeout"] * 2)
    expect(len(named(calls, "exec_cmd")), 1)


def a_reset_of_the_driver_is_a_timeout(machine):
    after, calls = fails(machine, "npu-timeout", "did not answer in time", jobs=JOBS[:2], fault="timeout")
    expect([line["code"] for line in after], ["npu-timeout"])
    expect(len(named(calls, "exec_cmd")), 1)


def a_failed_command_is_no_timeout(machine):
    after, calls = fails(machine, "npu-command-state", "failed", jobs=JOBS[:2], fault="error")
    expect([line["code"] for line in after], ["npu-command-state"])
    expect(len(named(calls, "exec_cmd")), 2)


def a_command_that_wrote_nothing_has_not_computed(machine):
    after, _ = fails(machine, "npu-no-output", "16 of 16 blocks", jobs=JOBS[:2], fault="idle")
    expect([line["code"] for line in after], ["npu-no-output"])


def a_container_that_is_none_is_refused(machine):
    broken = machine.folder / "broken.xclbin"
    broken.write_bytes(machine.xclbin.read_bytes()[:200])
    fails(machine, "npu-xrt", "XRT refused", xclbin=broken)


def shared_memory_is_used_in_place(machine):
    jobs, offsets = [*SHARED_JOBS, f"{JOBS[2]}@4096"], [*SHARED_OFFSETS, 4096]
    (_, *results), calls = machine.compute(jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.get("job") == job and result["numbers"] > 0, result
        expect((result["wrong"], result["outside"]), (0, 0))
    memory = [call["handle"] for call in named(calls, "import")]
    expect(len(memory), 4)
    buffers = named(calls, "buffer")
    for n, offset in enumerate(offsets):
        *arrays, parameters = buffers[5 * n:5 * n + 5]
        expect([(call["handle"], call["offset"]) for call in arrays], [(bo, offset + APART * k) for k, bo in enumerate(memory)])
        expect((parameters["imported"], parameters["offset"]), (0, 0))
    # The driver keeps in place what a call names.
    expect({call["pinned"] for call in buffers}, {1})
    # What else is shared with the device are the parameters of the two kernels.
    expect([call["bytes"] for call in named(calls, "create_bo") if call["type"] == BO_SHARE], [FIRST_BYTES[4]] * 2)
    expect(sorted(call["handle"] for call in named(calls, "close_bo") if call["imported"]), memory)


def copies_go_on_beside_shared_memory(machine):
    jobs = [JOBS[0], SHARED_JOBS[0], JOBS[0]]
    (_, *results), calls = machine.compute(jobs)
    expect([(result["job"], result["wrong"]) for result in results], [(job, 0) for job in jobs])
    expect([call["imported"] for call in named(calls, "buffer")], [0] * 5 + [1] * 4 + [0] * 6)


def parts_of_shared_memory_are_synced(machine):
    """XRT flushes the CPU's cache by itself, and no driver sees that; left to the driver, the same syncs are calls."""
    _, calls = machine.compute(SHARED_JOBS, ini="[Debug]\nforce_driver_sync=true\n")
    memory = [call["handle"] for call in named(calls, "import")]
    found = [
        call["call"] if call["call"] == "exec_cmd" else tuple(call[name] for name in ("handle", "direction", "offset", "bytes"))
        for call in calls if call["call"] == "exec_cmd" or call["call"] == "sync_bo" and call["handle"] in memory
    ]
    expected = []
    for offset in SHARED_OFFSETS:
        parts = [(bo, offset + APART * n, FIRST_BYTES[n]) for n, bo in enumerate(memory)]
        expected += [(bo, TO_DEVICE, at, size) for bo, at, size in parts] + ["exec_cmd"]
        expected += [(bo, FROM_DEVICE, at, size) for bo, at, size in parts[3:]]
    expect(found, expected)


def memory_that_cannot_be_imported_is_named(machine):
    for options, part in (({"fault": "import"}, "Invalid argument"), ({"lacking": 64}, "the shared memory has")):
        after, calls = fails(machine, "npu-dma-buf", part, jobs=SHARED_JOBS, **options)
        expect((after, named(calls, "exec_cmd"), bos_of(calls, BO_SHARE)), ([], [], 0))


def a_kernel_of_another_bank_is_refused(machine):
    """Imported memory has the first bank. For an argument in another one XRT makes a copy, which nothing would bring back."""
    folder = machine.folder / "other_banks"
    folder.mkdir()
    xclbin = make_xclbin(folder, (("SRAM", "0xc000"), ("HOST", "0x10000")))
    after, calls = fails(machine, "npu-dma-buf", 'npu.sharing = "copy" works', jobs=[SHARED_JOBS[0], JOBS[0]], xclbin=xclbin)
    expect([(line["job"], line["wrong"]) for line in after], [(JOBS[0], 0)])
    expect(len(named(calls, "exec_cmd")), 1)


def shared_memory_outlives_a_command_that_never_ends(machine):
    """The device may still write there, so nothing gives the memory back before the process ends."""
    after, calls = fails(machine, "npu-timeout", "did not answer in time", jobs=SHARED_JOBS, fault="silence", deadline_ms=300)
    expect([line["code"] for line in after], ["npu-timeout"])
    expect((len(named(calls, "import")), named(calls, "close_bo")), (4, []))


CHECKS = [
    attention_comes_back_to_the_bit, the_calls_have_their_order, flags_and_banks_decide_where_buffers_lie, the_packet_has_its_words,
    low_memlock_is_named, held_columns_are_named, the_seventh_context_is_refused, a_closed_node_is_named,
    a_machine_without_an_npu_is_named, an_xrt_without_hw_context_is_named, a_command_that_never_ends_poisons_what_comes_after,
    a_reset_of_the_driver_is_a_timeout, a_failed_command_is_no_timeout, a_command_that_wrote_nothing_has_not_computed,
    a_container_that_is_none_is_refused,
    shared_memory_is_used_in_place, copies_go_on_beside_shared_memory, parts_of_shared_memory_are_synced,
    memory_that_cannot_be_imported_is_named, a_kernel_of_another_bank_is_refused, shared_memory_outlives_a_command_that_never_ends,
]


def main():
    report = Report("npu")
    missing = next((file for file in (HOST, MODEL) if not file.exists()), None)
    if missing:
        raise SystemExit(f"npu: there is no {missing}: `cargo build --examples`")
    unshare = namespace()
    lacks = "" if unshare else "the system allows no mount namespaces"
    try:
        if unshare:
            xrt.make(print)
            xrt.make_old(print)
    except DevicesError as error:
        lacks = str(error)
    if lacks:
        report.skip("xrt", f"tests/npu/real_xrt.py ({lacks})")
        return report.end()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), unshare)
        for check in CHECKS:
            report.attempt(check.__name__, lambda check=check: check(machine))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())

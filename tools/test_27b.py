#!/usr/bin/env python3
"""Loads a complete large model and generates an answer. Random weights of the true shape make a download unnecessary.

    tools/test_27b.py [--dir DIR] [--shape gemma-3-27b] [--scheme int4-g128] [--keep]

The steps: write the checkpoint with `unicorn-lab synth` (16 GB of disk), read it with fio, evict it from memory, allocate
and free as much memory as it needs, serve it, and request two tokens. The output is one line of JSON: load time and
rate, the rates of disk and memory in the same run, and resident memory.

The test fails unless the files and the server have as many layers as the shape, the device holds at least the bytes of
the weights, the answer has two tokens, and no part of the files stays in memory. The ratio of the load rate to the disk
rate is printed but not checked, because it depends on the machine and its neighbours as much as on the program. The
test takes minutes on software Vulkan, so it is not part of `make test`. benches/results/loading.md has dated results.
"""

import argparse
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNICORN = ROOT / "target/debug/unicorn"
LAB = ROOT / "target/debug/unicorn-lab"
# num_hidden_layers as published.
LAYERS = {"gemma-3-270m": 18, "gemma-3-1b": 26, "gemma-3-4b": 34, "gemma-3-12b": 48, "gemma-3-27b": 62,
          "gemma-4-26b-a4b": 30, "qwen3-30b-a3b": 48}
START_SECONDS = 3600
ANSWER_SECONDS = 3600


def evict(files):
    """Drops the clean pages of the files from memory, as after a boot."""
    os.sync()
    for file in files:
        with open(file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(files):
    """Bytes per second at which fio reads the files one after the other, bypassing the page cache."""
    # The best of three runs counts, because devices may start slowly and neighbours may be noisy.
    best = 0
    for _ in range(3):
        evict(files)
        command = ["fio", "--name=read", "--rw=read", "--bs=8m", "--direct=1", "--ioengine=libaio", "--iodepth=8",
                   "--readonly", "--output-format=json", "--file_service_type=sequential",
                   f"--filename={':'.join(map(str, files))}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        best = max(best, json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])
    return best


def memory_rate(size):
    """Bytes per second at which this machine provides new memory of that size. A load waits for memory if this is below
    the disk rate. The host of a virtual machine reclaims idle memory, and its next use can be slower than any disk."""
    piece = bytes(16 << 20)
    since = time.monotonic()
    with mmap.mmap(-1, size) as memory:
        for at in range(0, size - len(piece), len(piece)):
            memory[at : at + len(piece)] = piece
        return size / (time.monotonic() - since)


def status(pid, field):
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024


def get(url, body=None, seconds=60):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)


def wait_until_ready(url, server):
    """Waits for the self-test, which follows the load. Until its end the server answers that it is loading."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return get(f"{url}/health")
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        if server.poll() is not None or time.monotonic() > until:
            sys.exit("error: the server did not become ready; the log above says why")
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=ROOT / "target/synth-27b")
    parser.add_argument("--shape", default="gemma-3-27b", choices=LAYERS)
    parser.add_argument("--scheme", default="int4-g128")
    parser.add_argument("--context", default="256")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for the next run")
    args = parser.parse_args()

    if not (args.dir / "unicorn.json").exists():
        subprocess.run([LAB, "synth", "--shape", args.shape, "--scheme", args.scheme, args.dir], check=True)
    shown = json.loads(subprocess.run([UNICORN, "inspect", args.dir, "--json"], check=True, capture_output=True).stdout)
    files = sorted(args.dir.glob("*.safetensors"))
    disk = disk_rate(files)
    evict(files)
    # The first run reclaims memory from the host. The second run shows the machine's own rate.
    first, memory = (memory_rate(shown["bytes"]) for _ in range(2))

    # The server uses a free port, which its log names.
    command = [ROOT / "tools/with_device.sh", UNICORN, "serve", "--model", args.dir, "--port", "0", "--context", args.context]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines, url, loaded = [], None, threading.Event()

    def watch():
        nonlocal url
        for line in server.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found.group(0)
            if "loaded   " in line:
                loaded.set()
        loaded.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        if not loaded.wait(START_SECONDS) or server.poll() is not None or not url:
            sys.exit("error: the model was not loaded; the log above says why")
        line = next(line for line in lines if "loaded   " in line)
        numbers = re.search(
            r"loaded\s+([\d.]+) GB in ([\d.]+) s, ([\d.]+) GB/s, [^;]+; ([\d.]+) GB on the device, "
            r"([\d.]+) GB resident, at most ([\d.]+) GB; ([\d.]+) GB of its files in memory", line)
        if not numbers:
            sys.exit(f"error: cannot parse the line of the log about the load: {line}")
        size, seconds, rate, placed, resident, peak, cached = map(float, numbers.groups())
        layers = next((int(found.group(1)) for line in lines if (found := re.search(r"model .*: (\d+) layers,", line))), 0)
        wait_until_ready(url, server)
        since = time.monotonic()
        body = {"model": "synth", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
        body["model"] = get(f"{url}/v1/models")["data"][0]["id"]
        answer = get(f"{url}/v1/chat/completions", body, ANSWER_SECONDS)
        answered = time.monotonic() - since
        after = status(server.pid, "VmHWM")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        if not args.keep:
            shutil.rmtree(args.dir, ignore_errors=True)

    usage = answer["usage"]
    result = {
        "shape": args.shape,
        "scheme": args.scheme,
        "layers": shown["num_hidden_layers"],
        "file_bytes": shown["bytes"],
        "load_s": seconds,
        "load_gb_per_s": rate,
        "disk_gb_per_s": round(disk / 1e9, 3),
        "memory_first_gb_per_s": round(first / 1e9, 2),
        "memory_gb_per_s": round(memory / 1e9, 2),
        "share_of_disk": round(rate / (disk / 1e9), 3),
        "placed_gb": placed,
        "peak_resident_gb": peak,
        "peak_resident_without_device_memory_gb": round(peak - placed, 3),
        "peak_resident_after_answer_gb": after / 1e9,
        "files_in_memory_gb": cached,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "answer_s": round(answered, 1),
    }
    print(json.dumps(result))
    if {shown["num_hidden_layers"], layers} != {LAYERS[args.shape]}:
        sys.exit(f"error: the files have {shown['num_hidden_layers']} layers, the server {layers}; {args.shape} has {LAYERS[args.shape]}")
    # The log rounds to 10 MB.
    if placed * 1e9 + 5e6 < shown["bytes"]:
        sys.exit(f"error: {placed} GB are on the device, the weights have {shown['bytes'] / 1e9:.2f} GB")
    if usage["completion_tokens"] != 2 or usage["prompt_tokens"] > 16:
        sys.exit(f"error: expected two tokens for at most 16, got {usage}")
    if cached > 0.05 * size:
        sys.exit(f"error: {cached} GB of the files stay in memory in addition to the device's copy")


if __name__ == "__main__":
    main()

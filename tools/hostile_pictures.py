#!/usr/bin/env python3
"""Sends pictures of every kind, broken ones, 200 damaged ones and one of 100 megapixels to the shipped binary, and prints
what each kind costs the server at most: seconds, CPU seconds, and memory above what it held before.

Every answer must be a picture's (200) or a refusal (400), the largest picture must be refused, and the server must be alive at
the end. The debug build decodes slower than a release.
"""

import base64
import collections
import json
import random
import struct
import sys
import time
import zlib
from pathlib import Path

from edge_server import ROOT, Server, health_within_a_second, resident

PICTURES = ROOT / "tests/data/images"
MODEL = ROOT / "tests/data/gemma4-vision/vis4-c"
KINDS = {".png", ".jpg", ".webp", ".gif", ".bmp"}
DAMAGED = 200
SEED = 7


def png(width, height):
    """A black picture, which takes few bytes."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + 3 * width)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def damaged(data, rng):
    """The file with some bytes changed, removed or added."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        at, few = rng.randrange(len(data)), rng.randint(1, 50)
        kind = rng.randrange(3)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1 and len(data) > at + few:
            del data[at:at + few]
        else:
            data[at:at] = rng.randbytes(few)
    return bytes(data)


def status_of(server, picture):
    """Status and text of the answer to a question about a picture."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "?"}]
    return server.chat(content, max_tokens=1)


def cpu_seconds(server):
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(server, name, pictures):
    """Sends the pictures one after the other, and prints the worst of them. Returns the statuses."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak begins anew
    before, worst, worst_cpu, statuses = resident(server.process.pid), 0, 0, collections.Counter()
    for picture in pictures:
        began, cpu = time.monotonic(), cpu_seconds(server)
        status, text = status_of(server, picture)
        assert status in (200, 400), f"{name}: {status}: {text[:200]}"
        statuses[status] += 1
        worst, worst_cpu = max(worst, time.monotonic() - began), max(worst_cpu, cpu_seconds(server) - cpu)
    peak = (resident(server.process.pid, "VmHWM") - before) / 2**20
    print(f"{name:<16} {len(pictures):>4} files, statuses {dict(statuses)}: at most {worst:.2f} s, {worst_cpu:.2f} s of CPU, "
          f"+{peak:.0f} MiB", flush=True)
    return statuses


def main():
    rng = random.Random(SEED)
    intact = [path.read_bytes() for path in sorted(PICTURES.iterdir()) if path.suffix in KINDS]
    broken = [path.read_bytes() for path in sorted((PICTURES / "bad").iterdir())]
    assert intact and broken, f"no pictures in {PICTURES}"
    with Server(arguments=["--model", str(MODEL)]) as server:
        status, text = status_of(server, intact[0])  # the first image compiles kernels
        assert status == 200, text
        assert set(measure(server, "intact", intact)) == {200}
        assert 400 in measure(server, "broken", broken)
        measure(server, "damaged", [damaged(rng.choice(intact), rng) for _ in range(DAMAGED)])
        bomb = png(10_000, 10_000)
        assert set(measure(server, "100 megapixels", [bomb])) == {400}
        refusal = json.loads(status_of(server, bomb)[1])["error"]["message"]
        assert "10000 x 10000" in refusal, refusal
        measure(server, "30 megapixels", [png(6_000, 5_000)])
        health_within_a_second(server)
        assert server.end(30) == 0, server.process.returncode
    print("The server refused what it could not read, and ended normally.")


if __name__ == "__main__":
    sys.exit(main())

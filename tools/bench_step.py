#!/usr/bin/env python3
"""Measures the host's part of a decode step of 62 layers, as many as a 27B has: `make bench-step`.

The checkpoint is the tests' tiny one with its eight layers repeated, so that software Vulkan has little to compute and
does not occupy the host's cores for long. Prints the output of `unicorn bench`. `host` is the time of the engine
thread, including the submit of a step to the driver.
"""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

LAYERS = 62
ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests/data/gemma3/tiny-a"
FOLDER = ROOT / ".cache/bench/step"
LAYER = "model.layers."


def tensors_of(path: Path) -> dict[str, tuple[dict, bytes]]:
    """Each tensor's entry in the header of a safetensors file, and its bytes."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    data = raw[8 + size :]
    return {name: (entry, data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def write(path: Path, tensors: dict[str, tuple[dict, bytes]]) -> None:
    header, end = {}, 0
    for name, (entry, data) in tensors.items():
        header[name] = entry | {"data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values()))


def make_checkpoint() -> None:
    config = json.loads((SOURCE / "config.json").read_text())
    own = config["num_hidden_layers"]
    of_layers: list[dict[str, tuple[dict, bytes]]] = [{} for _ in range(own)]
    tensors = {}
    for name, tensor in tensors_of(SOURCE / "model.safetensors").items():
        if name.startswith(LAYER):
            layer, rest = name.removeprefix(LAYER).split(".", 1)
            of_layers[int(layer)][rest] = tensor
        else:
            tensors[name] = tensor
    for layer in range(LAYERS):
        tensors |= {f"{LAYER}{layer}.{rest}": tensor for rest, tensor in of_layers[layer % own].items()}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    shutil.copy(SOURCE / "generation_config.json", FOLDER)
    write(FOLDER / "model.safetensors", tensors)


def main() -> int:
    make_checkpoint()
    model = ["--model", FOLDER, "--tokenizer", ROOT / "tests/data/tokenizer-mini/tokenizer.json"]
    model += ["--precision", "fast", "--quantize", "int4-g32", "--context", "1024"]
    sizes = ["--prompt-tokens", "40", "--generate-tokens", "400"]
    run, arguments = sys.argv[1:3], sys.argv[3:]
    return subprocess.run([*run, "bench", *model, *sizes, *arguments], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: tools/bench_step.py tools/with_device.sh UNICORN [OPTIONS of `unicorn bench`]")
    sys.exit(main())

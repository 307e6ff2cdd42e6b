#!/usr/bin/env python3
"""Writes the goldens of tests/data/images with Pillow; README.md says what they are.

  make_goldens.py FOLDER
"""
import hashlib
import json
import pathlib
import sys

import numpy as np
import PIL
from PIL import Image, ImageOps

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# Square inputs of two models; a side of one pixel; a side that keeps its length; both sides larger.
SIZES = [(112, 112), (84, 84), (1, 1), (1, 37), (53, 1), (200, 61), (61, 150), (331, 347)]
# Width and height of pictures by the formula, and their new ones.
FORMULA = [
    ((640, 480), (896, 896)), ((1024, 768), (896, 896)), ((1, 1), (896, 896)), ((896, 896), (896, 896)),
    ((897, 895), (896, 896)), ((448, 896), (896, 896)), ((895, 1793), (896, 896)), ((30, 2000), (896, 896)),
    ((2000, 31), (896, 896)), ((4000, 3000), (896, 896)), ((1920, 1080), (1056, 576)), ((333, 2999), (240, 2256)),
]


def seen(path):
    """What a person sees: upright, on white. U8 [height, width, 3]"""
    picture = Image.open(path)
    if picture.mode.startswith("I;16"):
        # Pillow's own conversion cuts values off at 255, which makes a white picture.
        return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[..., None], 3, 2)
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    return np.asarray(picture.convert("RGB"))


def formula(width, height):
    """pixel(x, y, c) = (x (7 + 2c) + y (13 - 3c) + floor(xy / 32) + 31c) mod 256"""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return ((x * (7 + 2 * c) + y * (13 - 3 * c) + ((x * y) >> 5) + 31 * c) % 256).astype(np.uint8)


def sha256(pixels):
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


def resized(pixels, size, name):
    return sha256(np.asarray(Image.fromarray(pixels).resize(size, FILTERS[name])))


def main(folder):
    endings = {".png", ".jpg", ".webp", ".gif", ".bmp"}
    pictures = {path.name: seen(path) for path in sorted(folder.iterdir()) if path.suffix in endings}

    header, at = {}, 0
    for name, pixels in pictures.items():
        header[name] = {"dtype": "U8", "shape": list(pixels.shape), "data_offsets": [at, at + pixels.size]}
        at += pixels.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(p).tobytes() for p in pictures.values())]
    (folder / "decoded.safetensors").write_bytes(b"".join(parts))

    rows = []
    for name, pixels in pictures.items():
        rows += [{"picture": name, "to": size, "filter": f, "sha256": resized(pixels, size, f)}
                 for size in SIZES for f in FILTERS]
    for size, to in FORMULA:
        pixels = formula(*size)
        rows += [{"formula": size, "source_sha256": sha256(pixels), "to": to, "filter": f,
                  "sha256": resized(pixels, to, f)} for f in FILTERS]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    (folder / "resized.json").write_text(f'{{"pillow": "{PIL.__version__}", "resized": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

#!/usr/bin/env python3
"""Counts the lines of the project by room, and the words that its plain English avoids.

    tools/lines.py [FOLDER]     the checkout in FOLDER, or this one

Inline test modules (`#[cfg(test)] mod ... { }`) count as tests, wherever they are.
"""

import re
import sys
from collections import Counter
from pathlib import Path

# `unsafe` code is only in src/gpu, so two files of the lab are there: the driver that records the judge's dispatches, and
# the compiler for GPUs that are not present. Only src/lab uses them.
ROOMS = {
    "lab": ("src/lab/", "src/bin/", "src/gpu/null_driver.rs", "src/gpu/compiler.rs"),
    "annexe": ("src/npu/",),
}
# Idioms that a reader of English as a second language has to read twice, outside of data and recorded results.
IDIOMS = ("behind", "beside", "nobody", "whoever", "somebody", "what became of", "is told", "goes on", "is none", "none is")
TEXTS = (".rs", ".md", ".py", ".sh", ".comp", ".glsl", ".toml", ".js")


def split(lines):
    """The numbers of lines outside and inside of inline test modules."""
    product = tests = index = 0
    while index < len(lines):
        begins = lines[index].strip() == "#[cfg(test)]" and index + 1 < len(lines)
        if begins and re.match(r"\s*(pub )?mod \w+ \{", lines[index + 1]):
            indent = len(lines[index]) - len(lines[index].lstrip())
            end = index + 1
            while not lines[end].startswith(" " * indent + "}"):
                end += 1
            tests += end - index + 1
            index = end + 1
        else:
            product += 1
            index += 1
    return product, tests


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    rooms, parts, idioms = Counter(), Counter(), Counter()
    skipped = ("target", "node_modules", "tests/data", "benches/results", ".git", ".cache", ".venv", "models")
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not path.is_file() or name.startswith(skipped) or "node_modules" in name or path.suffix not in TEXTS:
            continue
        text = path.read_text()
        lines = text.splitlines()
        if name.startswith("src/") and path.suffix == ".rs":
            room = next((room for room, places in ROOMS.items() if name.startswith(places)), "product")
            product, tests = split(lines)
            rooms[f"{room} (Rust)"] += product
            if room == "product":
                parts[name.split("/")[1]] += product
            rooms["tests (Rust, inline)"] += tests
        elif name.startswith("tests/") and path.suffix == ".rs":
            rooms["tests (Rust)"] += len(lines)
        elif name.startswith("tools/"):
            rooms["tools"] += len(lines)
        elif path.suffix == ".md" and (name.startswith("docs/") or "/" not in name):
            rooms["documents (bytes)"] += len(text.encode())
        for idiom in IDIOMS:
            idioms[idiom] += sum(1 for line in lines if re.search(rf"\b{idiom}\b", line, re.IGNORECASE))
    for room, count in sorted(rooms.items()):
        print(f"{count:8} {room}")
    print("product by room: " + ", ".join(f"{part} {count}" for part, count in parts.most_common()))
    for idiom in IDIOMS:
        print(f"{idioms[idiom]:8} lines with {idiom!r}")


if __name__ == "__main__":
    main()

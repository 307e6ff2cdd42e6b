#!/bin/sh
# Runs `BINARY COMMAND ARGS`. Adds --allow-software-vulkan only if `BINARY devices` finds no usable GPU. The software
# driver is as correct as a GPU, but much slower, so the script prints a large warning.
set -eu
binary=$1 command=$2
shift 2

devices=$("$binary" devices 2>&1) || true
if printf '%s\n' "$devices" | grep -Eq '^ *usable +yes'; then
    exec "$binary" "$command" "$@"
fi
cat >&2 <<'NOTE'
########################################################################
#  NO USABLE GPU: computing on the CPU through Mesa's software Vulkan. #
#  Everything works, slowly. `unicorn devices` says what each lacks.   #
########################################################################
NOTE
exec "$binary" "$command" --allow-software-vulkan "$@"

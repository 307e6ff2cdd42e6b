#!/bin/sh
# Runs `BINARY COMMAND ARGS`, and adds --allow-software-vulkan only where `BINARY devices` finds no usable GPU.
# The software driver's answers are as right as a GPU's, and far slower, so the script warns loudly.
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

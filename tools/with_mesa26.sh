#!/bin/sh
# Runs a command with Mesa 26 and the C library that it needs overlaid on /usr: `tools/with_mesa26.sh COMMAND ARGS`. The
# overlay is in the command's own mount namespace, so no other process sees it. Compile outside, run inside.
#
# MESA26_DEVICE chooses what the Vulkan loader finds:
#   lavapipe             Mesa 26's software Vulkan
#   phoenix, strix1, ..  RADV for that GPU, over a shim that replaces the kernel's driver: it compiles, and what is
#                        submitted to it "succeeds" and does nothing
#   unset                whatever the environment says otherwise
set -eu
[ $# -gt 0 ] || { echo "usage: $0 COMMAND ARGS" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)/.cache/devices/mesa26
if [ ! -d "$root/usr" ]; then
    echo "with_mesa26: $root does not exist: \`make setup-devices\`" >&2
    exit 1
fi

icds=/usr/share/vulkan/icd.d
case ${MESA26_DEVICE-} in
    '') choice= ;;
    lavapipe) choice="VK_DRIVER_FILES=$icds/lvp_icd.json VK_ICD_FILENAMES=$icds/lvp_icd.json" ;;
    *[!a-z0-9_]*) echo "with_mesa26: MESA26_DEVICE=$MESA26_DEVICE is not a device name" >&2; exit 2 ;;
    # Only the command loads the shim, which must come from the overlay.
    *) choice="VK_DRIVER_FILES=$icds/radeon_icd.json VK_ICD_FILENAMES=$icds/radeon_icd.json AMDGPU_GPU_ID=$MESA26_DEVICE LD_PRELOAD=libamdgpu_noop_drm_shim.so" ;;
esac

# Root in a container may be unable to make namespaces, but may be able to in a user namespace.
if [ "$(id -u)" = 0 ] && unshare -m true 2>/dev/null; then own=-m; else own=-rm; fi
if ! unshare "$own" true 2>/dev/null; then
    echo "with_mesa26: this system does not allow mount namespaces (unshare $own)" >&2
    exit 1
fi
# Colons, commas and backslashes separate mount options, so they are escaped.
lower=$(printf '%s' "$root/usr" | sed 's/[\\:,]/\\&/g')
# $choice consists of several words.
# shellcheck disable=SC2086
exec unshare "$own" sh -c 'lower=$1; shift; mount -t overlay overlay -o "lowerdir=$lower:/usr" /usr && exec env "$@"' \
    sh "$lower" $choice "$@"

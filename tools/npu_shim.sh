#!/bin/sh
# Builds libunicorn_npu.so, through which the program calls XRT and uses the NPU. `make npu-shim` calls this script.
#
#   tools/npu_shim.sh [FOLDER]   the shared object goes into that folder; target/debug, where the program is, by default
#
# It is built against the XRT of this machine. The XRT of another machine may need other libraries.
#   XRT_INCLUDE, XRT_LIBRARIES   the folders of XRT's headers (xrt/xrt_device.h) and libraries, where they are not in
#                                the system's own places or in /opt/xilinx/xrt
#   CXX                          the C++ compiler
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$here/target/debug}

fail() {
    echo "npu-shim: $*" >&2
    exit 1
}

compiler=${CXX:-}
for name in c++ g++ clang++; do
    [ -n "$compiler" ] || ! command -v $name >/dev/null || compiler=$name
done
[ -n "$compiler" ] || fail "there is no C++ compiler: \`apt-get install g++\`"

# Debian's package installs the headers where compilers search. AMD's package does not.
if [ -z "${XRT_INCLUDE:-}" ]; then
    for prefix in /usr /usr/local /opt/xilinx/xrt; do
        [ -n "${XRT_INCLUDE:-}" ] || [ ! -e $prefix/include/xrt/xrt_device.h ] || XRT_INCLUDE=$prefix/include
    done
fi
[ -n "${XRT_INCLUDE:-}" ] ||
    fail "XRT's headers are not here (xrt/xrt_device.h): on Debian 14 \`apt-get install libxrt-dev libxrt-npu2\`, elsewhere" \
        "AMD's packages of XRT and its plugin for Ryzen AI"
[ -e "$XRT_INCLUDE/xrt/xrt_hw_context.h" ] ||
    fail "the XRT of $XRT_INCLUDE is too old: it has no xrt/xrt_hw_context.h, without which nothing runs on the NPU;" \
        "take 2.25 or later"
libraries=${XRT_LIBRARIES:-$XRT_INCLUDE/../lib}
for place in "$libraries" "$libraries/$("$compiler" -dumpmachine)" "$libraries/x86_64-linux-gnu"; do
    [ ! -e "$place/libxrt_coreutil.so" ] || { libraries=$place && break; }
done
[ -e "$libraries/libxrt_coreutil.so" ] ||
    fail "there is no libxrt_coreutil.so in $libraries: \`apt-get install libxrt-dev\`, or set XRT_LIBRARIES"

# If /usr/include is given explicitly, it hides the C library's headers from the C++ library.
case $XRT_INCLUDE in /usr/include | /usr/local/include) set -- ;; *) set -- -isystem "$XRT_INCLUDE" ;; esac
mkdir -p "$folder"
# The linker need not find the libraries that XRT itself needs. The finished file replaces the old one, which may be in
# use.
"$compiler" -std=c++17 -O2 -Wall -Wextra -fPIC -shared "$@" -o "$folder/libunicorn_npu.so.new" \
    "$here/src/npu/shim.cpp" "$libraries/libxrt_coreutil.so" -Wl,--allow-shlib-undefined ||
    fail "it does not compile against the XRT of $XRT_INCLUDE"
mv "$folder/libunicorn_npu.so.new" "$folder/libunicorn_npu.so"
echo "npu-shim: $folder/libunicorn_npu.so"

#!/bin/sh
# Proves the README's promise: runs a command of this repository on a machine that has only Rust, a C++ compiler,
# make and Python 3. The machine is a new debootstrap chroot (needs root, debootstrap and a Debian or Ubuntu
# mirror; takes minutes), the toolchain is this machine's own, and the repository is a clean export of HEAD.
#
#   tools/fresh_machine.sh bookworm http://deb.debian.org/debian "make test"
#   FRESH_COMPONENTS=main,universe tools/fresh_machine.sh noble http://archive.ubuntu.com/ubuntu "python3 tools/setup.py test"
#
# The chroot stays in $FRESH (default .cache/fresh-SUITE), and a second call with the same suite continues in it.
set -eu
suite=$1 mirror=$2 command=$3
cd "$(dirname "$0")/.."
fresh=${FRESH:-$PWD/.cache/fresh-$suite}
rustup=${RUSTUP_HOME:-$HOME/.rustup}
cargo=${CARGO_HOME:-$HOME/.cargo}
inside=$(awk -F: '$3 == 0 { print $6; exit }' /etc/passwd)

[ -e "$fresh/etc/os-release" ] ||
    debootstrap --variant=minbase --components="${FRESH_COMPONENTS:-main}" --include=python3,g++,make "$suite" "$fresh" "$mirror"
mkdir -p "$fresh/src" "$fresh$inside/.rustup" "$fresh$inside/.cargo/bin"
git archive HEAD | tar x -C "$fresh/src"
cp -L /etc/resolv.conf /etc/hosts "$fresh/etc/"

mounted=
unmount() { for point in $mounted; do umount "$point"; done; }
trap unmount EXIT
bind() { mount --bind "$1" "$2" && mounted="$2 $mounted"; }
bind /proc "$fresh/proc"
bind /dev "$fresh/dev"
bind "$rustup" "$fresh$inside/.rustup"
bind "$cargo/bin" "$fresh$inside/.cargo/bin"
chroot "$fresh" /usr/bin/env -i HOME="$inside" LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    sh -c "cd /src && $command"

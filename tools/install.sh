#!/bin/sh
# Installs the built binary as a service; `make install` calls it.
#
#   $PREFIX/bin/unicorn              the binary
#   $PREFIX/lib/unicorn              libunicorn_npu.so, if `make npu-shim` has built it next to the binary
#   $PREFIX/lib/systemd/system       the unit, with that path in it, and a socket that may start it
#   $PREFIX/lib/sysusers.d           the user `unicorn`, in the groups render and video
#   $PREFIX/share                    a manual page for each command, and completions for bash, zsh and fish
#   /etc/unicorn/config.toml         every option with its default, commented out; an existing file is not changed
#
# With DESTDIR, as packagers set it, all files go below that folder, and the running system is not notified.
set -eu
binary=$1
prefix=${PREFIX:-/usr/local} root=${DESTDIR:-}
here=$(dirname "$0")/..

fail() {
    echo "install: $*" >&2
    exit 1
}

case $binary in */*) ;; *) binary=./$binary ;; esac
[ -x "$binary" ] || fail "$binary does not exist: run \`make build\` first, as a normal user, then \`sudo make install\`"
if [ -z "$root" ] && [ "$(id -u)" -ne 0 ]; then
    fail "installing below $prefix and /etc needs root: use \`sudo make install\`, or set DESTDIR"
fi

install -D -m 755 "$binary" "$root$prefix/bin/unicorn"
shim=$(dirname "$binary")/libunicorn_npu.so
if [ -e "$shim" ]; then
    install -D -m 644 "$shim" "$root$prefix/lib/unicorn/libunicorn_npu.so"
fi
unit=$root$prefix/lib/systemd/system/unicorn.service
install -D -m 644 "$here/config/unicorn.service" "$unit"
sed -i "s|^ExecStart=/usr/local/bin/|ExecStart=$prefix/bin/|" "$unit"
install -D -m 644 "$here/config/unicorn.socket" "$root$prefix/lib/systemd/system/unicorn.socket"
install -D -m 644 "$here/config/unicorn.sysusers" "$root$prefix/lib/sysusers.d/unicorn.conf"

share=$root$prefix/share
rm -f "$share/man/man1/unicorn.1" "$share/man/man1"/unicorn-*.1
"$binary" man-pages "$share/man/man1"
for completion in bash:bash-completion/completions/unicorn zsh:zsh/site-functions/_unicorn fish:fish/vendor_completions.d/unicorn.fish; do
    file=$share/${completion#*:}
    mkdir -p "$(dirname "$file")"
    "$binary" completions "${completion%%:*}" >"$file"
done

config=$root/etc/unicorn/config.toml
if [ -e "$config" ]; then
    echo "install: $config stays as it is; config/default.toml has what is new"
else
    # A file with commented-out options gets the defaults of later versions.
    mkdir -p "$(dirname "$config")"
    sed 's/^\([a-z0-9_]* = \)/#\1/' "$here/config/default.toml" >"$config.new"
    # The service may write here. It serves what is pulled, and pulls for its clients and for `unicorn pull`.
    sed -e 's|^#dir = ""|dir = "/var/lib/unicorn/models"|' -e 's|^#pulled = false|pulled = true|' "$config.new" >"$config"
    rm "$config.new"
    chmod 644 "$config"
fi

[ -z "$root" ] || exit 0
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers "$prefix/lib/sysusers.d/unicorn.conf"
else
    echo "install: no systemd-sysusers here: make a system user \`unicorn\` in the groups render and video" >&2
fi
# In a container or chroot without a running systemd, this step is skipped.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
cat <<'NEXT'
installed. Next:
  systemctl enable --now unicorn          start it, now and at every boot
  unicorn pull ORG/NAME                   a model, which the service then serves; `unicorn run ORG/NAME` talks to it
  edit /etc/unicorn/config.toml           options, address, keys; `unicorn config check` says what is wrong
  journalctl -u unicorn -f                see what it says
NEXT

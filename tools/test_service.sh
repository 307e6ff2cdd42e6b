#!/bin/sh
# Installs the Debian package on a new machine where systemd runs the service. Tests that it starts, answers, reloads,
# restarts after a kill and an upgrade, and stays stopped after an error that a restart cannot fix. The machine is a
# container that boots Debian's systemd (needs root, debootstrap, systemd-nspawn and a Debian mirror, and takes
# minutes). The service computes on software Vulkan, with all restrictions of the unit.
#
#   tools/test_service.sh BINARY [MIRROR]
#
# The machine is kept in $FRESH (default .cache/service), and a second call continues with it.
set -eu
binary=$1 mirror=${2:-}
cd "$(dirname "$0")/.."
machine=${FRESH:-$PWD/.cache/service}
backports=etc/apt/sources.list.d/backports.list

if [ ! -e "$machine/etc/os-release" ]; then
    debootstrap --include=systemd,systemd-sysv,dbus,libvulkan1,curl,ca-certificates,procps bookworm "$machine" ${mirror:+"$mirror"}
fi
if [ ! -e "$machine/$backports" ]; then
    # Bookworm's own Mesa is too old. `make setup` also uses backports.
    cp -L /etc/resolv.conf /etc/hosts "$machine/etc/"
    mirror=$(awk '$1 == "deb" { print $2; exit }' "$machine/etc/apt/sources.list")
    echo "deb $mirror bookworm-backports main" >"$machine/$backports"
    chroot "$machine" sh -c "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
        -t bookworm-backports mesa-vulkan-drivers"
fi

rm -rf "$machine/src" "$machine/etc/unicorn" "$machine/said"
mkdir -p "$machine/src"
python3 tools/release.py --deb "$binary" "$machine/src"
inside="chroot $machine /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin"
# A machine of an earlier run still has the package.
$inside dpkg --purge unicorn-execution-engine
$inside sh -c "dpkg -i /src/*.deb"
# A user without a GPU would set this option.
sed -i 's/^#allow_software_vulkan = false/allow_software_vulkan = true/' "$machine/etc/unicorn/config.toml"

cat >"$machine/src/check.sh" <<'CHECK'
#!/bin/sh
# Runs inside the machine. Prints a line for each true fact, and `failed` for the first one that is not true.
set -u
base=http://127.0.0.1:8010
must() {
    what=$1
    shift
    if "$@" >/src/last 2>&1; then
        echo "ok: $what"
    else
        echo "failed: $what"
        tail -n 5 /src/last
        systemctl status --no-pager unicorn
        exit 1
    fi
}
within() {
    seconds=$1
    shift
    while ! "$@"; do
        [ "$seconds" -gt 0 ] || return 1
        seconds=$((seconds - 1))
        sleep 1
    done
}
healthy() { curl -fsS "$base/health"; }
answers() { curl -fsS "$base/v1/chat/completions" -d '{"model": "unicorn-demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}' | grep Paris; }
refuses() { [ "$(curl -s -o /dev/null -w '%{http_code}' "$base/v1/models")" = 401 ]; }
is() { [ "$(systemctl show --value -p "$1" unicorn)" = "$2" ]; }
says() { journalctl -q -u unicorn --no-pager | grep "$1"; }
is_not_enabled() { ! systemctl -q is-enabled "$1"; }
is_not() { [ "$(systemctl show --value -p "$1" unicorn)" != "$2" ]; }
is_not_there() { ! pgrep -x unicorn && ! systemctl -q is-active unicorn; }
courteous() { curl -fsS "$base/status" | grep '"holds":true'; }
main_pid() { systemctl show --value -p MainPID unicorn; }

must "the package has it started at every boot" systemctl -q is-enabled unicorn
must "and not by a socket" is_not_enabled unicorn.socket
must "it starts" systemctl start unicorn
must "systemd waited until it was ready" healthy
must "and knows what it serves" sh -c "systemctl show --value -p StatusText unicorn | grep 'unicorn-demo at'"
must "and watches it" is WatchdogUSec 1min
must "it answers" answers
must "it runs as its own user" test "$(ps -o user= -p "$(main_pid)")" = unicorn
must "it is a member of render and video" sh -c "id -nG unicorn | grep -w render | grep -w video"
must "it reloads" systemctl reload unicorn
must "and says so" within 10 says "read the configuration again"
must "it continues to answer" answers
must "the configuration is good" unicorn config check
before=$(main_pid)
must "an upgrade installs" sh -c "dpkg -i /src/*.deb"
must "and has it started again" is_not MainPID "$before"
must "with the configuration that was there" answers
mkdir -p /run/systemd/sessions /etc/unicorn/conf.d
printf 'STATE=active\nTYPE=wayland\nCLASS=user\nSEAT=seat0\n' >/run/systemd/sessions/of-a-test
printf '[engine]\ncourtesy = 0.5\n' >/etc/unicorn/conf.d/courtesy.toml
systemctl reload unicorn
must "it detects a user at the machine" within 10 courteous
rm /run/systemd/sessions/of-a-test /etc/unicorn/conf.d/courtesy.toml
systemctl reload unicorn
echo "sk-0123456789abcdef0123" >/etc/unicorn/api-keys
chmod 600 /etc/unicorn/api-keys
systemctl restart unicorn
must "keys in a file that only root may read are required" refuses
must "and are accepted" curl -fsS -H "authorization: Bearer sk-0123456789abcdef0123" "$base/v1/models"
rm /etc/unicorn/api-keys
systemctl restart unicorn
must "without that file there are none" answers
kill -KILL "$(main_pid)"
must "killed, it is started again" within 60 is NRestarts 1
must "and answers again" within 300 answers
sed -i 's/^#port = 8010/port = "many"/' /etc/unicorn/config.toml
systemctl restart unicorn
must "an invalid configuration ends it with 78" within 30 is ExecMainStatus 78
sleep 10
must "and it is not started again" is NRestarts 0
must "its log names the option" says "server.port"
sed -i 's/^port = "many"/#port = 8010/' /etc/unicorn/config.toml
must "with a valid configuration, it starts" systemctl restart unicorn
must "and answers" within 300 answers
must "it stops" systemctl stop unicorn
must "with status 0" is ExecMainStatus 0
must "and success" is Result success
must "systemd listens for it" systemctl start unicorn.socket
must "a request starts it, and is answered" answers
must "and it runs" is ActiveState active
must "both stop" systemctl stop unicorn.socket unicorn
systemctl -q disable unicorn
must "an upgrade of a service that is disabled installs" sh -c "dpkg -i /src/*.deb"
must "and leaves it stopped" is ActiveState inactive
systemctl start unicorn
must "the package is removed" dpkg --remove unicorn-execution-engine
must "and the running service is stopped" is_not_there
echo "all of it holds"
CHECK
chmod +x "$machine/src/check.sh"
cat >"$machine/etc/systemd/system/check.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/bin/sh -c "/src/check.sh >/said 2>&1"
ExecStopPost=/bin/systemctl --no-block poweroff
TimeoutStartSec=20min
[Install]
WantedBy=multi-user.target
UNIT
chroot "$machine" systemctl -q enable check.service
systemd-nspawn --quiet --directory="$machine" --boot --private-network --register=no --keep-unit >"$machine/src/console" 2>&1 ||
    tail -n 20 "$machine/src/console" >&2
cat "$machine/said"
grep -q "all of it holds" "$machine/said"

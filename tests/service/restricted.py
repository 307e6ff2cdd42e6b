#!/usr/bin/env python3
"""Runs a command under the restrictions of a systemd unit, as far as this machine can apply them without systemd.

    restricted.py UNIT REPORT [COMMAND...]

Every line of the unit's section [Service] is applied here, or is left out for a reason, or restricts nothing. Any
other line is an error, so that no restriction is forgotten. REPORT becomes JSON: {"applied": [name], "left_out": {name: reason},
"lacking": {name: reason}}. `left_out` is what only systemd does, and the same on each machine; `lacking` is what this
machine refuses. Without a command, REPORT also has "held": the restrictions that this process was stopped by when it tried
to break each of them.
"""

import ctypes
import errno
import grp
import json
import os
import pwd
import re
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

# Lines that say how the service is started, watched and stopped.
NO_RESTRICTION = {
    "Type", "TimeoutStartSec", "TimeoutStopSec", "WatchdogSec", "ExecStart", "ExecReload", "Restart", "RestartSec",
    "RestartPreventExitStatus", "KillMode", "OOMPolicy", "LoadCredential", "SetCredential", "Environment",
}
LEFT_OUT = {
    "DevicePolicy": "systemd filters devices with a program for its own control group",
    "DeviceAllow": "belongs to DevicePolicy",
    "ProtectClock": "systemd's list of system calls, and its filter of devices",
    "ProtectHostname": "systemd's list of system calls",
    "ProtectKernelLogs": "systemd's list of system calls",
    "ProtectKernelModules": "systemd's list of system calls",
    "RestrictSUIDSGID": "a filter of every call that makes a file",
    "RemoveIPC": "systemd removes what is left when a service has ended",
    "SystemCallFilter": "systemd's lists of system calls (@system-service), which no other program has",
    "SystemCallErrorNumber": "belongs to SystemCallFilter",
}
NOBODY = "nobody"
# The program's path in the private mounts.
PROGRAM = Path("/var/lib/program")
FOLDERS = {"StateDirectory": Path("/var/lib"), "CacheDirectory": Path("/var/cache")}
PRIVATE_TMP = ["/tmp", "/var/tmp"]
# What systemd makes read-only in addition to /sys; a machine has some of these.
TUNABLES = ["/proc/acpi", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS = 0x20000
PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 22, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = int(Path("/proc/sys/kernel/cap_last_cap").read_text())


class Lacking(Exception):
    """What this machine refuses."""


def lines_of(unit):
    """The unit's section [Service]: the values of each name, in their order."""
    lines = {}
    section = ""
    for line in Path(unit).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            lines.setdefault(name, []).append(value)
    return lines


def call(what, result):
    if result != 0:
        raise Lacking(f"{what}: {os.strerror(ctypes.get_errno())}")


def prctl(what, *arguments):
    call(what, LIBC.prctl(*(ctypes.c_ulong(argument) for argument in [*arguments, *[0] * (5 - len(arguments))])))


def only(value, *known):
    """Refuses a value that this file does not know, so that a change of the unit cannot be forgotten here."""
    if value not in known:
        raise SystemExit(f"restricted.py knows {' and '.join(map(repr, known))} here, and not {value!r}")


# --- mounts ---------------------------------------------------------------------------------------------


def mount(*arguments):
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Lacking(f"mount {' '.join(map(str, arguments))}: {done.stderr.strip()}")


def private_mounts(program):
    """A mount namespace of this process, in which /var/lib and /var/cache are empty: the machine may have the service
    installed, and what is made here must not stay. Its user may be unable to reach `program`, which gets another path."""
    if os.geteuid() != 0:
        raise Lacking("only root may make mounts")
    call("a mount namespace", LIBC.unshare(CLONE_NEWNS))
    mount("--make-rprivate", "/")
    for folder in FOLDERS.values():
        mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", folder)
    PROGRAM.touch()
    mount("--bind", program, PROGRAM)


def mounts_below(folder):
    below = [line.split()[4].replace("\\040", " ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted({path for path in below if path == folder or path.startswith(folder.rstrip("/") + "/")})


def read_only(path):
    options = next(line.split()[5] for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines())
                   if line.split()[4].replace("\\040", " ") == path)
    kept = [option for option in options.split(",") if option in ("nosuid", "nodev", "noexec")]
    mount("-o", ",".join(["remount", "bind", "ro", *kept]), path)


class Restrictions:
    """The restrictions in the order in which they can be applied: mounts, then limits, then rights, then filters."""

    def __init__(self, lines, program):
        self.lines = lines
        self.user = self.group = None
        self.writable = list(PRIVATE_TMP)
        try:
            self.mounts = private_mounts(program)
        except Lacking as lacking:
            self.mounts = lacking

    def need_mounts(self):
        if isinstance(self.mounts, Lacking):
            raise self.mounts

    def ids(self):
        """The service's user, or a user without rights if it is not installed."""
        name = self.lines["User"][-1]
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            found = pwd.getpwnam(NOBODY)
        return found.pw_uid, found.pw_gid

    def folder(self, name, value):
        self.need_mounts()
        path = FOLDERS[name] / value
        path.mkdir(mode=0o755)
        os.chown(path, *self.ids())
        mount("--bind", path, path)
        self.writable.append(str(path))

    def state_directory(self, value):
        self.folder("StateDirectory", value)

    def cache_directory(self, value):
        self.folder("CacheDirectory", value)

    def private_tmp(self, value):
        only(value, "yes")
        self.need_mounts()
        for folder in PRIVATE_TMP:
            mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "tmpfs", folder)

    def protect_proc(self, value):
        only(value, "invisible")
        self.need_mounts()
        mount("-t", "proc", "-o", "nosuid,nodev,noexec,hidepid=invisible", "proc", "/proc")

    def protect_system(self, value):
        only(value, "strict")
        self.need_mounts()
        for path in mounts_below("/"):
            if not any(path == tree or path.startswith(tree + "/") for tree in ["/dev", "/proc", "/sys", *self.writable]):
                read_only(path)

    def protect_home(self, value):
        only(value, "read-only")
        self.protect_system("strict")

    def protect_control_groups(self, value):
        only(value, "yes")
        self.need_mounts()
        for path in mounts_below("/sys/fs/cgroup"):
            read_only(path)

    def protect_kernel_tunables(self, value):
        only(value, "yes")
        self.need_mounts()
        for path in filter(os.path.exists, TUNABLES):
            mount("--bind", path, path)
            read_only(path)
        for path in mounts_below("/sys"):
            read_only(path)

    # --- limits and rights

    def limit(self, name, value):
        number = resource.RLIM_INFINITY if value == "infinity" else int(value)
        try:
            resource.setrlimit(getattr(resource, name), (number, number))
        except (ValueError, OSError) as error:
            raise Lacking(f"{value}: {error}") from None

    def limit_memlock(self, value):
        self.limit("RLIMIT_MEMLOCK", value)

    def limit_core(self, value):
        self.limit("RLIMIT_CORE", value)

    def limit_nofile(self, value):
        self.limit("RLIMIT_NOFILE", value)

    def umask(self, value):
        os.umask(int(value, 8))

    def capability_bounding_set(self, value):
        only(value, "")
        for capability in range(LAST_CAPABILITY + 1):
            prctl("the bounding set", PR_CAPBSET_DROP, capability)

    def ambient_capabilities(self, value):
        only(value, "")
        prctl("ambient capabilities", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)

    def supplementary_groups(self, value):
        try:
            groups = [grp.getgrnam(name).gr_gid for name in value.split()]
        except KeyError as error:
            groups = None
            lacking = str(error.args[0])
        self.as_root(lambda: os.setgroups(groups or []))
        if groups is None:
            raise Lacking(lacking)

    def group_id(self, _):
        self.as_root(lambda: os.setresgid(*[self.ids()[1]] * 3))

    def user_id(self, _):
        self.as_root(lambda: os.setresuid(*[self.ids()[0]] * 3))

    def as_root(self, change):
        try:
            change()
        except PermissionError as error:
            raise Lacking(f"only root may: {error}") from None

    def no_new_privileges(self, value):
        only(value, "yes")
        prctl("no new privileges", PR_SET_NO_NEW_PRIVS, 1)

    # --- filters of system calls

    def restrict_address_families(self, value):
        families = [ADDRESS_FAMILIES[name] for name in value.split()]
        install([SOCKET, one_of(0, families, errno.EAFNOSUPPORT)])

    def lock_personality(self, value):
        only(value, "yes")
        install([PERSONALITY, one_of(0, [0, 0xFFFFFFFF], errno.EPERM)])

    def restrict_realtime(self, value):
        only(value, "yes")
        install([SCHED_SETSCHEDULER, one_of(1, [0, 3, 5], errno.EPERM)])  # SCHED_OTHER, SCHED_BATCH, SCHED_IDLE

    def restrict_namespaces(self, value):
        only(value, "yes")
        # clone3 has its flags in memory, where no filter sees them; the C library falls back to clone.
        install([UNSHARE, no_bit_of(0, NAMESPACES, errno.EPERM)], [CLONE, no_bit_of(0, NAMESPACES, errno.EPERM)],
                [SETNS, always(errno.EPERM)], [CLONE3, always(errno.ENOSYS)])

    def system_call_architectures(self, value):
        only(value, "native")
        install()  # every filter ends a process that calls as another architecture does

    APPLIED = {
        "StateDirectory": state_directory, "CacheDirectory": cache_directory, "PrivateTmp": private_tmp,
        "ProtectProc": protect_proc, "ProtectSystem": protect_system, "ProtectHome": protect_home,
        "ProtectControlGroups": protect_control_groups, "ProtectKernelTunables": protect_kernel_tunables,
        "LimitMEMLOCK": limit_memlock, "LimitCORE": limit_core, "LimitNOFILE": limit_nofile, "UMask": umask,
        "CapabilityBoundingSet": capability_bounding_set, "AmbientCapabilities": ambient_capabilities,
        "SupplementaryGroups": supplementary_groups, "Group": group_id, "User": user_id,
        "NoNewPrivileges": no_new_privileges, "RestrictAddressFamilies": restrict_address_families,
        "LockPersonality": lock_personality, "RestrictRealtime": restrict_realtime,
        "RestrictNamespaces": restrict_namespaces, "SystemCallArchitectures": system_call_architectures,
    }

    def apply(self):
        """Applies all that can be applied. Returns the report."""
        report = {"applied": [], "left_out": {name: LEFT_OUT[name] for name in self.lines if name in LEFT_OUT}, "lacking": {}}
        for name, restrict in self.APPLIED.items():
            if name not in self.lines:
                continue
            try:
                restrict(self, self.lines[name][-1])
                report["applied"].append(name)
            except Lacking as lacking:
                report["lacking"][name] = str(lacking)
        return report


# --- filters of system calls: classic BPF over struct seccomp_data -----------------------------------------

ADDRESS_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
# Numbers of x86-64, on which the service's GPUs are.
SOCKET, CLONE, PERSONALITY, SCHED_SETSCHEDULER, UNSHARE, SETNS, CLONE3 = 41, 56, 135, 144, 272, 308, 435
AUDIT_ARCH_X86_64, X32 = 0xC000003E, 0x40000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16


def instruction(code, value, if_true=0, if_false=0):
    return struct.pack("HBBI", code, if_true, if_false, value)


def one_of(argument, values, error):
    """Refuses a call unless the argument is one of these."""
    tests = [instruction(JUMP_EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    return [instruction(LOAD, ARGUMENTS + 8 * argument), *tests, instruction(RETURN, ERRNO | error)]


def no_bit_of(argument, bits, error):
    """Refuses a call if the argument has one of these bits."""
    return [instruction(LOAD, ARGUMENTS + 8 * argument), instruction(JUMP_ANY_BIT, bits, 0, 1), instruction(RETURN, ERRNO | error)]


def always(error):
    return [instruction(RETURN, ERRNO | error)]


def install(*rules):
    if os.uname().machine != "x86_64":
        raise Lacking("the filters here are for x86-64")
    program = [
        instruction(LOAD, ARCHITECTURE), instruction(JUMP_EQUAL, AUDIT_ARCH_X86_64, 1), instruction(RETURN, KILL_PROCESS),
        instruction(LOAD, NUMBER), instruction(JUMP_AT_LEAST, X32, 0, 1), instruction(RETURN, KILL_PROCESS),
    ]
    for number, rule in rules:
        program += [instruction(LOAD, NUMBER), instruction(JUMP_EQUAL, number, 0, len(rule)), *rule]
    code = b"".join([*program, instruction(RETURN, ALLOW)])
    text = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text)))
    prctl("a filter of system calls", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


# --- whether a restriction holds, tried in this process --------------------------------------------------


def fails(code, action, *arguments):
    """Whether the call fails with this very error. Each of these calls fails with another one where nothing restricts it."""
    try:
        action(*arguments)
    except OSError as error:
        return error.errno == code
    return False


def cannot_write(path):
    return fails(errno.EROFS, open, path, "w")


def can_write(path):
    try:
        Path(path).write_text("x")
        Path(path).unlink()
    except OSError:
        return False
    return True


def libc(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), function.__name__)


def status(name):
    return re.search(rf"^{name}:\s*(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]


def is_killed(action):
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def held(lines):
    """For each restriction, whether it holds here."""
    last = {name: values[-1] for name, values in lines.items()}
    limits = {name: resource.RLIM_INFINITY if last[name] == "infinity" else int(last[name]) for name in last if name.startswith("Limit")}
    is_limited = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name[5:]}")) == (limit, limit) for name, limit in limits.items()}
    realtime = struct.pack("i", 0)
    return {
        "StateDirectory": can_write(f"/var/lib/{last['StateDirectory']}/x"),
        "CacheDirectory": can_write(f"/var/cache/{last['CacheDirectory']}/x"),
        "PrivateTmp": os.listdir("/tmp") == [] and can_write("/tmp/x"),
        "ProtectProc": not os.path.exists("/proc/1"),
        "ProtectSystem": all(map(cannot_write, ["/x", "/etc/x", "/usr/x", "/var/x", "/var/lib/x"])),
        "ProtectHome": cannot_write(os.path.join("/home", "x")),
        "ProtectControlGroups": cannot_write("/sys/fs/cgroup/x"),
        "ProtectKernelTunables": cannot_write("/proc/sys/kernel/panic") and cannot_write("/sys/x"),
        **is_limited,
        "UMask": os.umask(0) == int(last["UMask"], 8),
        "CapabilityBoundingSet": int(status("CapBnd"), 16) == 0,
        "AmbientCapabilities": int(status("CapAmb"), 16) == 0,
        "SupplementaryGroups": len(os.getgroups()) == len(last["SupplementaryGroups"].split()),
        "Group": 0 not in os.getresgid(),
        "User": 0 not in os.getresuid() and int(status("CapEff"), 16) == 0,
        "NoNewPrivileges": status("NoNewPrivs") == "1",
        "RestrictAddressFamilies": fails(errno.EAFNOSUPPORT, socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
        "LockPersonality": fails(errno.EPERM, libc, LIBC.personality, 0x0040000),
        "RestrictRealtime": fails(errno.EPERM, libc, LIBC.sched_setscheduler, 0, 1, realtime),
        "RestrictNamespaces": fails(errno.EPERM, libc, LIBC.unshare, 0x10000001),
        "SystemCallArchitectures": is_killed(lambda: LIBC.syscall(X32 | 39)),
    }


def main(unit, report, *command):
    lines = lines_of(unit)
    unknown = lines.keys() - NO_RESTRICTION - LEFT_OUT.keys() - Restrictions.APPLIED.keys()
    if unknown:
        sys.exit(f"restricted.py neither applies nor lists {', '.join(sorted(unknown))} of {unit}")
    # The file is opened, and the program found, before the mounts change.
    with open(report, "w") as file:
        restrictions = Restrictions(lines, Path(command[0]).absolute() if command else sys.executable)
        found = restrictions.apply()
        if not command:
            found["held"] = [name for name, holds in held(lines).items() if holds]
        json.dump(found, file)
    if command:
        os.environ.update(re.fullmatch(r"(\w+)=(.*)", line).groups() for line in lines.get("Environment", []))
        os.chdir("/")
        program = command[0] if isinstance(restrictions.mounts, Lacking) else str(PROGRAM)
        os.execv(program, [program, *command[1:]])


if __name__ == "__main__":
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""Soaks the shipped binary: every route for half an hour, with clients that leave, SIGHUPs and a lost device each minute.

    tools/soak.py               `unicorn-lab soak 30m` (`make soak` builds what it needs)
    tools/soak.py 5m ...        other arguments of `unicorn-lab soak`

The server is target/debug/unicorn, or $UNICORN_BINARY, with unicorn-lab in the same folder. It serves the demo model on software Vulkan, with the fault
layer, and with the malloc settings of the systemd unit. The exit status is 1 if the soak test finds an error, if the
server does not exit with status 0 afterwards, or if its log reports a panic. The log is kept in target/soak.log.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_server import BINARY, LAB, ROOT, Server, with_faults

LOG = ROOT / "target/soak.log"
END_SECONDS = 60


def main(arguments):
    for binary in (BINARY, LAB):
        if not binary.exists():
            sys.exit(f"soak: {binary} does not exist: `make soak` builds it")
    with tempfile.TemporaryDirectory(prefix="unicorn-soak-") as folder:
        faults = Path(folder) / "faults"
        faults.write_text("")
        disk = {"UNICORN_KV_DISK_PATH": str(Path(folder) / "kv"), "UNICORN_KV_DISK_MAX_BYTES": "64MiB"}
        with Server(environment=with_faults(faults) | malloc_of_the_service() | disk) as server:
            try:
                status = soak(server, faults, arguments)
            finally:
                shutil.copyfile(server.log.name, LOG)
    print(f"the server's log is {LOG}")
    return status


def malloc_of_the_service():
    unit = (ROOT / "config/unicorn.service").read_text()
    settings = dict(re.findall(r"^Environment=(MALLOC_\w+)=(.*)$", unit, re.MULTILINE))
    assert settings, "the systemd unit has no malloc settings"
    return settings


def soak(server, faults, arguments):
    if server.process.poll() is not None:
        sys.exit(f"soak: the server exited with status {server.process.returncode}: {server.logged()[-1000:]}")
    command = [LAB, "soak", "--url", f"http://127.0.0.1:{server.port}/v1", "--pid", str(server.process.pid)]
    # The program warns about variables that look like its options.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UNICORN_")}
    failed = subprocess.run([*command, "--fault-file", faults, *arguments], env=clean).returncode != 0
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        status = server.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        status = f"none {END_SECONDS} s after SIGTERM"
    panics = sum("panicked" in line for line in server.logged().splitlines())
    ended_well = status == 0 and panics == 0
    print(f"{'ok    ' if ended_well else 'FAILED'} the server's end: exit status {status}, {panics} panics in its log")
    return 1 if failed or not ended_well else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

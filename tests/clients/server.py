"""A real `unicorn serve` with the demo model, for tests, and plain requests to it."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("UNICORN_BINARY") or Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/unicorn")
LAB = BINARY.with_name("unicorn-lab")
# Vulkan's validation layer is enabled: each message of it is a failure.
ENVIRONMENT = {**os.environ, "UNICORN_HARDWARE_VALIDATION": "true"}
# Generous limits, because the first start on a machine compiles every shader. They detect hangs, and measure no speed.
START_SECONDS = 600
ANSWER_SECONDS = 300


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(process):
    """The ids of the child processes of a process."""
    while True:
        try:
            tasks = list(Path(f"/proc/{process}/task").iterdir())
            return [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            # The thread ended in the meantime. Its children now belong to another thread.
            if not is_running(process):
                raise


def is_running(process):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def machine_with_power(folder):
    """Writes a machine whose integrated GPU reports 15 W. `--root` reads the machine's energy from this folder."""
    gpu = folder / "sys/bus/pci/devices/0000:c5:00.0"
    sensor = gpu / "hwmon/hwmon3"
    sensor.mkdir(parents=True, exist_ok=True)
    for name, text in [("vendor", "0x1002"), ("device", "0x15bf"), ("class", "0x030000")]:
        (gpu / name).write_text(text)
    (sensor / "power1_average").write_text("15000000\n")
    if not (gpu / "driver").is_symlink():
        (gpu / "driver").symlink_to("../../../drivers/amdgpu")
    return folder


class Server:
    """A `unicorn serve` of these tests on a free port, with the observations during its start."""

    def __init__(self, log, *options, **variables):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(log, "w+")
        command = [BINARY, "serve", "--allow-software-vulkan", "--port", str(self.port), "--verbose", *options]
        self.process = subprocess.Popen(command, env={**ENVIRONMENT, **variables}, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def logged(self):
        return Path(self.log.name).read_text()

    def wait(self):
        """Returns when /health says 200. Before that, only 503 is accepted."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}: {last_line(self.logged())}")
            try:
                status, _ = get(self.url + "/health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)  # the port is not bound yet
                continue
            if status == 200:
                return
            assert status == 503, f"/health said {status} while loading"
            time.sleep(0.05)
        raise RuntimeError(f"not ready after {START_SECONDS} s; its last line: {last_line(self.logged())}")

    def stop(self):
        """Sends SIGTERM, which must end the server. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the server did not end within 30 s of SIGTERM") from None
        finally:
            self.log.close()


def last_line(text):
    return (text.strip().splitlines() or ["(nothing)"])[-1]


def get(url):
    return send(urllib.request.Request(url))


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(urllib.request.Request(url, data, {"Content-Type": "application/json"}))


def send(request):
    """Status and parsed body, for any status."""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def scrape(server):
    """The text of /metrics with the values of the device process. On a busy machine this process may answer late, and
    then a scrape lacks the values that only it knows."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(server.url + "/metrics", timeout=ANSWER_SECONDS) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4"), answer.headers
            text = answer.read().decode()
        if "\nunicorn_gpu_dispatches_total{" in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"the device process has not answered for {ANSWER_SECONDS} s")


def model_id(server):
    return get(server.url + "/v1/models")[1]["data"][0]["id"]

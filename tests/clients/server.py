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
# A message of Vulkan's validation layer fails what it comes in.
ENVIRONMENT = {**os.environ, "UNICORN_HARDWARE_VALIDATION": "true"}
# Generous: the first start on a machine compiles every shader. They bound a hang, and judge no speed.
START_SECONDS = 600
ANSWER_SECONDS = 300


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(process):
    """The ids of a process's children."""
    while True:
        try:
            tasks = list(Path(f"/proc/{process}/task").iterdir())
            return [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread ended meanwhile. Its children are another thread's now.
            if not is_running(process):
                raise


def is_running(process):
    """Whether a process is there, and is none that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def machine_with_power(folder):
    """Writes a machine whose integrated GPU reports 15 W: what `--root` reads the machine's energy from."""
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
    """A `unicorn serve` of our own on a free port, and what its first moments looked like."""

    def __init__(self, log, *options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(log, "w+")
        command = [BINARY, "serve", "--allow-software-vulkan", "--port", str(self.port), "--verbose", *options]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def logged(self):
        return Path(self.log.name).read_text()

    def wait(self):
        """Returns when /health says 200; fails on anything but 503 before it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}: {last_line(self.logged())}")
            try:
                status, _ = get(self.url + "/health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)  # not bound yet
                continue
            if status == 200:
                return
            assert status == 503, f"/health said {status} while loading"
            time.sleep(0.05)
        raise RuntimeError(f"not ready after {START_SECONDS} s; its last line: {last_line(self.logged())}")

    def stop(self):
        """SIGTERM must end it; its exit status."""
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
    """Status and parsed body, whatever the status."""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def scrape(server):
    """What /metrics says, as text, while the process with the model answers: on a busy machine it may be late, and then a
    scrape goes without what only that process knows."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(server.url + "/metrics", timeout=ANSWER_SECONDS) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4"), answer.headers
            text = answer.read().decode()
        if "\nunicorn_gpu_dispatches_total{" in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"the process with the model has not answered for {ANSWER_SECONDS} s")


def model_id(server):
    return get(server.url + "/v1/models")[1]["data"][0]["id"]

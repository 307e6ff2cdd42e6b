"""Runs a real `unicorn serve` with the demo model on software Vulkan, for tests from outside, and observes its
processes."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from server import children, free_port, is_running

BINARY = Path(os.environ.get("UNICORN_BINARY", ROOT / "target/debug/unicorn"))
LAB = BINARY.with_name("unicorn-lab")
START_SECONDS = 120
ANSWER_SECONDS = 60


class Server:
    """A `unicorn serve` on `port`, or on a free port, which is stopped at the end of the context. `options` = the rest
    of the section `server` and more sections of a configuration file. `stderr` = a file for the log. `wrapper` = a
    command that runs the server. If it `is_awaited`, the context begins when the server is ready."""

    def __init__(self, options="", keys=(), arguments=(), environment=None, log_pipe=False, stderr=None, wrapper=(), port=None,
                 is_awaited=True):
        self.folder = Path(tempfile.mkdtemp(prefix="unicorn-edges-"))
        self.keys, self.config, self.options = self.folder / "keys", self.folder / "unicorn.toml", options
        self.set_keys(keys)
        self.port = port or free_port()
        self.is_awaited = is_awaited
        command = [*wrapper, BINARY, "serve", "--allow-software-vulkan", "--config", self.config, "--port", str(self.port), *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("UNICORN_", "RUST_LOG"))}
        self.log = open(stderr or self.folder / "log", "wb")
        self.reader, writer = os.pipe() if log_pipe else (None, None)
        self.process = subprocess.Popen(
            command, env={**clean, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=writer if log_pipe else self.log,
        )
        if log_pipe:
            os.close(writer)

    def set_keys(self, keys):
        self.keys.write_text("\n".join(keys))
        file = f"[server]\napi_key_file = {json.dumps(str(self.keys))}\n" if keys else "[server]\n"
        self.config.write_text(file + self.options)

    def __enter__(self):
        if not self.is_awaited:
            return self
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return self  # for callers that expect the server to exit
            try:
                if self.send("GET", "/health", timeout=5)[0] == 200:
                    return self
            except OSError:
                pass  # the port is not bound yet
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_SECONDS} s")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()
        if self.reader is not None:
            os.close(self.reader)
        shutil.rmtree(self.folder)

    def send(self, method, path, body=None, key=None, headers=None, timeout=ANSWER_SECONDS):
        """Status and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def chat(self, text="What is the capital of France?", key=None, headers=None, **fields):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, **fields}
        return self.send("POST", "/v1/chat/completions", body, key, headers)

    def answer(self, *arguments, **fields):
        """The JSON object of an answer. Raises an error for an error status."""
        status, text = self.chat(*arguments, **fields)
        assert status == 200, f"{status}: {text[:200]}"
        return json.loads(text)

    def metric(self, name, key=None):
        lines = self.send("GET", "/metrics", key=key)[1].splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def end(self, seconds, sign=signal.SIGTERM):
        """The exit status after a signal, or without a signal."""
        if sign is not None:
            self.process.send_signal(sign)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {seconds} s") from None

    def logged(self):
        return (self.folder / "log").read_text(errors="replace")


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def health_within_a_second(server):
    began = time.monotonic()
    status, _ = server.send("GET", "/health")
    took = time.monotonic() - began
    assert status == 200 and took < 1, f"/health: {status} after {took:.2f} s"


def loses_its_log_and_nothing_else(server, answers):
    """Sends requests to a server whose log cannot be written. It must count the lost lines, answer nevertheless, and
    exit normally. Returns the number of lost lines."""
    whole = {text_of(server.answer()) for _ in range(answers)}
    assert len(whole) == 1, whole
    health_within_a_second(server)
    lost = server.metric("unicorn_log_lines_lost_total")
    assert lost > 0, "no lost line was counted"
    assert server.end(30) == 0, server.process.returncode
    return lost


def with_faults(file):
    """The environment of a server whose Vulkan calls fail as described by `file` (see the head of
    tests/fault_layer/lib.rs)."""
    libraries = BINARY.parent / "examples"
    assert (libraries / "libfault_layer.so").exists(), "no fault layer: cargo build --example fault_layer"
    return {
        "VK_INSTANCE_LAYERS": "VK_LAYER_UNICORN_fault", "VK_ADD_LAYER_PATH": str(ROOT / "tests/fault_layer"),
        "LD_LIBRARY_PATH": str(libraries), "FAULT_LAYER_FILE": str(file),
    }


def resident(process, field="VmRSS"):
    """Resident memory of a process in bytes: now, or the most so far (`VmHWM`)."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


def open_files(process):
    return len(os.listdir(f"/proc/{process}/fd"))

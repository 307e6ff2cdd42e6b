#!/usr/bin/env python3
"""Tests that no client, signal or fault breaks the shipped binary. Prints one line for each case. The exit status is 1
if a case fails.

    tools/edges.py              all cases (`make edges` builds what they need)
    tools/edges.py faults       cases with a failing device or a killed process (`make test-faults`)
    tools/edges.py NAME ...     the named cases

The binary is target/debug/unicorn, or $UNICORN_BINARY. It serves the demo model on software Vulkan. Some cases measure
time (a health check within a second, an exit within five), so they are not part of `make test`: they may fail only
because the machine is busy.
"""

import contextlib
import http.client
import json
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edge_server import (
    ANSWER_SECONDS, BINARY, LAB, ROOT, START_SECONDS, Server, health_within_a_second, loses_its_log_and_nothing_else, text_of,
)
from fault_edges import FAULT_EDGES

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
PATIENT_LOG = {"RUST_LOG": "debug,unicorn=trace"}


# --- the log --------------------------------------------------------------------------------------------


def log_reader_gone():
    with Server(log_pipe=True) as server:
        os.close(server.reader)
        server.reader = None
        lost = loses_its_log_and_nothing_else(server, 40)
        return f"40 of 40 answers complete, {lost:.0f} lines lost and counted"


def log_pipe_full():
    with Server(log_pipe=True, environment=PATIENT_LOG) as server:
        for _ in range(40):
            server.answer()
        ids = [{"x-request-id": "x" * 128}] * 1000
        with ThreadPoolExecutor(8) as pool:
            statuses = set(pool.map(lambda headers: server.send("GET", "/v1/models", headers=headers)[0], ids))
        assert statuses == {200}, statuses
        health_within_a_second(server)
        assert server.end(30) == 0, server.process.returncode
        os.set_blocking(server.reader, False)
        unread = len(os.read(server.reader, 1 << 20))
        assert unread > 50_000, f"the pipe was not full: {unread} bytes"
        return "40 of 40 answers, and 1000 of 1000 requests"


# --- signals --------------------------------------------------------------------------------------------


def sighup_without_tls():
    with Server(keys=[ALICE]) as server:
        def status(key):
            return server.send("GET", "/v1/models", key=key)[0]

        assert (status(ALICE), status(BOB)) == (200, 401)
        server.set_keys([BOB])
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 5
        while status(BOB) != 200:
            assert time.monotonic() < deadline, "the server does not accept the new key"
            time.sleep(0.05)
        assert status(ALICE) == 401, "the server still accepts the old key"
        server.config.write_text("[server]\nprt = 1\n")
        server.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert server.process.poll() is None and status(BOB) == 200, "an invalid file changed the configuration"
        assert "server.prt" in server.logged(), "the log does not name the invalid option"
        server.answer(key=BOB)
        return "alive; the new key accepted, the old one 401, an invalid file refused"


# --- concurrent clients --------------------------------------------------------------------------


def dribbling_bodies():
    with Server(keys=[ALICE, BOB]) as server:
        stop = threading.Event()
        dribbling = []
        for _ in range(64):
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Length: 9999\r\n\r\n".encode())
            dribbling.append(client)

        def dribble():
            while not stop.wait(3):
                for client in dribbling:
                    try:
                        client.sendall(b" ")
                    except OSError:
                        pass  # the server closed this connection

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            time.sleep(1)
            began = time.monotonic()
            answered = [server.chat(key=BOB)[0] for _ in range(20)]
            took = time.monotonic() - began
        finally:
            stop.set()
            thread.join()
            for client in dribbling:
                client.close()
        assert answered == [200] * 20, answered
        return f"20 of 20 answered in {took:.1f} s"


def key_rotation():
    with Server("requests_per_client = 2\n", keys=[ALICE, BOB]) as server:
        def long(i):
            # Each request has the valid key and a new invalid key, in either order.
            bogus = f"sk-bogus-{i}-0123456789"
            headers = {"x-api-key": bogus} if i % 2 else {"x-api-key": ALICE, "authorization": f"Bearer {bogus}"}
            key = ALICE if i % 2 else None
            return server.chat("Tell me a story", key=key, headers=headers, max_tokens=400, ignore_eos=True)

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(long, range(12)))
        statuses = [status for status, _ in answers]
        refused = {json.loads(text)["error"]["code"] for status, text in answers if status != 200}
        assert statuses.count(200) == 2 and refused == {"client_full"}, (statuses, refused)
        assert server.chat(key=BOB)[0] == 200, "another client is refused"
        return "2 of 12 run, 10 refused, because all count as one client"


def two_keys_and_one_text():
    text = "Remember these words: " + "apple river stone cloud " * 30
    with Server(keys=[ALICE, BOB]) as server:
        def cached(key, **fields):
            return server.answer(text, key=key, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

        first, again, other = cached(ALICE), cached(ALICE), cached(BOB)
        assert first == 0 and again > 0 and other == 0, (first, again, other)
        salted, shared = cached(ALICE, cache_salt="ours"), cached(BOB, cache_salt="ours")
        assert salted == 0 and shared > 0, (salted, shared)
        return f"0 of the other key's tokens cached; {shared} with one cache_salt"


def burst():
    with Server() as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(128)]
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        began = time.monotonic()
        for client in clients:
            client.sendall(request)
        took = time.monotonic() - began
        statuses = []
        for client in clients:
            client.settimeout(ANSWER_SECONDS)
            statuses.append(client.makefile("rb").readline().split()[1])
            client.close()
        assert statuses == [b"200"] * 128, {status: statuses.count(status) for status in statuses}
        return f"128 of 128 answered; sent within {1000 * took:.1f} ms"


# --- hostile requests --------------------------------------------------------------------------------


def doubling_template():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "models/demo", folder, dirs_exist_ok=True)
        template = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
        (Path(folder) / "chat_template.jinja").write_text(template)
        with Server(arguments=["--model", folder]) as server:
            if server.process.poll() is not None:
                assert server.process.returncode == 78 and "template" in server.logged(), server.logged()[-500:]
                return "refused at the load, exit status 78"
            status, text = server.chat()
            assert status in (400, 500) and "template" in text, (status, text[:300])
            health_within_a_second(server)
            return f"refused at the chat: {json.loads(text)['error']['message'][:80]}"


def large_tools():
    with Server() as server:
        def tool(i, properties):
            names = {f"property_{n}_of_{i}": {"type": "string", "description": "x" * 40} for n in range(properties)}
            schema = {"type": "object", "properties": names, "required": list(names)}
            return {"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}}

        server.answer(tools=[tool(0, 2)], tool_choice="required", max_tokens=200)
        before = server.metric("unicorn_grammars_compiled_total")
        began = time.monotonic()
        status, text = server.chat(tools=[tool(i, 60) for i in range(128)], tool_choice="required")
        took = time.monotonic() - began
        compiled = server.metric("unicorn_grammars_compiled_total") - before
        assert status == 400 and compiled == 0, (status, compiled, text[:300])
        server.answer(tools=[tool(0, 2)], tool_choice="required", max_tokens=200)
        assert server.metric("unicorn_grammars_compiled_total") == before, "an earlier grammar was evicted"
        return f"refused in {1000 * took:.0f} ms, 0 grammars compiled"


# --- systemd --------------------------------------------------------------------------------------------


def watched_while_idle():
    """systemd stops a service that sends no watchdog message in time."""
    within, idle = 10, 60
    with tempfile.TemporaryDirectory(prefix="unicorn-notify-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{folder}/notify")
        environment = {"NOTIFY_SOCKET": f"{folder}/notify", "WATCHDOG_USEC": str(within * 1_000_000)}
        with Server(environment=environment) as server:
            systemd.settimeout(START_SECONDS)
            while "READY=1" not in systemd.recv(4096).decode().splitlines():
                pass
            steps = server.metric("unicorn_steps_total")
            systemd.settimeout(within)
            began, signs = time.monotonic(), 0
            while time.monotonic() - began < idle:
                signs += "WATCHDOG=1" in systemd.recv(4096).decode().splitlines()  # a timeout means a missing message
            assert server.metric("unicorn_steps_total") == steps, "it was not idle"
            assert server.end(30) == 0, server.process.returncode
        return f"{signs} signs of life in {idle} idle seconds, none more than {within} s after the previous one"


# --- limits of the configuration --------------------------------------------------------------------------


def bounds_of_the_configuration():
    """Options whose effect is a time, or needs more requests than a test sends."""
    options = "head_timeout_s = 1\nidle_timeout_s = 1\nqueue = 1\nrequests_per_client = 4096\nshutdown_grace_s = 0\n"

    def closed_within(server, sent, seconds):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
            client.settimeout(seconds)
            while client.recv(4096):
                pass  # an answer, then the end of the connection

    with Server(options) as server:
        closed_within(server, b"GET /live HTTP/1.1\r\nHost: x\r\n", 5)  # an incomplete head; the default limit is 10 s
        closed_within(server, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", 5)  # an idle connection after an answer; the default limit is 75 s
        with ThreadPoolExecutor(96) as pool:
            fields = {"max_tokens": 200, "ignore_eos": True}
            statuses = list(pool.map(lambda i: server.chat(f"Tell me story {i}", **fields)[0], range(96)))
        refused = statuses.count(429)
        assert refused > 0 and statuses.count(200) + refused == 96, statuses
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.chat, "Tell me a story", max_tokens=2000, ignore_eos=True)
            while server.metric("unicorn_num_requests_running") == 0:
                time.sleep(0.05)
            assert server.end(10) == 0, server.process.returncode  # an answer of 2000 tokens takes longer
            answer.exception(ANSWER_SECONDS)
        return f"closed within 5 s twice, {refused} of 96 refused, exited during an answer"


# --- progress on a terminal ------------------------------------------------------------------------------


def interrupted_on_a_terminal():
    """Ctrl-C erases the progress bar, and a message says that the same command resumes the work."""
    with tempfile.TemporaryDirectory() as folder:
        command = [LAB, "synth", "--shape", "gemma-3-1b", "--scheme", "bf16", f"{folder}/model"]
        for _ in range(2):
            terminal, end = pty.openpty()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=end)
            os.close(end)
            text, deadline = b"", time.monotonic() + 60
            while b" left" not in text:
                assert time.monotonic() < deadline, text[-300:]
                text += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            try:
                while more := os.read(terminal, 4096):
                    text += more
            except OSError:
                pass  # the other end is closed
            os.close(terminal)
            assert process.wait(10) == -signal.SIGINT, process.returncode
            assert b"0 B/0 B" not in text, text[:300]
            last = text[text.rindex(b"\x1b[2K"):]
            assert b"to continue where it stopped" in last and b"B/s" not in last, text[-300:]
        return "erased twice, with a message about how to resume"


def kept_on_disk(server):
    return json.loads(server.send("GET", "/status")[1])["kv_disk"]


def conversations_on_a_killed_server(kills=50):
    words = [f"word{i}" for i in range(90)]
    texts = [" ".join(words[i:] + words[:i]) for i in range(0, 80, 20)]
    with Server() as server:
        expected = [text_of(server.answer(text, max_tokens=20)) for text in texts]
    rng = random.Random(5)
    with tempfile.TemporaryDirectory(prefix="unicorn-kv-") as folder:
        disk = {"UNICORN_KV_DISK_PATH": str(Path(folder) / "kv")}
        damaged = hits = 0
        for _ in range(kills):
            with Server(environment=disk) as server, ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(server.answer, text, max_tokens=20) for text in texts]
                rng.shuffle(answers)
                assert text_of(answers[0].result()) in expected
                time.sleep(rng.random() * 0.1)
                kept = kept_on_disk(server)
                damaged, hits = damaged + kept["damaged_entries"], hits + kept["hits"]
                server.process.kill()
        with Server(environment=disk) as server:
            assert [text_of(server.answer(text, max_tokens=20)) for text in texts] == expected
            damaged += kept_on_disk(server)["damaged_entries"]
        assert damaged == 0 and hits > kills, (damaged, hits)
        return f"{kills} times killed: no damaged entry, {hits} answers began with tokens from the disk"


def conversations_on_a_full_disk():
    def texts(client):
        return [f"Client {client} asks {i}: " + " ".join(f"word{(client * 31 + i * 7 + k) % 97}" for k in range(120)) for i in range(4)]

    def ask(server, client):
        return [text_of(server.answer(text, max_tokens=20)) for text in texts(client)]

    with Server() as server, ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(ask, [server] * 8, range(8)))
    with tempfile.TemporaryDirectory(prefix="unicorn-kv-") as folder:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", folder], check=True, capture_output=True)
        except (subprocess.CalledProcessError, FileNotFoundError):
            return "not run: it mounts a file system, which needs root"
        try:
            with Server(environment={"UNICORN_KV_DISK_PATH": str(Path(folder) / "kv")}) as server, ThreadPoolExecutor(8) as pool:
                # Others take all of the disk while the server writes.
                with open(Path(folder) / "foreign", "wb", buffering=0) as foreign:
                    with contextlib.suppress(OSError):
                        while True:
                            foreign.write(bytes(1 << 16))
                    answers = list(pool.map(ask, [server] * 8, range(8)))
                    kept = kept_on_disk(server)
                assert answers == expected, "other answers than without a disk"
                assert kept["write_errors"] > 0 and "No space" in kept["error"], kept
                assert "are not kept" in server.logged(), "no line in the log"
            return f"{kept['write_errors']} refused writes, {kept['lost_entries']} entries not kept, 32 of 32 answers the same"
        finally:
            subprocess.run(["umount", folder], check=True)


EDGES = [
    conversations_on_a_killed_server, conversations_on_a_full_disk,
    log_reader_gone, log_pipe_full, sighup_without_tls, dribbling_bodies, key_rotation, two_keys_and_one_text, burst,
    doubling_template, large_tools, watched_while_idle, bounds_of_the_configuration, interrupted_on_a_terminal, *FAULT_EDGES,
]


def main(names):
    edges = {edge.__name__: edge for edge in EDGES}
    if names == ["faults"]:
        names = [edge.__name__ for edge in FAULT_EDGES]
    unknown = [name for name in names if name not in edges]
    if unknown:
        sys.exit(f"edges: no edge {unknown[0]!r}; there are {', '.join(edges)}")
    if not BINARY.exists():
        sys.exit(f"edges: {BINARY} does not exist: `make edges` builds it")
    failed = 0
    for name in names or edges:
        try:
            said = edges[name]()
            print(f"ok      {name.replace('_', ' ')}: {said}", flush=True)
        except (AssertionError, OSError, http.client.HTTPException, KeyError, ValueError, StopIteration) as error:
            failed += 1
            print(f"FAILED  {name.replace('_', ' ')}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(names or edges) - failed} of {len(names or edges)} edge cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

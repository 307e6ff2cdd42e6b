"""Edge cases: a failing device, killed processes, and a machine without free files or disk space.

A Vulkan layer (`tests/fault_layer`) makes calls of the driver fail, so the shipped binary is tested. If a device is
lost and recovers, eight streams are running, and their texts must equal those of a run without the fault. Afterwards,
the memory of both processes, and of the device if the kernel reports it, is compared with the memory before.
"""

import hashlib
import http.client
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from edge_server import (
    ANSWER_SECONDS, BINARY, ROOT, Server, children, health_within_a_second, is_running, loses_its_log_and_nothing_else,
    open_files, resident, text_of, with_faults,
)

STREAMS = 8
TOKENS = 60
# The largest accepted growth of memory after a recovery.
MEMORY_SHARE = 0.02
KILLS = 50
HANG_SECONDS = 8
STOPPED_SECONDS = HANG_SECONDS + 3
DEVICE_EXIT, WRONG_EXIT = 75, 76


@contextmanager
def faulty_server(options="", arguments=(), environment=None):
    """A server, and a function that starts faults of its Vulkan calls (see the head of the layer's source)."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "faults"
        faults.write_text("")
        layer = {**with_faults(faults), "UNICORN_HARDWARE_HANG_TIMEOUT_S": str(HANG_SECONDS)}

        def arm(text):
            partial = faults.with_suffix(".partial")
            partial.write_text(text)
            partial.rename(faults)

        with Server(options, arguments=arguments, environment={**layer, **(environment or {})}) as server:
            yield server, arm


def stream(server, i, tokens=TOKENS):
    """The text of streamed answer number `i`, and its longest pause in seconds."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me a story about the number {i}."}], "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "seed": i, "temperature": (i % 2) * 0.9,
    }
    text, longest, last = "", 0.0, time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()[:300]
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    finally:
        connection.close()
    return text, longest


def streams(server):
    """The texts of all streams, which run concurrently, and the longest pause in any of them."""
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(lambda i: stream(server, i), range(STREAMS)))
    return [text for text, _ in answers], max(pause for _, pause in answers)


def expected_texts(server):
    """The texts of all streams of a server that has computed them before, so that its memory has settled."""
    streams(server)
    return streams(server)[0]


def device_process(server):
    """The only child process of the server. On a busy machine, the previous process takes seconds to exit, because it
    waits for Mesa's low-priority threads."""
    deadline = time.monotonic() + 30
    while len(found := children(server.process.pid)) != 1:
        assert time.monotonic() < deadline, f"device processes: {found}"
        time.sleep(0.05)
    return found[0]


def memory(server):
    """Bytes of memory of the server and its device process, and of device memory if the kernel reports it. With
    software Vulkan, device memory is part of the process."""
    now = json.loads(server.send("GET", "/status")[1])["memory"]
    driver = (now["vram_bytes"] or 0) + (now["gtt_bytes"] or 0)
    processes = {"server": resident(server.process.pid), "device process": resident(device_process(server))}
    return {**processes, **({"device": driver} if driver else {})}


def compare(before, after):
    """A description of the change of memory. Fails if memory grew by more than the accepted share."""
    said = []
    for name, bytes_before in before.items():
        change = after[name] / bytes_before - 1
        said.append(f"{name} {bytes_before >> 20} MiB {100 * change:+.1f} %")
        # Memory may shrink by more: a new process has not compiled shaders yet.
        assert change < MEMORY_SHARE, f"memory of the {name}: {bytes_before} bytes before, {after[name]} after"
    return ", ".join(said)


def settled_files(server):
    """The number of open files of the server, after the connections of clients that left are closed."""
    files, since = open_files(server.process.pid), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.05)
        if (now := open_files(server.process.pid)) != files:
            files, since = now, time.monotonic()
    return files


def wait_for_files(server, files):
    """Waits until the server has as many open files as before. Connections take a moment to close."""
    deadline = time.monotonic() + 10
    while open_files(server.process.pid) != files:
        assert time.monotonic() < deadline, f"{files} files before, {open_files(server.process.pid)} after"
        time.sleep(0.05)


def loses(fault, why, options="", arguments=(), meanwhile=lambda server: None, environment=None):
    """Runs eight streams on a server whose device fails with `fault`. Their texts must equal those of a run without
    it."""
    with faulty_server(options, arguments, environment) as (server, arm):
        expected = expected_texts(server)
        files, before = settled_files(server), memory(server)
        first = device_process(server)
        arm(fault)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(streams, server)
            meanwhile(server)
            texts, pause = running.result()
        assert why in server.logged(), f"the log does not say {why!r}: {server.logged()[-800:]}"
        assert device_process(server) != first, "the device process was not replaced"
        differ = [i for i in range(STREAMS) if texts[i] != expected[i]]
        assert not differ, f"{differ} differ: {texts[differ[0]]!r}, and without the fault {expected[differ[0]]!r}"
        assert streams(server)[0] == expected, "texts after the fault differ"
        health_within_a_second(server)
        assert server.metric("unicorn_device_losses_total") == 1
        assert 1 <= server.metric("unicorn_num_replays_total") <= STREAMS
        changed = compare(before, memory(server))
        wait_for_files(server, files)
        assert server.end(30) == 0, server.process.returncode
        return f"8 of 8 texts are the same, the longest pause was {pause:.1f} s; memory: {changed}"


def lost_at_50():
    return loses("submit:50=DEVICE_LOST", "the GPU was lost")


def segv_at_50():
    return loses("submit:50=SEGV", "was ended by SIGSEGV")


def hang_at_50():
    seen = []

    def watch(server):
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and not seen:
            status, text = server.send("GET", "/health")
            if status == 503 and json.loads(text)["status"] == "recovering":
                seen.append(time.monotonic())
            time.sleep(0.01)

    said = loses("submit:50=HANG", "the GPU hangs", meanwhile=watch)
    assert seen, "/health did not say recovering within 15 s"
    return said


def hang_and_sigterm():
    grace = 2
    with faulty_server(f"shutdown_grace_s = {grace}\n") as (server, arm):
        streams(server)
        arm("submit:50+=HANG")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: server.chat(max_tokens=400, ignore_eos=True))
            while "HANG" not in server.logged():
                time.sleep(0.01)
            began = time.monotonic()
            server.end(grace + 5)
            took = time.monotonic() - began
            status, text = running.result()
        assert status == 503, (status, text[:300])
        return f"ended {took:.1f} s after SIGTERM, with {grace} s of grace; the request got 503"


def lost_twice(term_after=False):
    with faulty_server() as (server, arm):
        streams(server)
        with ThreadPoolExecutor(STREAMS) as pool:
            def long(i):
                return server.chat(f"Tell me a story about {i}", max_tokens=2000, ignore_eos=True, stream=i % 2 == 0)

            running = [pool.submit(long, i) for i in range(STREAMS)]
            time.sleep(0.5)
            arm("submit:50=DEVICE_LOST")
            while server.metric("unicorn_recovery_seconds_total") == 0:
                time.sleep(0.05)
            # By then, all requests that ran alone have caught up.
            tokens = server.metric("unicorn_generation_tokens_total")
            while server.metric("unicorn_generation_tokens_total") < tokens + 100:
                time.sleep(0.05)
            arm("submit:60=DEVICE_LOST")
            began = time.monotonic()
            answers = [future.result() for future in running]
        if term_after and server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        status = server.end(10, None)
        took = time.monotonic() - began
        for i, (code, text) in enumerate(answers):
            assert "engine_lost" in text and code == (200 if i % 2 == 0 else 503), (code, text[-300:])
        assert status == DEVICE_EXIT, f"exit status {status}: {server.logged()[-500:]}"
        return f"8 answers end with an error, exit status 75, {took:.1f} s after the second loss"


def lost_twice_then_sigterm():
    return lost_twice(term_after=True)


def oom_at_50():
    with faulty_server() as (server, arm):
        expected = expected_texts(server)
        before, first = memory(server), device_process(server)
        arm("submit:50=OUT_OF_DEVICE_MEMORY")
        assert streams(server)[0] == expected, "the texts differ"
        counted = server.metric("unicorn_gpu_memory_shortages_total")
        assert counted == 1 and device_process(server) == first, counted
        assert server.metric("unicorn_device_losses_total") == 0
        health_within_a_second(server)
        changed = compare(before, memory(server))
        assert server.end(30) == 0, server.process.returncode
        return f"8 of 8 texts are the same, 1 shortage counted, nothing ended; memory: {changed}"


def wrong_at_start():
    """A device that computes nothing from the first submit."""
    with faulty_server(environment={"FAULT_LAYER": "submit:1+=DROPPED"}) as (server, _):
        status = server.end(ANSWER_SECONDS, None)
        error = server.logged().splitlines()[-1]
        assert status == WRONG_EXIT and "computes wrong: kernel " in error, (status, error)
        return f"refuses to serve, exit status {status}: {error[:120]}"


def wrong_while_serving():
    """A device that stops computing later. The probe of /health detects it."""
    with faulty_server() as (server, arm):
        expected = expected_texts(server)
        before, first = memory(server), device_process(server)
        time.sleep(6)  # for five seconds, /health accepts the last step as a sign of life
        arm("submit:1=DROPPED")
        deadline = time.monotonic() + 30
        seen = set()
        while (health := server.send("GET", "/health"))[0] != 200 or "recovering" not in seen:
            seen.add(json.loads(health[1])["status"])
            assert time.monotonic() < deadline, f"/health said {seen}"
            time.sleep(0.01)
        assert "computes wrong: kernel " in server.logged(), server.logged()[-500:]
        assert device_process(server) != first, "the device process was not replaced"
        assert streams(server)[0] == expected, "texts after the fault differ"
        changed = compare(before, memory(server))
        assert server.end(30) == 0, server.process.returncode
        return f"/health said {', '.join(sorted(seen))}; 8 of 8 texts are the same after it; memory: {changed}"


def poison():
    with faulty_server() as (server, arm):
        expected = expected_texts(server)
        before = memory(server)
        messages = [{"role": "user", "content": "Zebras quiz xylophones"}]

        def ids(messages):
            return json.loads(server.send("POST", "/tokenize", {"messages": messages})[1])["tokens"]

        others = set(ids([{"role": "user", "content": "Tell me a story about the number 1."}]))
        own = ids(messages)
        own = own[next(i for i, token in enumerate(own) if token not in others):][:4]
        arm(f"submit:words:{'.'.join(map(str, own))}=DEVICE_LOST")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(streams, server)
            time.sleep(0.2)
            status, text = server.chat(messages[0]["content"])
            texts, pause = running.result()
        assert status == 500 and json.loads(text)["error"]["code"] == "lost_twice", (status, text[:300])
        assert texts == expected, "the others' texts differ"
        losses = server.metric("unicorn_device_losses_total")
        assert losses == 2, losses
        assert streams(server)[0] == expected
        changed = compare(before, memory(server))
        assert server.end(30) == 0, server.process.returncode
        return f"500 for the one, 8 of 8 other texts are the same after {pause:.1f} s at most; memory: {changed}"


def lost_and_model_deleted():
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "demo"
        shutil.copytree(ROOT / "models/demo", model)
        said = loses("submit:50=DEVICE_LOST", "the GPU was lost", arguments=["--model", str(model)], meanwhile=lambda _: shutil.rmtree(model))
        assert not model.exists()
        return said


def stand_still(server):
    """Stops both processes for longer than the hang timeout of the device."""
    both = [server.process.pid, device_process(server)]
    for process in both:
        os.kill(process, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    for process in reversed(both):
        os.kill(process, signal.SIGCONT)


def suspend():
    """Both processes stop and continue much later with a lost device, as after the suspend of a notebook."""
    return loses("submit:50=DEVICE_LOST", "the GPU was lost", meanwhile=stand_still)


def stopped_without_a_loss():
    """A device that works when both processes continue is not blamed for the time while they were stopped."""
    with faulty_server() as (server, _):
        expected = expected_texts(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(streams, server)
            time.sleep(0.3)
            stand_still(server)
            assert running.result()[0] == expected
        assert server.metric("unicorn_device_losses_total") == 0
        return f"stopped for {STOPPED_SECONDS} s: 8 of 8 texts are the same, no device loss was counted"


def device_process_killed():
    """SIGKILL, as the kernel sends it if memory is short."""
    def kill(server):
        time.sleep(0.5)
        os.kill(device_process(server), signal.SIGKILL)

    return loses("", "was ended by SIGKILL", meanwhile=kill)


def device_process_stopped():
    """A stopped process is replaced long before the hang timeout of a slow device."""
    def stop(server):
        time.sleep(0.5)
        os.kill(device_process(server), signal.SIGSTOP)

    return loses("", "has not run for 10 s", meanwhile=stop, environment={"UNICORN_HARDWARE_HANG_TIMEOUT_S": "600"})


def stopped_amid_the_load():
    """The server exits, and its log names the stage of the load."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Server(stderr=log, arguments=("--model", str(ROOT / "models/demo")), is_awaited=False) as server:
            os.kill(device_process(server), signal.SIGSTOP)
            code = server.process.wait(timeout=60)
        assert code == DEVICE_EXIT, code
        assert "has not run for 10 s" in log.read_text().splitlines()[-1], log.read_text()
        return log.read_text().splitlines()[-1]


def files_run_out():
    """The maximum number of clients, and as many that must wait, while the device is lost."""
    connections = 32
    with faulty_server(f"connections = {connections}\n") as (server, arm):
        expected = expected_texts(server)
        files = settled_files(server)
        arm("submit:50=DEVICE_LOST")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(streams, server)
            time.sleep(0.2)
            idle = []
            for _ in range(3 * connections):
                client = socket.socket()
                client.settimeout(1)
                try:
                    client.connect(("127.0.0.1", server.port))
                except OSError:
                    pass  # the queue of the port is full
                idle.append(client)
            texts, pause = running.result()
            for client in idle:
                client.close()
        assert texts == expected, "the texts differ"
        wait_for_files(server, files)
        health_within_a_second(server)
        return f"8 of 8 texts are the same with {len(idle)} idle clients, after {pause:.1f} s at most; {files} files open before and after"


def disk_full():
    """The log and the cache of compiled shaders are on a full disk."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        # A separate file system, which is full. Mesa's own cache is elsewhere.
        fill = f'mount -t tmpfs -o size=16k none {cache} && head -c 16384 /dev/zero > {cache}/filler && exec "$@"'
        full = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", fill, "sh"]
        with Server(environment={"UNICORN_CACHE_DIR": str(cache)}, stderr="/dev/full", wrapper=full) as server:
            lost = loses_its_log_and_nothing_else(server, 4)
        return f"4 of 4 answers, {lost:.0f} lines of the log lost and counted"


# --- kill -9 ------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository slowly, with the interface of the hub."""
    protocol_version = "HTTP/1.1"
    files, commit = {}, "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path.rpartition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/"):
            files = [
                {"rfilename": name, "size": len(data), "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}}
                for name, data in self.files.items()
            ]
            return self.answer(200, json.dumps({"sha": self.commit, "siblings": files}).encode())
        if name not in self.files:
            return self.answer(404, b"")
        data = self.files[name]
        begin = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("content-length", str(len(data) - begin))
        if begin:
            self.send_header("content-range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        try:
            for at in range(begin, len(data), 1 << 18):
                self.wfile.write(data[at:at + (1 << 18)])
                time.sleep(0.02)
        except OSError:
            pass  # the client was killed

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            pass  # the client was killed


def killed(command, environment, most_seconds, dice):
    """Runs a command and kills it after a random time. Returns whether it had exited before."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(dice.uniform(0, most_seconds))
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def names_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def killed_and_whole(command, environment, folder, dice):
    """Kills a command repeatedly in one folder until it exits before the kill. Then the folder must have the same names
    as after one undisturbed run. Returns the number of kills."""
    def run():
        done = subprocess.run(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-500:]

    began = time.monotonic()
    run()
    took, whole = time.monotonic() - began, names_below(folder)
    kills = 0
    while kills < KILLS:
        shutil.rmtree(folder)
        ended = False
        while kills < KILLS and not (ended := killed(command, environment, took, dice)):
            kills += 1
        if not ended:
            run()
        assert names_below(folder) == whole, f"after {kills} kills there is {set(names_below(folder)) ^ set(whole)}"
    return kills


def kill9():
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return f"seed {seed}: {kill_pulls(Path(folder), dice)}, {kill_conversions(Path(folder), dice)}, {kill_servers(Path(folder), dice)}"
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from None


def kill_pulls(folder, dice):
    Hub.files = {path.name: path.read_bytes() for path in (ROOT / "models/demo").iterdir() if path.suffix in (".json", ".safetensors")}
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    cache = folder / "hub"
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_CACHE": str(cache)}
    kills = killed_and_whole([BINARY, "pull", "org/demo"], environment, cache, dice)
    hub.shutdown()
    blobs = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in cache.glob("models--*/blobs/*")}
    assert blobs and all(name == checksum for name, checksum in blobs.items()), blobs
    return f"{kills} pulls killed, the last one complete"


def kill_conversions(folder, dice):
    result = folder / "converted"
    kills = killed_and_whole([BINARY, "quantize", str(ROOT / "models/demo"), str(result), "--scheme", "int4-g32"], {}, result, dice)
    return f"{kills} conversions"


def kill_servers(folder, dice):
    cache = folder / "cache"
    expected, files = None, None
    for kills in range(KILLS + 1):
        with Server(environment={"UNICORN_CACHE_DIR": str(cache)}) as server:
            answer = text_of(server.answer())
            expected = expected or answer
            assert answer == expected, answer
            child = device_process(server)
            there = names_below(cache)
            files = files or there
            assert there == files, f"after {kills} kills the cache has {set(there) ^ set(files)}"
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(lambda: server.chat(max_tokens=400, ignore_eos=True))
                time.sleep(dice.uniform(0, 0.3))
                server.process.kill()
                server.process.wait()
                try:
                    running.result()
                except (OSError, http.client.HTTPException):
                    pass  # the server is gone
        deadline = time.monotonic() + 30
        while is_running(child):
            assert time.monotonic() < deadline, f"the device process {child} outlived its server"
            time.sleep(0.02)
        # At another time, perhaps during the load.
        command = [BINARY, "serve", "--allow-software-vulkan", "--port", str(server.port)]
        killed(command, {"UNICORN_CACHE_DIR": str(cache)}, 0.5, dice)
    return f"{2 * kills} servers"


FAULT_EDGES = [
    lost_at_50, segv_at_50, hang_at_50, hang_and_sigterm, lost_twice, lost_twice_then_sigterm, oom_at_50, wrong_at_start,
    wrong_while_serving, poison, lost_and_model_deleted, suspend, stopped_without_a_loss, device_process_killed,
    device_process_stopped, stopped_amid_the_load, files_run_out, disk_full, kill9,
]

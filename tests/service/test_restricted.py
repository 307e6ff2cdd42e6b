"""The server under the restrictions of its systemd unit that restricted.py can apply on this machine, without systemd.

Prints what is left out, with the reason, and a skip for each restriction that this machine refuses. `make test-service` has
systemd apply all of them. The binary is target/debug/unicorn, or $UNICORN_BINARY.
"""

import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
from restricted import NO_RESTRICTION, lines_of
from server import ANSWER_SECONDS, BINARY, ROOT, START_SECONDS, children, free_port, get, last_line, post
from session import Report

UNIT = ROOT / "config/unicorn.service"
RESTRICTED = [sys.executable, str(Path(__file__).with_name("restricted.py"))]
END_SECONDS = 30
FILTERS = {"RestrictAddressFamilies", "LockPersonality", "RestrictRealtime", "RestrictNamespaces", "SystemCallArchitectures"}
# A restriction, and the line of /proc/PID/status that shows it.
STATUS = {
    "NoNewPrivileges": r"NoNewPrivs:\s1", "CapabilityBoundingSet": r"CapBnd:\s0+", "AmbientCapabilities": r"CapAmb:\s0+",
    "User": r"Uid:(\s[1-9]\d*){4}", "Group": r"Gid:(\s[1-9]\d*){4}", "UMask": r"Umask:\s0077", **dict.fromkeys(FILTERS, r"Seccomp:\s2"),
}
LIMITS = {
    "LimitMEMLOCK": r"Max locked memory +unlimited +unlimited", "LimitCORE": r"Max core file size +0 +0",
    "LimitNOFILE": r"Max open files +65536 +65536",
}
# A restriction, and what shows it in /proc/PID/mountinfo: a place, and an option of the last mount there.
MOUNTS = {
    "ProtectSystem": ("/", "ro"), "PrivateTmp": ("/tmp", "rw"), "ProtectKernelTunables": ("/proc/sys", "ro"),
    "StateDirectory": ("/var/lib/unicorn", "rw"), "CacheDirectory": ("/var/cache/unicorn", "rw"),
}


def restricted(folder, unit=UNIT, command=()):
    """What restricted.py reports, and how it ended."""
    report = folder / "report.json"
    done = subprocess.run([*RESTRICTED, unit, report, *command], capture_output=True, text=True, check=False, timeout=START_SECONDS)
    return done, json.loads(report.read_text() or "{}") if report.exists() else {}


class Hub:
    """A hub with one small model, org/tiny."""

    FILES = [
        *(ROOT / "tests/data/gemma3/tiny-a" / name for name in ["config.json", "generation_config.json", "model.safetensors"]),
        *(ROOT / "tests/data/tokenizer-mini" / name for name in ["tokenizer.json", "tokenizer_config.json"]),
    ]
    COMMIT = "0123456789abcdef" * 2 + "01234567"

    def __init__(self):
        files = {path.name: path.read_bytes() for path in self.FILES}
        blobs = {name: hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest() for name, data in files.items()}
        siblings = [{"rfilename": name, "size": len(data), "blobId": blobs[name]} for name, data in files.items()]
        listing = json.dumps({"id": "org/tiny", "sha": self.COMMIT, "gated": False, "siblings": siblings}).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition(f"/org/tiny/resolve/{Hub.COMMIT}/")[2]
                if self.path.startswith("/api/models/org/tiny/revision/main"):
                    status, body, etag = 200, listing, "listing"
                elif name in files:
                    status, body, etag = 200, files[name], blobs[name]
                else:
                    status, body, etag = 404, b"{}", "none"
                self.send_response(status)
                self.send_header("etag", f'"{etag}"')
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def clean_environment():
    """The environment without options of the server, and without proxies, so that it finds a hub on this machine."""
    is_other = lambda name: not name.startswith(("UNICORN_", "RUST_LOG", "HF_")) and not name.upper().endswith("_PROXY")
    return {name: value for name, value in os.environ.items() if is_other(name)}


class Restricted:
    """A server under what of the unit can be applied."""

    def __init__(self, folder, **options):
        self.port, self.report, self.log = free_port(), folder / "served.json", folder / "log"
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*RESTRICTED, UNIT, self.report, BINARY, "serve", "--allow-software-vulkan", "--port", str(self.port)]
        with open(self.log, "wb") as log:
            # The folder for compiled shaders is new and empty, and a busy machine compiles slowly.
            patient = {"UNICORN_HARDWARE_HANG_TIMEOUT_S": str(START_SECONDS), "UNICORN_CONFIG_DIR": "/proc/nonexistent"}
            self.process = subprocess.Popen(command, env={**clean_environment(), **patient, **options}, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=subprocess.STDOUT)

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with status {self.process.returncode}: {last_line(self.log.read_text())}")
            try:
                if get(self.url + "/health")[0] == 200:
                    return
            except (urllib.error.URLError, OSError):
                pass  # not bound yet
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_SECONDS} s: {last_line(self.log.read_text())}")

    def answers(self):
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        status, answer = post(self.url + "/v1/chat/completions", question)
        assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"], answer

    def pulls_a_model_into_its_own_folder(self):
        """`unicorn pull` of a user asks the server, which downloads, and answers without a restart."""
        with tempfile.TemporaryDirectory() as home:
            command = [BINARY, "pull", "org/tiny", "--url", self.url]
            environment = {**clean_environment(), "HOME": home, "UNICORN_CONFIG_DIR": "/proc/nonexistent"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
            assert done.returncode == 0 and "org/tiny is served at" in done.stderr, done.stderr
            assert not any(Path(home).rglob("*.safetensors")), "the user's own folder is empty"
        # The private folder of the service, as its process sees it.
        place = Path(f"/proc/{self.process.pid}/root", "var/lib/unicorn/models/models--org--tiny")
        files = [file for file in place.rglob("*") if file.is_file() and not file.is_symlink()]
        assert len(files) >= len(Hub.FILES), files
        seen = {file.name: (file.stat().st_uid != 0, oct(file.stat().st_mode & 0o777)) for file in files}
        # The service owns them, and every user may read them, whatever its umask is.
        assert set(seen.values()) == {(True, "0o644")}, seen
        question = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        status, answer = post(self.url + "/v1/chat/completions", question)
        assert status == 200 and answer["model"] == "org/tiny", answer

    def shows_each_restriction_in_both_processes(self):
        applied = json.loads(self.report.read_text())["applied"]
        (device_process,) = children(self.process.pid)
        for process in (self.process.pid, device_process):
            folder = Path(f"/proc/{process}")
            text = {name: (folder / name).read_text() for name in ("status", "limits", "mountinfo")}
            for name in applied:
                for file, shown in ("status", STATUS), ("limits", LIMITS):
                    assert name not in shown or re.search(f"^{shown[name]}\\s", text[file], re.MULTILINE), (process, name, text[file])
                if name in MOUNTS:
                    place, option = MOUNTS[name]
                    options = [line.split()[5].split(",") for line in text["mountinfo"].splitlines() if line.split()[4] == place]
                    assert options and option in options[-1], (process, name, options)

    def ends(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(END_SECONDS) == 0, last_line(self.log.read_text())

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def each_line_is_applied_and_holds_or_is_listed(folder, found):
    """Puts the report into `found`."""
    done, report = restricted(folder)
    assert done.returncode == 0, done.stderr
    found.update(report)
    print(f"applied: {', '.join(report['applied'])}")
    named = [*report["applied"], *report["left_out"], *report["lacking"]]
    assert sorted(named) == sorted(lines_of(UNIT).keys() - NO_RESTRICTION), named
    broken = set(report["applied"]) - set(report["held"])
    assert not broken, f"applied, and do not hold: {broken}"
    assert {"NoNewPrivileges", "LimitCORE", "UMask"} <= set(report["applied"]), report


def a_new_line_and_a_new_value_are_errors(folder):
    for line, why in [("PrivateNetwork=yes", "neither applies nor lists PrivateNetwork"), ("ProtectSystem=full", "'full'")]:
        unit = folder / "unit"
        unit.write_text(UNIT.read_text().replace("[Install]", f"{line}\n[Install]"))
        done, _ = restricted(folder, unit)
        assert done.returncode != 0 and why in done.stderr, (line, done.stderr)


def main():
    report, found = Report("service"), {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        report.attempt("a_new_line_and_a_new_value_are_errors", lambda: a_new_line_and_a_new_value_are_errors(folder))
        report.attempt("each_line_is_applied_and_holds_or_is_listed", lambda: each_line_is_applied_and_holds_or_is_listed(folder, found))
        server = Restricted(folder)
        try:
            if report.attempt("the_server_starts_under_them", server.wait):
                report.attempt("it_answers", server.answers)
                report.attempt("both_processes_show_them", server.shows_each_restriction_in_both_processes)
                report.attempt("sigterm_ends_it", server.ends)
        finally:
            server.kill()
        # Without the service's own folder, which is then skipped below, there is nothing to pull into.
        if "StateDirectory" in found.get("applied", []):
            hub = Hub()
            pulls = {"UNICORN_MODELS_PULLED": "true", "UNICORN_MODELS_DIR": "/var/lib/unicorn/models", "HF_ENDPOINT": hub.url}
            server = Restricted(folder, **pulls)
            try:
                if report.attempt("a_service_of_pulled_models_starts", server.wait):
                    report.attempt("a_model_is_pulled_into_its_folder", server.pulls_a_model_into_its_own_folder)
                    report.attempt("sigterm_ends_it_too", server.ends)
            finally:
                server.kill()
                hub.close()
    for name, why in found.get("left_out", {}).items():
        print(f"left out: {name}: {why}")
    for name, why in found.get("lacking", {}).items():
        report.skip("unit-restrictions", f"{name} ({why})")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())

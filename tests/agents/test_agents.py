#!/usr/bin/env python3
"""Coding agents at a terminal, with a real `unicorn serve`: Codex and Claude Code run a command that the model calls for.

The model is that of tests/clients/scripted_model.py: it thinks, calls a tool of the agent, and answers after the result. So
these tests see the protocol, and not the ability of a model. tools/test.py installs the agents into .cache/agents, which
takes 700 MB, and sets AGENTS to the folder of their commands. Prints one line per test, and counts them at the end.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))

import scripted_model
from server import ROOT, Server, model_id
from session import Report

LOGS = ROOT / ".cache/test"
AGENTS = Path(os.environ.get("AGENTS", ROOT / ".cache/agents/node_modules/.bin"))
# An agent's own prompt has up to 60,000 tokens of this small vocabulary.
AGENT_SECONDS = 600
MADE, WORDS = "made.txt", "a unicorn was here"
COMMAND = f"echo {WORDS} > {MADE}"
ANSWER = "The file is written, as you asked."
TASK = "Write the file."

CODEX = """
model = "{model}"
model_provider = "unicorn"
[model_providers.unicorn]
name = "unicorn"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def does_its_task(name, tool, arguments, command):
    """Starts a server whose model calls this tool, and the agent in an empty folder. `command(server, home)` returns the
    agent's arguments and environment."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        script = scripted_model.Script(tool=tool, arguments=json.dumps(arguments), answer=ANSWER)
        model = scripted_model.write(folder / "model", script)
        home, work = folder / "home", folder / "work"
        home.mkdir(), work.mkdir()
        server = Server(LOGS / f"agent-{name}.log", "--model", str(model))
        try:
            server.wait()
            given, environment = command(server, home)
            # The agent finds no settings of the person who runs the tests.
            own = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ} | {"HOME": str(home)}
            status, said = run(given, work, {**own, **environment}, LOGS / f"agent-{name}.txt")
            assert status == 0, f"exit status {status}: {said[-600:]}"
            assert ANSWER in said, said[-600:]
            assert (work / MADE).read_text() == WORDS + "\n"
            assert not any(mark in said for mark in scripted_model.MARKS), said
        finally:
            ended = server.stop()
        assert ended == 0, f"the server ended with {ended}"


def run(command, folder, environment, log):
    """The exit status of a command, and what it printed, which is in `log` too. All its processes end with it."""
    with log.open("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            status = process.wait(AGENT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text(errors="replace")


def codex(server, home):
    settings = home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(CODEX.format(model=model_id(server), url=server.url))
    command = [AGENTS / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return command, {"CODEX_HOME": str(settings)}


def claude(server, _):
    command = [AGENTS / "claude", "-p", TASK, "--model", model_id(server), "--allowedTools", "Bash"]
    # Without these, it gives up after five minutes in which the prompt is read.
    patient = {"API_TIMEOUT_MS": "3600000", "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3600000"}
    return command, {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "unused", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **patient}


def main():
    report = Report("agents")
    report.attempt("codex_runs_a_command", lambda: does_its_task("codex", "exec_command", {"cmd": COMMAND}, codex))
    report.attempt("claude_runs_a_command", lambda: does_its_task("claude", "Bash", {"command": COMMAND}, claude))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())

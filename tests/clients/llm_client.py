"""What users of the command `llm` see. test_openai.py runs these tests with its server."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from server import ANSWER_SECONDS, model_id
from session import SCENARIO

llm = importlib.util.find_spec("llm")

FRANCE, WEATHER, LEO = (SCENARIO[name][0]["content"] for name in ("france", "weather", "leo"))
GREEDY = ["-o", "temperature", "0"]
# A typical configuration: one server under several names.
MODELS = """\
- {{model_id: chat, model_name: {id}, api_base: {url}/v1, supports_schema: true, supports_tools: true}}
- {{model_id: text, model_name: {id}, api_base: {url}/v1, completion: true}}
- {{model_id: responses, model_name: {id}, api_base: {url}/v1, responses: true, supports_schema: true}}
- {{model_id: nobody, model_name: gpt-none, api_base: {url}/v1}}
"""
WEATHER_FUNCTION = f'''
def get_weather(city: str) -> str:
    "Get the current weather in a city"
    return {SCENARIO["result"]!r} if city == "Paris" else "unknown"
'''


@contextlib.contextmanager
def home(server):
    """A separate home folder with the configuration. Yields a function that runs the command and returns exit status,
    output, and error output."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(id=model_id(server), url=server.url))

        def run(*arguments):
            done = subprocess.run(
                [sys.executable, "-m", "llm", *arguments], env={**os.environ, "LLM_USER_PATH": folder}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False,
            )
            return done.returncode, done.stdout.strip(), done.stderr

        yield run


def llm_streams_the_same_answer(server):
    with home(server) as run:
        for name in ["chat", "responses"]:
            status, whole, said = run("-m", name, *GREEDY, "--no-stream", "--usage", FRANCE)
            assert status == 0 and "Paris" in whole and "Token usage: " in said, (status, whole, said)
            status, text, said = run("-m", name, *GREEDY, "--usage", FRANCE)
            assert (status, text) == (0, whole) and "Token usage: " in said, (status, text, said)
            status, text, _ = run("--continue", *GREEDY, "What is the capital of Italy?")
            assert status == 0 and "Rome" in text, (status, text)


def llm_calls_a_tool_and_reads_its_result(server):
    with home(server) as run:
        for how in [[], ["--no-stream"]]:
            status, text, said = run("-m", "chat", *GREEDY, *how, "--functions", WEATHER_FUNCTION, "--tools-debug", WEATHER)
            assert status == 0 and SCENARIO["result"] in text, (status, text, said)
            assert "get_weather({'city': 'Paris'})" in said, said


def llm_answers_by_a_schema(server):
    with home(server) as run:
        for name in ["chat", "responses"]:
            status, text, said = run("-m", name, *GREEDY, "--schema", json.dumps(SCENARIO["person"]), LEO)
            assert status == 0 and json.loads(text) == SCENARIO["answer"], (status, text, said)


def llm_continues_a_text(server):
    with home(server) as run:
        status, text, said = run("-m", "text", *GREEDY, "-o", "max_tokens", "8", "The capital of France")
        assert status == 0 and text, (status, text, said)


def llm_shows_errors_of_the_server(server):
    with home(server) as run:
        for arguments, wanted in [
            (["-m", "nobody", FRANCE], 'Error code: 404 - the model "gpt-none" does not exist'),
            (["-m", "chat", "-o", "max_tokens", "0", FRANCE], "Error code: 400 - max_tokens: "),
            (["-m", "chat", SCENARIO["too_long"] * 4000], "Error code: 400 - the prompt is too long"),
        ]:
            status, text, said = run(*arguments)
            assert status == 1 and wanted in said and not text, (status, text, said[-300:])


TESTS = [
    llm_streams_the_same_answer, llm_calls_a_tool_and_reads_its_result, llm_answers_by_a_schema, llm_continues_a_text,
    llm_shows_errors_of_the_server,
]

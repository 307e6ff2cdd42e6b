#!/usr/bin/env python3
"""Tests with clients: packages of the registries, a parser of Prometheus's text format, and curl, with a real `unicorn
serve` and the demo model.

tools/test.py starts it with the interpreter of .venv. To run it alone: `.venv/bin/python tests/clients/test_openai.py`
after `cargo build`. Prints one line per test and at the end `clients: N passed, N failed, N skipped`. If the package of
a client is not installed, its tests are skipped and the others run. litellm, LlamaIndex and openai 1 need
the interpreters LITELLM_PYTHON, LLAMA_INDEX_PYTHON and OPENAI_1_PYTHON, which have these packages.
The packages openai and ollama for Node.js need NODE_PATH, their folder. Without these variables, their tests are
skipped.
"""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import anthropic_sdk
import langchain_client
import llm_client
import observers
import ollama_client
import ollama_replays
import picture_clients
import published_schemas
import responses_sdk
import terminal_chat
import thinking_caller
from raised import raised
from server import (
    ANSWER_SECONDS, BINARY, ENVIRONMENT, LAB, ROOT, START_SECONDS, Server, children, free_port, get, is_running,
    last_line, machine_with_power, model_id, post, scrape, send,
)
from session import SCENARIO, Report

try:
    import openai
except ImportError:
    openai = None

LOG = ROOT / ".cache/test/server.log"
# The length of an answer that is cancelled.
WITHOUT_END = 6000


def user(text):
    return [{"role": "user", "content": text}]


FRANCE, WEATHER, TOOLS, PERSON = (SCENARIO[name] for name in ("france", "weather", "tools", "person"))

# Much more than one window of 64 tokens between the statement and the question.
RECALL = user("My locker number is 4821.") + [{"role": "assistant", "content": "Your locker number is 4821."}]
for question, answer in [
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("How many days are in a week?", "There are 7 days in a week."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What color is the sky?", "The sky is blue."),
]:
    RECALL += user(question) + [{"role": "assistant", "content": answer}]
RECALL += user("What is my locker number?")


# --- with the openai package ----------------------------------------------------------------------------


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)


def ask(server, messages, **fields):
    fields = {"max_tokens": 48, "temperature": 0, **fields}
    return sdk(server).chat.completions.create(model=model_id(server), messages=messages, **fields)


def streamed(server, messages, **fields):
    """The chunks of a streamed answer, and their text."""
    chunks = list(ask(server, messages, stream=True, **fields))
    return chunks, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def sdk_embeds(server):
    def embed(**more):
        return sdk(server).embeddings.create(model=model_id(server), **more)

    france = FRANCE[0]["content"]
    texts = [france, "Name a penguin.", france]
    given = embed(input=texts)  # the package requests base64 by default
    assert [item.index for item in given.data] == [0, 1, 2] and given.usage.total_tokens == given.usage.prompt_tokens > 10
    for item, other in zip(given.data, embed(input=texts, encoding_format="float").data):
        assert abs(sum(x * x for x in item.embedding) - 1) < 1e-5
        assert max(abs(a - b) for a, b in zip(item.embedding, other.embedding)) < 1e-6
    first, second, third = (item.embedding for item in given.data)
    assert first == third != second
    error = raised(openai.BadRequestError, lambda: embed(input=france, dimensions=8))
    assert error.param == "dimensions", error.body


def sdk_lists_the_model(server):
    models = list(sdk(server).models.list())
    assert len(models) == 1 and models[0].id, models
    assert sdk(server).models.retrieve(models[0].id).id == models[0].id


def sdk_answers_paris(server):
    answer = ask(server, FRANCE)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content, choice.message.content
    assert choice.message.role == "assistant" and choice.finish_reason == "stop", choice
    usage = answer.usage
    assert usage.prompt_tokens > 5 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def sdk_streams_the_same_answer(server):
    chunks, text = streamed(server, FRANCE)
    assert text == ask(server, FRANCE).choices[0].message.content, text
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop" and not any(reasons[:-1]), reasons


def sdk_stream_has_usage_if_requested(server):
    chunks, _ = streamed(server, FRANCE, stream_options={"include_usage": True})
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0, chunks[-1]
    assert chunks[-1].choices == []


def sdk_stops_at_the_token_limit(server):
    for field in ["max_tokens", "max_completion_tokens"]:
        fields = {"max_tokens": openai.omit, field: 2}
        answer = ask(server, FRANCE, **fields)
        assert answer.usage.completion_tokens == 2, answer.usage
        assert answer.choices[0].finish_reason == "length", answer.choices[0]


def sdk_honours_a_stop_string(server):
    whole = ask(server, FRANCE).choices[0].message.content
    at = whole.index("Paris")
    for stop in ["Paris", ["never said", "Paris"]]:
        cut = ask(server, FRANCE, stop=stop)
        assert cut.choices[0].message.content == whole[:at], cut.choices[0]
        assert cut.choices[0].finish_reason == "stop"
    _, text = streamed(server, FRANCE, stop="Paris")
    assert text == whole[:at], text


def sdk_same_seed_gives_the_same_text(server):
    story = user("Tell me a short story.")
    texts = [ask(server, story, temperature=1.0, seed=seed).choices[0].message.content for seed in [7, 7, 8, 9, 10, 11, 12]]
    assert texts[0] == texts[1], texts[:2]
    assert len(set(texts)) > 1, "six seeds gave one text: the seed has no effect"


def sdk_reports_log_probabilities(server):
    choice = ask(server, FRANCE, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content, tokens
    for token in tokens:  # greedy: the most likely token
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token, token
        assert token.logprob <= 0 and bytes(token.bytes).decode() == token.token, token
    chunks, text = streamed(server, FRANCE, logprobs=True)
    content = [token for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert "".join(token.token for token in content) == text, content
    assert [token.logprob for token in content] == [token.logprob for token in tokens]


def sdk_gives_n_answers(server):
    story = user("Tell me a short story.")
    answer = ask(server, story, temperature=1.0, seed=7, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = [ask(server, story, temperature=1.0, seed=seed).choices[0].message.content for seed in (7, 8, 9)]
    assert [choice.message.content for choice in answer.choices] == alone, alone


def sdk_penalties_and_lengths_have_an_effect(server):
    whole = ask(server, FRANCE).choices[0].message.content
    cold = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert ask(server, FRANCE, **cold, extra_body={"repetition_penalty": 3.0}).choices[0].message.content != whole
    for fields in [{"ignore_eos": True}, {"min_tokens": 48}]:
        assert ask(server, FRANCE, extra_body=fields).usage.completion_tokens == 48, fields


def sdk_recalls_beyond_one_window(server):
    answer = ask(server, RECALL)
    assert answer.usage.prompt_tokens > 2 * 64, answer.usage
    assert "4821" in answer.choices[0].message.content, answer.choices[0].message.content


LEO = user("Return a JSON object that follows this schema:\n" + json.dumps(PERSON) + "\n\nLeo is 34 and has a penguin.")


def sdk_answers_by_a_schema(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    # This also works if the prompt does not mention JSON: the schema alone constrains the answer.
    for messages in [LEO, FRANCE, user("Tell me a short story.")]:
        for temperature in [0, 1.5]:
            choice = ask(server, messages, response_format=wanted, temperature=temperature, seed=5, max_tokens=200).choices[0]
            if choice.finish_reason == "length":  # the schema does not limit strings
                assert choice.message.content.startswith("{"), choice
                continue
            person = json.loads(choice.message.content)
            assert list(person) == PERSON["required"] and isinstance(person["age"], int) and person["age"] >= 0, person
            assert person["pet"] in PERSON["properties"]["pet"]["enum"], person
    _, text = streamed(server, LEO, response_format=wanted)
    assert json.loads(text) == {"name": "Leo", "age": 34, "pet": "penguin"}, text


def sdk_answers_with_a_json_object(server):
    answer = ask(server, user("JSON for David, item hammer"), response_format={"type": "json_object"}, n=2, temperature=0.5, max_tokens=100)
    for choice in answer.choices:
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict), choice


def sdk_parses_into_a_pydantic_model(server):
    import pydantic

    class Person(pydantic.BaseModel):
        """A docstring becomes a description, which is not a constraint."""

        name: str
        age: int
        pet: str | None

    parsed = sdk(server).chat.completions.parse(
        model=model_id(server), messages=LEO, response_format=Person, max_tokens=100, temperature=0
    ).choices[0].message.parsed
    assert isinstance(parsed, Person) and parsed.name == "Leo" and parsed.age == 34, parsed


def sdk_chooses_and_matches(server):
    question = user("Is Paris in France? Answer yes or no.")
    for fields in [{"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"}, {"guided_grammar": 'start: "yes" | "no"'},
                   {"structured_outputs": {"choice": ["yes", "no"]}}]:
        choice = ask(server, question, extra_body=fields).choices[0]
        assert choice.message.content in ("yes", "no") and choice.finish_reason == "stop", (fields, choice)


def sdk_gets_the_name_of_an_unsupported_keyword(server):
    schema = {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
    error = raised(openai.BadRequestError, lambda: ask(server, LEO, response_format={"type": "json_schema", "json_schema": schema}))
    assert error.param == "response_format" and "uniqueItems" in error.message, error.body


def the_call(choice, name, arguments):
    """The only call of an answer, which must have this name and these arguments."""
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == name, call
    assert json.loads(call.function.arguments) == arguments, call
    return call


def sdk_calls_a_tool_and_reads_its_result(server):
    message = ask(server, WEATHER, tools=TOOLS).choices[0]
    call = the_call(message, "get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 912 degrees"}
    answer = ask(server, [*WEATHER, message.message, result], tools=TOOLS).choices[0]
    assert answer.finish_reason == "stop" and "rain, 912 degrees" in answer.message.content, answer
    # And an answer in text again.
    turns = [*WEATHER, message.message, result, answer.message, *FRANCE]
    assert "Paris" in ask(server, turns, tools=TOOLS).choices[0].message.content


def sdk_streams_a_tool_call(server):
    with sdk(server).chat.completions.stream(model=model_id(server), messages=WEATHER, tools=TOOLS, temperature=0, max_tokens=60) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}, choice
    assert kinds.count("tool_calls.function.arguments.delta") > 1 and "tool_calls.function.arguments.done" in kinds, kinds


def sdk_calls_several_tools_in_one_answer(server):
    question = user("What is the weather in Oslo and roll 2 dice with 6 sides.")
    choice = ask(server, question, tools=TOOLS, tool_choice="required", max_tokens=120).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})], calls
    assert len({call.id for call in choice.message.tool_calls}) == 2, choice
    results = [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(choice.message.tool_calls, ["sunny", "7"])]
    # The results may be in any order.
    answer = ask(server, [*question, choice.message, *reversed(results)], tools=TOOLS).choices[0].message.content
    assert answer == "According to get_weather: sunny\nAccording to roll_dice: 7", answer


def sdk_obeys_the_tool_choice(server):
    named = {"type": "function", "function": {"name": "roll_dice"}}
    for seed in range(4):  # for any question and any seed
        for choice in [named, "required"]:
            answer = ask(server, FRANCE, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=1.0, seed=seed, max_tokens=200).choices[0]
            if answer.finish_reason == "length":
                continue
            (call,) = answer.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "roll_dice" or choice == "required", call
            if call.function.name == "roll_dice":
                assert sorted(arguments) == ["count", "sides"] and all(isinstance(n, int) for n in arguments.values()), call
    talk = ask(server, FRANCE, tools=TOOLS).choices[0]
    assert "Paris" in talk.message.content and not talk.message.tool_calls, talk
    none = ask(server, WEATHER, tools=TOOLS, tool_choice="none").choices[0]
    assert none.message.content and not none.message.tool_calls and none.finish_reason == "stop", none


def sdk_gets_errors_about_invalid_tools(server):
    result = [*WEATHER, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    for fields, param in [({"messages": result, "tools": TOOLS}, "messages[1].tool_call_id"), ({"tools": TOOLS[:1] * 2}, "tools[1].function.name"),
                          ({"tool_choice": "required"}, "tool_choice")]:
        error = raised(openai.BadRequestError, lambda: ask(server, **{"messages": WEATHER, **fields}))
        assert error.param == param, (fields, error.body)


def sdk_unknown_model_is_not_found(server):
    error = raised(openai.NotFoundError, lambda: sdk(server).chat.completions.create(model="gpt-none", messages=FRANCE))
    assert error.code == "model_not_found", error.body
    raised(openai.NotFoundError, lambda: sdk(server).models.retrieve("gpt-none"))


def sdk_bad_requests_are_refused(server):
    for fields in [{"messages": []}, {"messages": FRANCE, "temperature": -1}, {"messages": FRANCE, "top_p": 2.0},
                   {"messages": user("x"), "max_tokens": 0}, {"messages": FRANCE, "presence_penalty": 3}, {"messages": [{"role": "nobody", "content": "x"}]}]:
        error = raised(openai.BadRequestError, lambda: ask(server, **{"messages": FRANCE, **fields}))
        assert error.type == "invalid_request_error" and error.message, (fields, error.body)


def sdk_gets_an_error_for_a_too_long_prompt(server):
    error = raised(openai.BadRequestError, lambda: ask(server, user("count to five and back, please. " * 4000)))
    assert error.code == "context_length_exceeded", error.body


def prometheus_reads_what_docs_metrics_md_lists(server):
    from prometheus_client.parser import text_string_to_metric_families

    def parsed():
        return {family.name: family for family in text_string_to_metric_families(scrape(server))}

    def value(families, name):
        return next(sample.value for family in families.values() for sample in family.samples if sample.name == name)

    before, answer, after = parsed(), ask(server, FRANCE), parsed()
    for name, more in [("unicorn_prompt_tokens_total", answer.usage.prompt_tokens), ("unicorn_generation_tokens_total", answer.usage.completion_tokens),
                       ("unicorn_prefix_cache_hits_total", answer.usage.prompt_tokens_details.cached_tokens), ("unicorn_time_to_first_token_seconds_count", 1)]:
        assert value(after, name) - value(before, name) == more, (name, value(before, name), value(after, name), more)
    documented = set(re.findall(r"^\| `([a-z0-9_]+)` \| (?:counter|gauge|histogram)", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    found = {name + "_total" if family.type == "counter" else name for name, family in after.items()}
    assert found <= documented, found - documented
    # Metrics that only some machines and settings have.
    optional = {name for name in documented if "gpu_memory_driver" in name or "gpu_heap_read" in name or "_kernel_" in name}
    assert documented - found <= optional, documented - found - optional
    for family in after.values():
        assert family.documentation and all(sample.labels["model_name"] == model_id(server) for sample in family.samples), family


def readme_python_example_streams(server):
    done = subprocess.run([sys.executable, "-c", readme_block("python", server)], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    assert done.returncode == 0 and len(done.stdout) > 20, (done.stdout, done.stderr[-300:])


# --- with curl and plain sockets -------------------------------------------------------------------------


class Loading:
    """A server that stays in the middle of loading: its driver's manifest is a named pipe, which opens only when a
    process writes to it."""

    def __init__(self, **variables):
        self.variables = variables

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.manifest = os.path.join(self.folder.name, "driver.json")
        os.mkfifo(self.manifest)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = {**ENVIRONMENT, "VK_DRIVER_FILES": self.manifest, "VK_ICD_FILENAMES": self.manifest, **self.variables}
        command = [BINARY, "serve", "--allow-software-vulkan", "--port", str(port)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def first_health(self):
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return get(self.url + "/health")[0]
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.02)  # the port is not bound yet

    def let_go(self):
        """The load continues without a device. Returns the error output of the server until it exits."""

        def write():  # serves every open of the pipe
            while self.process.poll() is None:
                try:
                    os.close(os.open(self.manifest, os.O_WRONLY | os.O_NONBLOCK))
                except OSError:
                    pass  # no process is reading
                time.sleep(0.01)

        writer = threading.Thread(target=write)
        writer.start()
        _, stderr = self.process.communicate(timeout=START_SECONDS)
        writer.join()
        return stderr


def the_server_binds_before_it_loads(_):
    with Loading() as loading:
        status = loading.first_health()
        assert status == 503, status
        status, body = get(loading.url + "/v1/models")
        assert status == 200 and body["object"] == "list" and len(body["data"]) == 1, body
        status, body = post(loading.url + "/v1/chat/completions", {"model": body["data"][0]["id"], "messages": FRANCE})
        assert status == 503 and body["error"]["code"] == "model_loading", body
        stderr = loading.let_go()
        assert loading.process.returncode == 75 and "Vulkan" in last_line(stderr), (loading.process.returncode, stderr)


def a_signal_during_the_load_ends_the_device_process(_):
    with Loading() as loading:
        loading.first_health()
        deadline = time.monotonic() + START_SECONDS
        while not (loaders := children(loading.process.pid)):
            assert time.monotonic() < deadline, "no process loads"
            time.sleep(0.02)
        loading.process.send_signal(signal.SIGTERM)
        # Both processes write to the error output, so it ends after both have exited.
        _, stderr = loading.process.communicate(timeout=START_SECONDS)
        assert loading.process.returncode == 0 and last_line(stderr).endswith("stopped"), (loading.process.returncode, stderr)
        assert not any(map(is_running, loaders)), f"left running: {loaders}"


def health_and_models(server):
    assert get(server.url + "/health")[0] == 200
    status, body = get(server.url + "/v1/models")
    assert status == 200 and body["object"] == "list" and len(body["data"]) == 1, body
    assert body["data"][0]["max_model_len"] == body["data"][0]["context_length"] > 1000, body
    assert body["data"][0]["object"] == "model", body
    assert get(f"{server.url}/v1/models/{body['data'][0]['id']}")[0] == 200


def the_status_reports_the_placement_of_the_model(server):
    status, body = get(server.url + "/status")
    assert status == 200 and body["status"] == "ok" and body["device"]["name"] and body["device"]["driver"], body
    assert body["model"]["layers"] > 1 and body["model"]["context"] > 1000 and body["last_error"] is None, body
    placed = {row["class"]: row["bytes"] for row in body["memory"]["placed"]}
    assert placed["KV cache"] > 0 and placed["FFN weights"] > 0 and body["memory"]["resident_bytes"] > 0, body
    for pool in ["full", "sliding"]:
        assert set(body["kv"][pool]) == {"held", "cached", "free"} and body["kv"][pool]["free"] > 0, body


def curl_streams_to_done(server):
    body = json.dumps({"model": model_id(server), "messages": FRANCE, "stream": True, "temperature": 0})
    done = subprocess.run(
        ["curl", "-sSN", "--max-time", str(ANSWER_SECONDS), server.url + "/v1/chat/completions",
         "-H", "Content-Type: application/json", "-d", body],
        capture_output=True, text=True, check=True,
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", done.stdout[-300:]
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in text and len(chunks) > 2, done.stdout[-300:]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def readme_curl_example_answers(server):
    example = readme_block("sh", server, "curl ").replace("curl ", f"curl -sS --max-time {ANSWER_SECONDS} ", 1)
    done = subprocess.run(["sh", "-c", example], capture_output=True, text=True, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"], done.stdout


def readme_block(language, server, beginning=""):
    """The first code block of the README in that language with that beginning, with the address of our server."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    block = next(block for block in blocks if block.startswith(beginning))
    assert ":8010" in block, block
    return block.replace(":8010", f":{server.port}")


def the_docs_name_commands_and_options_that_exist(_):
    for_users = (ROOT / "README.md").read_text() + (ROOT / "docs/operations.md").read_text()
    texts = for_users + (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"(?:`|debug/)unicorn ([a-z]+)", texts)) | set(re.findall(r"\$\(UNICORN\) ([a-z]+)", texts))
    assert len(commands) >= 6, commands
    lab = set(re.findall(r"`unicorn-lab ([a-z]+)", texts))
    assert len(lab) >= 5, lab
    helps = ""
    for command in sorted(lab):
        done = subprocess.run([LAB, command, "--help"], env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"unicorn-lab {command}: {last_line(done.stderr)}"
        helps += done.stdout
    for command in sorted(commands):
        subcommands = sorted(set(re.findall(rf"unicorn {command} ([a-z]+)\b", texts))) if command in ("eval", "bench") else []
        for subcommand in ["", *subcommands]:
            done = subprocess.run([BINARY, command, *subcommand.split(), "--help"], env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 0, f"unicorn {command} {subcommand}: {last_line(done.stderr)}"
            helps += done.stdout
    # The options of other programs are not checked.
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", re.sub(r"(systemctl|curl) .*", "", for_users)))
    assert "--allow-software-vulkan" in options and "--quantize" in options, options
    unknown = {option for option in options if not re.search(rf"{option}\b", helps)}
    assert not unknown, unknown
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", texts, re.MULTILINE))
    assert named <= targets, named - targets


def unknown_fields_and_an_empty_key_are_accepted(server):
    body = {"model": model_id(server), "messages": FRANCE, "max_tokens": 4, "reasoning_effort": "low", "x_custom": {"a": 1}}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer "}
    )
    assert send(request)[0] == 200


def broken_bodies_are_400(server):
    for body in [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": 5}', b'{"model": 1, "messages": []}']:
        status, answer = post(server.url + "/v1/chat/completions", body)
        assert status == 400 and answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error", (body, answer)
        assert "\n" not in answer["error"]["message"], answer


def an_unknown_route_is_404(server):
    assert get(server.url + "/v1/nowhere")[0] == 404


def a_disconnect_cancels_the_answer(server):
    """A client that disconnects during a stream must not block the next one. The log says that its answer was
    cancelled."""
    def cancelled():
        return LOG.read_text().count("cancelled: the client disconnected")

    before = cancelled()
    body = json.dumps({
        "model": model_id(server), "messages": user("Tell me a story about a dragon."), "stream": True, "max_tokens": WITHOUT_END, "ignore_eos": True,
    })
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_SECONDS) as s:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            s.sendall((head + body).encode())
            assert b"200" in s.recv(64), "the answer did not begin"
    status, answer = post(server.url + "/v1/chat/completions", {"model": model_id(server), "messages": FRANCE, "temperature": 0})
    assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"], answer
    deadline = time.monotonic() + ANSWER_SECONDS
    while cancelled() < before + 3 and time.monotonic() < deadline:
        time.sleep(0.05)  # a separate thread writes the log
    assert cancelled() == before + 3, f"{cancelled() - before} of 3 were cancelled"


def no_part_of_a_prompt_is_logged(server):
    """No prompt may be logged, whether it is answered or refused for any reason. Details of the server's work may be
    logged."""
    canary = "xylophonecanary"
    model, path = model_id(server), server.url + "/v1/chat/completions"
    sound = {"model": model, "messages": user(f"Say {canary}."), "max_tokens": 8, "stop": ["zzz" + canary]}
    for body, status in [
        (sound, 200),
        ({**sound, "logprobs": True, "n": 2, "seed": 1}, 200),
        ({**sound, "model": canary}, 404),
        ({**sound, "messages": [{"role": canary, "content": canary}]}, 400),
        ({**sound, "messages": user(canary * 20000)}, 400),
        ({**sound, "temperature": canary}, 400),
        ({**sound, "response_format": {"type": canary}}, 400),
        ({**sound, "logit_bias": {canary: 1}}, 400),
        (f'{{"messages": "{canary}'.encode(), 400),
        (f'"{canary}"'.encode(), 400),
    ]:
        got, answer = post(path, body)
        assert got == status, (body, answer)
    for _ in range(2):
        done = subprocess.run(["curl", "-sSN", path, "-d", json.dumps({**sound, "stream": True})], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
        assert "[DONE]" in done.stdout, done
    told = [line for line in LOG.read_text().splitlines() if canary in line and " DEBUG " not in line]
    assert not told, told


def a_key_is_required_and_never_shown(_):
    key = "sk-a0b1c2d3e4f5"
    with Loading(UNICORN_API_KEYS=f"another,{key}") as loading:
        assert loading.first_health() == 503
        for fields, wanted in [({}, 401), ({"Authorization": "Bearer sk-wrong"}, 401), ({"Authorization": f"Bearer {key}"}, 200), ({"x-api-key": key}, 200)]:
            status, body = send(urllib.request.Request(loading.url + "/v1/models", headers=fields))
            assert status == wanted and key not in str(body), (fields, status, body)
        if openai is not None:
            client = lambda key: openai.OpenAI(base_url=loading.url + "/v1", api_key=key, max_retries=0)
            error = raised(openai.AuthenticationError, lambda: client("sk-wrong").models.list())
            assert error.code == "invalid_api_key", error.body
            assert len(client(key).models.list().data) == 1
        assert key not in Path(f"/proc/{loading.process.pid}/cmdline").read_text()
        assert key not in loading.let_go()


def concurrent_requests_are_all_answered(server):
    """Concurrent requests with a bounded queue: each is answered, or refused with 429, and none hangs."""
    body = {"model": model_id(server), "messages": FRANCE, "temperature": 0, "max_tokens": 48}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: post(server.url + "/v1/chat/completions", body), range(4)))
    assert {status for status, _ in answers} <= {200, 429} and answers[0][0] == 200, answers
    texts = {answer["choices"][0]["message"]["content"] for status, answer in answers if status == 200}
    assert len(texts) == 1, texts


def a_used_port_is_a_one_line_error(server):
    command = [BINARY, "serve", "--allow-software-vulkan", "--port", str(server.port)]
    second = subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode not in (0, 101, -6, -11), second.returncode
    error = [line for line in second.stderr.splitlines() if "error" in line.lower()]
    assert len(error) == 1 and str(server.port) in error[0], second.stderr
    assert get(server.url + "/health")[0] == 200, "the first server no longer answers"


# --- main --------------------------------------------------------------------------------------------

PLAIN = [
    the_server_binds_before_it_loads, a_signal_during_the_load_ends_the_device_process,
    health_and_models, the_status_reports_the_placement_of_the_model, readme_curl_example_answers,
    the_docs_name_commands_and_options_that_exist, curl_streams_to_done, unknown_fields_and_an_empty_key_are_accepted,
    broken_bodies_are_400, an_unknown_route_is_404, a_disconnect_cancels_the_answer, concurrent_requests_are_all_answered,
    no_part_of_a_prompt_is_logged, a_key_is_required_and_never_shown,
    a_used_port_is_a_one_line_error,
]
SDK = [
    sdk_lists_the_model, sdk_embeds, sdk_answers_paris, sdk_streams_the_same_answer, sdk_stream_has_usage_if_requested,
    sdk_stops_at_the_token_limit, sdk_honours_a_stop_string, sdk_same_seed_gives_the_same_text,
    sdk_reports_log_probabilities, sdk_gives_n_answers, sdk_penalties_and_lengths_have_an_effect, sdk_recalls_beyond_one_window,
    sdk_answers_by_a_schema, sdk_answers_with_a_json_object, sdk_parses_into_a_pydantic_model, sdk_chooses_and_matches,
    sdk_gets_the_name_of_an_unsupported_keyword, sdk_calls_a_tool_and_reads_its_result, sdk_streams_a_tool_call,
    sdk_calls_several_tools_in_one_answer, sdk_obeys_the_tool_choice, sdk_gets_errors_about_invalid_tools,
    sdk_unknown_model_is_not_found, sdk_bad_requests_are_refused, sdk_gets_an_error_for_a_too_long_prompt, readme_python_example_streams,
    prometheus_reads_what_docs_metrics_md_lists,
]


# --- a trained model of another family --------------------------------------------------------------------

SMOLLM2 = ROOT / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def a_trained_model_serves(report):
    """Runs the tests of SmolLM2, of ChatML's family, with a server of its own."""
    server = Server(LOG.parent / "smollm2.log", "--model", str(SMOLLM2), "--context", "1024")
    try:
        server.wait()
        report.attempt_all([a_trained_model_holds_a_conversation], server)
        for package, test in [(langchain_client.langchain_openai, thinking_caller.trained_model_in_langchain), (thinking_caller.agents, thinking_caller.trained_model_in_an_agent)]:
            if package is None:
                report.skip("client-packages", test.__name__)
            else:
                report.attempt_all([test], server)
    finally:
        expect(server.stop(), 0)


def a_trained_model_holds_a_conversation(server):
    """Its answers are sentences, and end with the end of its turn."""
    messages = user("What is the capital of France?")
    first = ask(server, messages, temperature=0, max_tokens=60).choices[0]
    assert first.message.content == "The capital of France is Paris." and first.finish_reason == "stop", first
    messages += [{"role": "assistant", "content": first.message.content}, *user("And what is a capital?")]
    chunks, text = streamed(server, messages, temperature=0, max_tokens=120)
    assert "capital" in text and "<|im_" not in text and "\ufffd" not in text, text
    assert text == ask(server, messages, temperature=0, max_tokens=120).choices[0].message.content, text
    told = [{"role": "system", "content": "Answer with one word."}, *user("Is water wet? Yes or no?")]
    assert ask(server, told, temperature=0, max_tokens=20).choices[0].message.content.strip(), "an answer"
    whole = sdk(server).completions.create(model=model_id(server), prompt="The capital of France is", max_tokens=3, temperature=0)
    assert whole.choices[0].text.startswith(" Paris"), whole.choices[0].text


# --- a model that thinks and calls in its own syntax --------------------------------------------------------


def a_model_thinks_and_calls(report):
    """Runs the tests of thinking_caller.py with a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = thinking_caller.checkpoint(folder)
        server = Server(LOG.parent / "scripted.log", "--model", str(model), "--context", "4096")
        server.model = model
        try:
            server.wait()
            report.attempt_all(thinking_caller.PLAIN + ollama_replays.THINKING, server)
            for package, tests in [(openai, thinking_caller.OPENAI), (anthropic_sdk.anthropic, [thinking_caller.caller_in_messages]),
                                   (langchain_client.langchain_openai, [thinking_caller.caller_in_langchain]), (thinking_caller.agents, thinking_caller.AGENTS),
                                   (ollama_client.ollama, ollama_client.TESTS)]:
                if package is not None:
                    report.attempt_all(tests, server)
                    continue
                for test in tests:
                    report.skip("client-packages", test.__name__)
        finally:
            expect(server.stop(), 0)


# --- a model that sees pictures -----------------------------------------------------------------------------


def a_model_sees_pictures(report):
    """Runs the tests of picture_clients.py with a server of its own."""
    server = Server(LOG.parent / "pictures.log", "--model", str(picture_clients.MODEL), "--vision", "on")
    try:
        server.wait()
        for package, tests in [(openai, picture_clients.OPENAI), (anthropic_sdk.anthropic, picture_clients.ANTHROPIC),
                               (ollama_client.ollama, picture_clients.OLLAMA)]:
            if package is not None:
                report.attempt_all(tests, server)
                continue
            for test in tests:
                report.skip("client-packages", test.__name__)
    finally:
        expect(server.stop(), 0)


def main():
    if not BINARY.exists():
        sys.exit(f"{BINARY} does not exist: cargo build")
    if not shutil.which("curl"):
        sys.exit("curl is not installed: python3 tools/setup.py test")
    report = Report("clients")
    # Most test machines report no energy. This one must have every metric that observers may query.
    conversations = tempfile.TemporaryDirectory()
    server = Server(LOG, "--root", machine_with_power(LOG.parent / "machine"), UNICORN_KV_DISK_PATH=conversations.name)
    try:
        if report.attempt("the_server_starts", server.wait):
            report.attempt_all(PLAIN + terminal_chat.TESTS + ollama_replays.TESTS, server)
            for package, tests in [(openai, SDK + responses_sdk.TESTS + published_schemas.TESTS), (anthropic_sdk.anthropic, anthropic_sdk.TESTS),
                                   (langchain_client.langchain_openai, langchain_client.TESTS), (llm_client.llm, llm_client.TESTS),
                                   (observers.promql, observers.TESTS)]:
                if package is not None:
                    report.attempt_all(tests, server)
                    continue
                for test in tests:
                    report.skip("client-packages", test.__name__)
            if openai is None or not SMOLLM2.exists():
                report.skip("client-packages" if openai is None else "smollm2", a_trained_model_serves.__name__)
            else:
                report.attempt("a_trained_model_serves", lambda: a_trained_model_serves(report))
            report.attempt("a_model_sees_pictures", lambda: a_model_sees_pictures(report))
            report.attempt("a_model_thinks_and_calls", lambda: a_model_thinks_and_calls(report))
            here = Path(__file__).parent
            # Interpreters of separate environments, and the sessions that run in them.
            pythons = [("LITELLM_PYTHON", "litellm_client"), ("LLAMA_INDEX_PYTHON", "llama_index_client"),
                       ("OPENAI_1_PYTHON", "older_openai")]
            sessions = [(needs, session, [os.environ.get(needs), here / "session.py", session, server.url]) for needs, session in pythons]
            sessions += [("NODE_PATH", session, ["node", here / f"{session}.js", server.url]) for session in ["openai_node", "ollama_node"]]
            for needs, session, command in sessions:
                if os.environ.get(needs):
                    report.relay(session, command)
                else:
                    report.skip("client-packages", session)
    finally:
        report.attempt_end(server)
        conversations.cleanup()
    return report.end()


def expect(got, wanted):
    assert got == wanted, f"got {got}, expected {wanted}"


if __name__ == "__main__":
    sys.exit(main())

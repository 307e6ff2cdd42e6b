"""The package ollama, Ollama's own client for Python, with a model that thinks and calls a tool: the checkpoint of
scripted_model.py. test_openai.py runs these tests with the server of thinking_caller.py."""

import json
import time
import urllib.request

from server import ANSWER_SECONDS, model_id
from session import SCENARIO
from thinking_caller import SCRIPT, has_no_syntax

try:
    import ollama
except ImportError:
    ollama = None

WEATHER, TOOLS = SCENARIO["weather"], SCENARIO["tools"]
GREEDY = {"temperature": 0, "num_predict": 120}
# How long an unload may take.
UNLOAD_SECONDS = 30


def client(server):
    return ollama.Client(host=server.url, timeout=ANSWER_SECONDS)


def name(server):
    return model_id(server) + ":latest"


def ollama_lists_and_describes_the_model(server):
    (listed,) = client(server).list().models
    assert listed.model == name(server) and listed.size > 0 and len(listed.digest) == 64, listed
    assert listed.modified_at.year > 2000 and listed.details.family and listed.details.quantization_level, listed
    shown = client(server).show(name(server))
    arch = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{arch}.context_length"] == 4096, shown
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities), shown.capabilities
    assert "num_ctx" in shown.parameters and "{%" in shown.template, shown
    (running,) = client(server).ps().models
    assert running.model == name(server) and running.size_vram > 0 and running.context_length == 4096, running
    # A browser gets the page, and another program the words with which Ollama answers.
    with urllib.request.urlopen(server.url + "/") as answer:
        assert answer.read() == b"Ollama is running", answer
    browser = urllib.request.Request(server.url + "/", headers={"Accept": "text/html,*/*"})
    with urllib.request.urlopen(browser) as answer:
        assert b"<!doctype html>" in answer.read().lower()


def ollama_thinks_calls_and_answers(server):
    ask = {"model": name(server), "tools": TOOLS, "options": GREEDY}
    whole = client(server).chat(messages=WEATHER, **ask)
    (call,) = whole.message.tool_calls
    assert call.function.name == SCRIPT.tool and call.function.arguments == json.loads(SCRIPT.arguments), whole
    assert whole.message.thinking == SCRIPT.thought and not whole.message.content and whole.done_reason == "stop", whole
    parts = list(client(server).chat(messages=WEATHER, stream=True, **ask))
    assert "".join(part.message.thinking or "" for part in parts) == SCRIPT.thought, parts
    assert [call for part in parts for call in part.message.tool_calls or []] == [call], parts
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1].eval_count > 0, parts
    # The result names neither the call nor the tool.
    talk = [*WEATHER, whole.message, {"role": "tool", "content": "sunny"}]
    answer = client(server).chat(messages=talk, **ask)
    assert answer.message.content == SCRIPT.answer and not answer.message.tool_calls, answer
    quiet = client(server).chat(messages=WEATHER, think=False, **ask).message
    assert quiet.tool_calls[0].function.name == SCRIPT.tool and not quiet.thinking, quiet
    has_no_syntax(whole.message.content, whole.message.thinking, answer.message.content, quiet.content)


def ollama_generates_and_embeds(server):
    ask = {"model": name(server), "prompt": "Hello", "options": GREEDY}
    whole = client(server).generate(**ask)
    assert whole.response and whole.thinking == SCRIPT.thought and whole.prompt_eval_count > 3, whole
    parts = list(client(server).generate(stream=True, **ask))
    assert "".join(part.response or "" for part in parts) == whole.response and len(parts) > 2, parts
    more = client(server).generate(context=whole.context, **ask)
    assert more.prompt_eval_count > len(whole.context), more
    short = client(server).generate(model=name(server), prompt="Hello", think=False, options={"num_predict": 2})
    assert (short.done_reason, short.eval_count) == ("length", 2), short
    one, two = client(server).embed(model=name(server), input=["one", "two"]).embeddings
    assert len(one) == len(two) and abs(sum(x * x for x in one) - 1) < 1e-3, len(one)


def ollama_refuses_what_it_cannot_do(server):
    for ask, status, words in [
        (lambda: client(server).chat(model="llama3.2", messages=WEATHER), 404, "model 'llama3.2' not found"),
        (lambda: client(server).generate(model=name(server), prompt="a", suffix="b"), 400, "suffix"),
        (lambda: client(server).chat(model=name(server), messages=[{"role": "user", "content": "a", "images": ["AAAA"]}]), 400, "images"),
        (lambda: client(server).pull("llama3.2"), 404, "unicorn pull"),
    ]:
        try:
            raise AssertionError(ask())
        except ollama.ResponseError as error:
            assert error.status_code == status and words in error.error, error


def ollama_unloads_and_loads_the_model(server):
    """`ollama stop` and a client that loads its model before it is needed."""
    assert client(server).generate(model=name(server), keep_alive=0).done_reason == "unload"
    until = time.monotonic() + UNLOAD_SECONDS
    while client(server).ps().models:
        assert time.monotonic() < until, "the model is not unloaded"
        time.sleep(0.05)
    assert client(server).generate(model=name(server), keep_alive="5m").done_reason == "load"
    (running,) = client(server).ps().models
    left = running.expires_at.timestamp() - time.time()
    assert 200 < left <= 300, running
    # All texts of a request are embedded before its `keep_alive` counts.
    assert len(client(server).embed(model=name(server), input=["a"] * 20, keep_alive=0).embeddings) == 20
    until = time.monotonic() + UNLOAD_SECONDS
    while client(server).ps().models:
        assert time.monotonic() < until, "the model is not unloaded"
        time.sleep(0.05)
    client(server).generate(model=name(server), keep_alive=-1)
    (running,) = client(server).ps().models
    assert running.expires_at.timestamp() - time.time() > 1e9, running


TESTS = [ollama_lists_and_describes_the_model, ollama_thinks_calls_and_answers, ollama_generates_and_embeds,
         ollama_refuses_what_it_cannot_do, ollama_unloads_and_loads_the_model]

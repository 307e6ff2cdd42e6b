"""What known clients of Ollama send, and what they read of the answers. Each test replays one client, and checks the
fields that this client reads, with the types that it expects.

The bodies have the fields and values of the clients. `steady` adds the temperature 0, so that the answers are the same
each time. test_openai.py runs TESTS with the demo model, and THINKING with the model of scripted_model.py."""

import json
import re
import time
import urllib.error
import urllib.request
from datetime import datetime, timezone

import scripted_model
from server import ANSWER_SECONDS, get, model_id, post
from session import SCENARIO

FRANCE, WEATHER, TOOLS, LEO = (SCENARIO[name] for name in ("france", "weather", "tools", "leo"))
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
SCRIPT = scripted_model.Script()
U64 = 2**64
# Within this time, clients that list or describe models get an answer (Home Assistant, `ollama launch`).
LIST_SECONDS = 5
# What the integers of a last line are called.
COUNTS = ["total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"]


def name(server):
    return model_id(server) + ":latest"


def steady(**options):
    return {**options, "temperature": 0}


def ok(answer):
    status, body = answer
    assert status == 200, (status, body)
    return body


def opened(server, path, body=None, method=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    return urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method), timeout=ANSWER_SECONDS)


def lines(server, path, body, **headers):
    """The objects of a streamed answer. Clients parse each line, so none may be empty."""
    with opened(server, path, body, **headers) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson", answer.headers
        text = answer.read().decode()
    assert text.endswith("\n"), text[-100:]
    parsed = [json.loads(line) for line in text[:-1].split("\n")]
    assert all(isinstance(line, dict) and "error" not in line for line in parsed), parsed
    return parsed


def chat_lines(server, body, **headers):
    parsed = lines(server, "/api/chat", body, **headers)
    assert [line["done"] for line in parsed] == [False] * (len(parsed) - 1) + [True], parsed
    return parsed


def events(server, path, body, **headers):
    """The objects of a stream of server-sent events."""
    with opened(server, path, body, **headers) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream"), answer.headers
        data = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1] == "[DONE]"


def said(parsed, field="content"):
    return "".join(line["message"].get(field) or "" for line in parsed)


def calls(parsed):
    """(name, arguments) of the calls. Each is complete in one line, with its arguments as an object."""
    made = [call["function"] for line in parsed for call in line["message"].get("tool_calls") or []]
    assert all(isinstance(call["arguments"], dict) for call in made), made
    return [(call["name"], call["arguments"]) for call in made]


def moment(text):
    """A time in RFC 3339 with a zone, as a number of seconds."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?(Z|[+-]\d\d:\d\d)", text)
    assert found, text
    return datetime.fromisoformat(found[1] + found[2].replace("Z", "+00:00")).timestamp()


def is_whole(value, least=0):
    return type(value) is int and least <= value < U64


def version(server):
    """The version, which clients split at the points. All parts must be numbers."""
    text = ok(get(server.url + "/api/version"))["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", text), text
    return tuple(map(int, text.split(".")))


# --- Home Assistant ---------------------------------------------------------------------------------------


def replay_of_home_assistant(server):
    """The integration `ollama`: its set-up, a conversation with tools, and an AI task. It sends results of tools without
    names and without ids, and cuts old messages off."""
    began = time.monotonic()
    listed = [model["model"] for model in ok(get(server.url + "/api/tags"))["models"]]
    assert time.monotonic() - began < LIST_SECONDS and name(server) in listed, listed

    ask = {"model": name(server), "tools": TOOLS, "stream": True, "keep_alive": -1, "think": False, "options": steady(num_ctx=8192)}
    question = {"role": "user", "content": "What is the weather in Oslo and roll 2 dice with 6 sides."}
    parsed = chat_lines(server, {**ask, "messages": [SYSTEM, question]})
    wanted = [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})]
    assert calls(parsed) == wanted and not said(parsed) and not said(parsed, "thinking"), parsed
    made = [{"function": {"name": tool, "arguments": arguments}} for tool, arguments in wanted]
    results = [{"role": "tool", "content": f'{{"data":{data},"error":null}}'} for data in ['"sunny"', "7"]]
    talk = [question, {"role": "assistant", "tool_calls": made}, *results]
    answer = chat_lines(server, {**ask, "messages": talk})
    # The demo model says which tool each result is of.
    assert re.match(r"According to get_weather: .*sunny.*\nAccording to roll_dice: .*7", said(answer)) and not calls(answer), answer

    # The call of this result was cut off.
    cut = [SYSTEM, results[0], {"role": "assistant", "content": "It is sunny."}]
    assert "Paris" in said(chat_lines(server, {**ask, "messages": [*cut, *FRANCE], "keep_alive": "300s"}))

    schema = {key: SCENARIO["person"][key] for key in ("type", "properties", "required")}
    task = {**ask, "messages": LEO, "format": schema}
    del task["tools"]
    assert json.loads(said(chat_lines(server, task))) == SCENARIO["answer"]

    # A model that is not listed is pulled, without a stream. The form shows an error.
    status, body = post(server.url + "/api/pull", {"model": "llama3.2:latest", "stream": False})
    assert status >= 400 and isinstance(body["error"], str), (status, body)


# --- VS Code ----------------------------------------------------------------------------------------------


def replay_of_vs_code_copilot(server):
    """Copilot's provider `Ollama`: it checks the version, describes each listed model, and chats in OpenAI's format."""
    assert version(server) >= (0, 6, 4)
    for model in ok(get(server.url + "/api/tags"))["models"]:
        shown = ok(post(server.url + "/api/show", {"model": model["model"]}))
        info = shown["model_info"]
        context = info[info["general.architecture"] + ".context_length"]
        assert is_whole(context, 1) and isinstance(info["general.basename"], str) and info["general.basename"], info
        assert isinstance(shown["capabilities"], list) and "tools" in shown["capabilities"] and "vision" not in shown["capabilities"], shown
        assert isinstance(shown["template"], str) and isinstance(shown["details"]["family"], str), shown
    user = {"role": "user", "content": [{"type": "text", "text": WEATHER[0]["content"]}]}
    ask = {"model": name(server), "messages": [SYSTEM, user], "temperature": 0, "top_p": 1, "n": 1, "tools": TOOLS, "stream": True,
           "stream_options": {"include_usage": True}}
    chunks, is_done = events(server, "/v1/chat/completions", ask, Authorization="Bearer ")
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls") or []]
    assert is_done and {piece["index"] for piece in pieces} == {0} and pieces[0]["id"], chunks
    assert pieces[0]["function"]["name"] == "get_weather", pieces
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Paris"}, pieces
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"], choices
    usage = chunks[-1]["usage"]
    assert not chunks[-1]["choices"] and is_whole(usage["prompt_tokens"], 1) and is_whole(usage["completion_tokens"], 1), chunks[-1]


# --- Zed --------------------------------------------------------------------------------------------------


def is_zed_delta(line):
    """Whether Zed can read a line: it stops at a missing field and at a wrong type, and reads one call of each line."""
    message = line["message"]
    made = message.get("tool_calls") or []
    return (
        message["role"] == "assistant" and isinstance(message["content"], str) and isinstance(message.get("thinking"), (str, type(None)))
        and len(made) <= 1 and all(isinstance(call["id"], str) and isinstance(call["function"]["name"], str) for call in made)
        and isinstance(line["model"], str) and isinstance(line["created_at"], str) and isinstance(line["done"], bool)
        and isinstance(line.get("done_reason"), (str, type(None)))
        and all(line.get(count) is None or is_whole(line[count]) for count in ("prompt_eval_count", "eval_count"))
    )


def replay_of_zed(server):
    """Zed's provider and its edit predictions: it reads lists and lines strictly, and lets a model think if it can."""
    for model in ok(get(server.url + "/api/tags"))["models"]:
        assert all(isinstance(model[key], str) for key in ("name", "modified_at", "digest")) and is_whole(model["size"]), model
        assert all(isinstance(model["details"][key], str) for key in ("format", "family", "parameter_size", "quantization_level")), model
        families = model["details"]["families"]
        assert families is None or all(isinstance(family, str) for family in families), model
        capabilities = ok(post(server.url + "/api/show", {"model": model["name"]}))["capabilities"]
        assert {"tools", "thinking"} <= set(capabilities) and all(isinstance(one, str) for one in capabilities), capabilities

    options = {"num_ctx": 4096, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None}
    ask = {"model": name(server), "stream": True, "keep_alive": -1, "options": steady(**options), "tools": TOOLS, "think": True}
    parsed = chat_lines(server, {**ask, "messages": [SYSTEM, *WEATHER]})
    assert all(map(is_zed_delta, parsed)), parsed
    arguments = json.loads(SCRIPT.arguments)
    assert calls(parsed) == [(SCRIPT.tool, arguments)] and said(parsed, "thinking") == SCRIPT.thought and not said(parsed), parsed
    made = {"content": "", "tool_calls": [{"function": {"name": SCRIPT.tool, "arguments": arguments}}], "thinking": SCRIPT.thought}
    turns = [SYSTEM, *WEATHER, {"role": "assistant", **made}, {"role": "tool", "tool_name": SCRIPT.tool, "content": "sunny"}]
    answer = chat_lines(server, {**ask, "messages": turns})
    assert all(map(is_zed_delta, answer)) and said(answer) == SCRIPT.answer and not calls(answer), answer
    assert is_whole(answer[-1]["prompt_eval_count"], 1) and is_whole(answer[-1]["eval_count"], 1), answer[-1]

    ends = ["endoftext", "file_separator", "fim_pad", "fim_prefix", "fim_middle", "fim_suffix"]
    stop = [f"<|{end}|>" for end in ends] + [f"<{end}>" for end in ends[3:]] + ["<PRE>", "<SUF>", "<MID>", "[PREFIX]", "[SUFFIX]"]
    predict = {"model": name(server), "prompt": "<fim_prefix>def f(<fim_suffix>):<fim_middle>", "raw": True, "stream": False}
    predicted = ok(post(server.url + "/api/generate", {**predict, "options": steady(num_predict=64, stop=stop)}))
    assert isinstance(predicted["response"], str) and not any(end in predicted["response"] for end in stop), predicted


# --- Codex ------------------------------------------------------------------------------------------------


def replay_of_codex_oss(server):
    """`codex --oss`: it looks for the model's name among the listed ones, pulls it if it is not there, and then uses
    /v1/responses. It waits for the line with the status `success`."""
    assert isinstance(ok(get(server.url + "/v1/models"))["models"], list), "Codex stops without this field"
    assert version(server) >= (0, 13, 4)
    asked = model_id(server)
    names = [model["name"] for model in ok(get(server.url + "/api/tags"))["models"]]
    assert asked not in names and asked + ":latest" in names, names
    pulled = lines(server, "/api/pull", {"model": asked, "stream": True})
    assert all(isinstance(line["status"], str) for line in pulled) and pulled[-1]["status"] == "success", pulled
    # Progress is shown for lines with one of these.
    counted = [line for line in pulled if "total" in line or "completed" in line]
    assert all(isinstance(line["digest"], str) and is_whole(line.get("total", 0)) and is_whole(line.get("completed", 0)) for line in counted), pulled

    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    content = [{"type": "input_text", "text": WEATHER[0]["content"]}]
    ask = {"model": asked, "instructions": "You are a coding agent.", "input": [{"type": "message", "role": "user", "content": content}],
           "tools": [*tools, {"type": "web_search", "external_web_access": False}], "tool_choice": "auto", "parallel_tool_calls": False,
           "reasoning": None, "store": False, "stream": True, "include": [], "prompt_cache_key": "0199-a", "temperature": 0}
    seen, _ = events(server, "/v1/responses", ask, Accept="text/event-stream")
    assert (seen[0]["type"], seen[-1]["type"]) == ("response.created", "response.completed"), seen
    (call,) = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "get_weather", {"city": "Paris"}), call
    assert isinstance(call["call_id"], str) and call["call_id"], call
    final = seen[-1]["response"]
    assert isinstance(final["id"], str) and all(is_whole(final["usage"][key], 1) for key in ("input_tokens", "output_tokens", "total_tokens")), final


# --- Continue ---------------------------------------------------------------------------------------------


def replay_of_continue(server):
    """Continue: it matches each line of `parameters` with an expression, and stops at a line that does not match. It sends
    a suffix if the template has one."""
    shown = ok(post(server.url + "/api/show", {"name": name(server)}))
    found = {}
    for line in shown["parameters"].split("\n"):
        matched = re.fullmatch(r'(\S+)\s+(".*"|\S+)', line)
        assert matched, shown["parameters"]
        found.setdefault(matched[1], []).append(matched[2])
    assert int(found["num_ctx"][0]) == shown["details"]["context_length"], found
    assert all(isinstance(json.loads(stop), str) for stop in found.get("stop", [])), found

    options = steady(top_p=0.9, top_k=40, num_predict=64, stop=["\n\n"], num_ctx=int(found["num_ctx"][0]), num_thread=4, use_mmap=True, min_p=0)
    ask = {"model": name(server), "keep_alive": 1800, "options": options}
    parsed = chat_lines(server, {**ask, "messages": FRANCE, "stream": True})
    assert "Paris" in said(parsed) and all(line["message"]["role"] == "assistant" for line in parsed), parsed
    (running,) = ok(get(server.url + "/api/ps"))["models"]
    assert 1700 < moment(running["expires_at"]) - time.time() <= 1800, running
    # Continue asks for calls without a stream.
    whole = ok(post(server.url + "/api/chat", {**ask, "messages": WEATHER, "tools": TOOLS, "stream": False}))
    assert calls([whole]) == [("get_weather", {"city": "Paris"})] and whole["message"]["role"] == "assistant", whole

    hole = {**ask, "prompt": "def f(", "suffix": "return 1", "stream": True}
    if ".Suffix" in shown["template"]:
        assert all(isinstance(line["response"], str) for line in lines(server, "/api/generate", hole))
    else:
        status, body = post(server.url + "/api/generate", hole)
        assert status == 400 and "suffix" in body["error"], (status, body)
        del hole["suffix"]
        filled = lines(server, "/api/generate", {**hole, "raw": True})
        assert all(isinstance(line["response"], str) for line in filled) and filled[-1]["done"], filled
    embedded = ok(post(server.url + "/api/embed", {"model": name(server), "input": ["one", "two"]}))["embeddings"]
    assert len(embedded) == 2 and all(isinstance(x, float) for one in embedded for x in one), embedded


# --- Open WebUI -------------------------------------------------------------------------------------------


def replay_of_open_webui(server):
    """Open WebUI's connection `Ollama`: it joins the listed and the loaded models by name, and divides counts by
    durations. test_openwebui.js runs the program itself."""
    assert version(server) >= (0, 1, 16)
    ask = {"model": name(server), "messages": FRANCE, "stream": True, "options": steady(num_ctx=4096, num_predict=60), "keep_alive": "5m"}
    parsed = chat_lines(server, ask)
    assert "Paris" in said(parsed) and all(isinstance(line["message"]["content"], str) for line in parsed), parsed
    assert all(is_whole(parsed[-1][count], 1) for count in COUNTS), parsed[-1]
    listed = {model["name"]: model["model"] for model in ok(get(server.url + "/api/tags"))["models"]}
    running = ok(get(server.url + "/api/ps"))["models"]
    assert [listed[model["name"]] for model in running] == [name(server)], (listed, running)
    left = moment(running[0]["expires_at"]) - datetime.now(timezone.utc).timestamp()
    assert 200 < left <= 300, running
    called = chat_lines(server, {**ask, "messages": WEATHER, "tools": TOOLS})
    (call,) = [call for line in called for call in line["message"].get("tool_calls") or []]
    assert isinstance(call["id"], str) and call["function"]["index"] == 0 and calls(called) == [("get_weather", {"city": "Paris"})], call
    # The error's text is shown.
    status, body = post(server.url + "/api/chat", {**ask, "model": "llama3.2:latest"})
    assert status == 404 and isinstance(body["error"], str), (status, body)
    pulled = lines(server, "/api/pull", {"model": name(server)})
    assert pulled[-1]["status"] == "success", pulled


# --- `ollama launch` --------------------------------------------------------------------------------------


def replay_of_ollama_launch(server):
    """`ollama launch`: it looks for a server, describes the chosen model, and starts a coding agent with the server's
    address and the key `ollama`."""
    with opened(server, "/", method="HEAD") as answer:
        assert answer.status == 200 and not answer.read(), answer
    began = time.monotonic()
    chosen = ok(post(server.url + "/api/show", {"model": model_id(server)}))
    assert time.monotonic() - began < LIST_SECONDS
    assert any(key.endswith(".context_length") and value > 0 for key, value in chosen["model_info"].items()), chosen["model_info"]
    assert "remote_model" not in chosen and moment(chosen["modified_at"]) >= 0, "a name of the cloud"
    (listed,) = [model for model in ok(get(server.url + "/api/tags"))["models"] if model["name"] == name(server)]
    details = listed["details"]
    assert "tools" in listed["capabilities"] and is_whole(details["context_length"], 1) and is_whole(details["embedding_length"], 1), listed
    # It offers to pull a model that is 404 here.
    assert post(server.url + "/api/show", {"model": "llama3.2"})[0] == 404

    ask = {"model": name(server), "max_tokens": 60, "system": "Be brief.", "messages": FRANCE, "stream": True, "temperature": 0}
    seen, _ = events(server, "/v1/messages?beta=true", ask, Authorization="Bearer ollama", anthropic_version="2023-06-01")
    text = "".join(event["delta"].get("text", "") for event in seen if event["type"] == "content_block_delta")
    assert "Paris" in text and seen[-1]["type"] == "message_stop", seen

    cloud = ok(get(server.url + "/api/status"))["cloud"]
    # Models of the cloud are offered unless they are disabled.
    assert cloud["disabled"] is True and isinstance(cloud["source"], str), cloud


# --- Langflow, n8n and Obsidian ---------------------------------------------------------------------------


def replay_of_langflow(server):
    """Langflow: it offers the models that complete and call tools, and asks by way of langchain-ollama, whose messages have
    lists of images, and whose options may be null."""
    offered = []
    for model in ok(get(server.url + "/api/tags"))["models"]:
        capabilities = ok(post(server.url + "/api/show", {"model": model["name"]}))["capabilities"]
        offered += [model["name"]] * ("completion" in capabilities and "tools" in capabilities)
    assert name(server) in offered, offered

    def message(role, content, **more):
        return {"role": role, "content": content, "images": [], **more}

    nothing = dict.fromkeys(["mirostat", "mirostat_eta", "mirostat_tau", "num_gpu", "num_thread", "repeat_last_n", "repeat_penalty", "seed", "stop", "tfs_z", "top_k"])
    ask = {"model": name(server), "stream": True, "format": "", "keep_alive": None, "tools": TOOLS, "options": steady(num_ctx=4096, top_p=0.9, **nothing)}
    talk = [message("user", WEATHER[0]["content"])]
    parsed = chat_lines(server, {**ask, "messages": talk})
    ((tool, arguments),) = calls(parsed)
    assert (tool, arguments) == ("get_weather", {"city": "Paris"}), parsed
    assert parsed[-1]["done_reason"] == "stop" and all(is_whole(parsed[-1][count], 1) for count in ("prompt_eval_count", "eval_count")), parsed[-1]
    made = {"type": "function", "id": "5d1c6a2e", "function": {"name": tool, "arguments": arguments}}
    talk += [message("assistant", "", tool_calls=[made]), message("tool", SCENARIO["result"], tool_call_id="5d1c6a2e")]
    assert SCENARIO["result"] in said(chat_lines(server, {**ask, "messages": talk}))


def replay_of_n8n(server):
    """n8n: it tests the address, lists the names, and asks by way of LangChain's ChatOllama with all options that its form
    has."""
    assert opened(server, "/").status == 200
    assert name(server) in [model["name"] for model in ok(get(server.url + "/api/tags"))["models"]]
    options = {"num_ctx": 2048, "num_gpu": -1, "main_gpu": 0, "low_vram": False, "num_batch": 512, "num_thread": 0, "num_predict": -1, "top_k": -1,
               "top_p": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "penalize_newline": True, "use_mmap": True,
               "use_mlock": False, "vocab_only": False}
    ask = {"model": name(server), "messages": [SYSTEM, *FRANCE], "options": steady(**options), "keep_alive": "1h30m", "stream": True}
    parsed = chat_lines(server, ask)
    assert "Paris" in said(parsed) and all(is_whole(parsed[-1][count]) for count in COUNTS), parsed
    (running,) = ok(get(server.url + "/api/ps"))["models"]
    assert 5300 < moment(running["expires_at"]) - time.time() <= 5400, running


def replay_of_obsidian_copilot(server):
    """The plugin Copilot of Obsidian: thoughts, and then the answer. Obsidian's pages have an origin of their own, which
    Ollama admits."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "tool", "content": "sunny", "tool_name": "unknown"}, {"role": "user", "content": "Well?"}]
    ask = {"model": name(server), "messages": talk, "stream": True, "options": steady(num_predict=120)}
    parsed = chat_lines(server, ask)
    thoughts = [bool(line["message"].get("thinking")) for line in parsed]
    assert said(parsed, "thinking") == SCRIPT.thought and said(parsed) == SCRIPT.answer, parsed
    assert thoughts == sorted(thoughts, reverse=True) and not parsed[-1]["message"]["content"], parsed
    assert is_whole(parsed[-1]["total_duration"], 1) and is_whole(parsed[-1]["eval_count"], 1), parsed[-1]

    origin = "app://obsidian.md"
    ask_first = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
    try:
        with opened(server, "/api/chat", method="OPTIONS", Origin=origin, **ask_first) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] in (origin, "*"), answer.headers
            assert "content-type" in answer.headers["Access-Control-Allow-Headers"].lower(), answer.headers
        assert said(chat_lines(server, ask, Origin=origin)) == SCRIPT.answer
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code} for {origin}: {error.read().decode()}") from None


TESTS = [replay_of_home_assistant, replay_of_vs_code_copilot, replay_of_codex_oss, replay_of_continue, replay_of_open_webui, replay_of_ollama_launch,
         replay_of_langflow, replay_of_n8n]
THINKING = [replay_of_zed, replay_of_obsidian_copilot]

"""Validates the answers of the server against OpenAI's published schemas.

OpenAI describes its API in a document (openapi.yaml of openai/openai-openapi). The official package `openai` has
pydantic models that are generated from this document. These models are used here, in the version that requirements.txt
pins. The client itself reads answers leniently, so each answer is validated strictly as it was received: no value is
converted, every required field must exist, and an unknown value of an enumeration is an error. The models allow
additional fields. The fields that this server adds are listed below, and any other field is an error too.
"""

import json
import urllib.error
import urllib.request

from server import ANSWER_SECONDS, model_id
from session import SCENARIO

try:
    import openai
    import pydantic
    from openai.pagination import SyncPage
    from openai.types import Completion, CreateEmbeddingResponse, ErrorObject, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
except ImportError:
    openai = None

# Fields that OpenAI does not have, by object: llama.cpp's timings, and fields of model lists that other servers have.
OURS = {
    "chat": {"timings"},
    "completion": {"timings"},
    "model": {
        "architecture", "supported_parameters", "max_model_len", "context_length", "meta", "status", "tool_call_parser",
        # Other names of the context's size, and Codex's own list.
        "max_context_length", "context_window", "models",
        # Anthropic's model list, which is the same route.
        "type", "display_name", "created_at", "lifecycle", "max_input_tokens", "max_tokens", "has_more", "first_id", "last_id",
    },
    # OpenAI's document has these fields in other places: `store` in requests, `bytes` in the log probabilities of whole
    # texts but not of deltas, `name` in calls but not in the event that ends the arguments of a call.
    "response": {"store", "bytes", "name", "warnings"},
    "embeddings": set(),
    "error": set(),
}


def validate(kind, text, ours):
    """Validates JSON text as a `kind` and returns the object. Fields that OpenAI does not have are an error, except
    those in OURS."""
    value = pydantic.TypeAdapter(kind).validate_json(text, strict=True)
    extra = set(extras(value)) - OURS[ours]
    assert not extra, f"fields that OpenAI does not have: {sorted(extra)}"
    return value


def extras(value):
    """The names of unknown fields in a model and its nested models."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


def ask(server, path, body=None, method=None):
    """Status and text, for any status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answer(server, path, body=None):
    status, text = ask(server, path, body)
    assert status == 200, f"{status}: {text}"
    return text


def events(server, path, body):
    """The data of each event of a stream, without the `[DONE]` of OpenAI's older formats."""
    lines = answer(server, path, {**body, "stream": True}).splitlines()
    data = [line[len("data: "):] for line in lines if line.startswith("data: ")]
    assert data, "no event"
    return [text for text in data if text != "[DONE]"]


def chats(server):
    base = {"model": model_id(server), "messages": SCENARIO["france"], "max_tokens": 12, "temperature": 0}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCENARIO["person"]}}
    return [
        base,
        {**base, "n": 2, "logprobs": True, "top_logprobs": 3, "temperature": 1, "seed": 1},
        {**base, "max_tokens": 1},
        {**base, "messages": SCENARIO["leo"], "max_tokens": 60, "response_format": schema},
        {**base, "messages": SCENARIO["weather"], "max_tokens": 60, "tools": SCENARIO["tools"], "tool_choice": "required"},
    ]


def published_chat_completion(server):
    reasons = set()
    for body in chats(server):
        for choice in validate(ChatCompletion, answer(server, "/v1/chat/completions", body), "chat").choices:
            reasons.add(choice.finish_reason)
            assert body.get("logprobs", False) == (choice.logprobs is not None)
    assert reasons == {"stop", "length", "tool_calls"}, reasons


def published_chat_completion_chunk(server):
    for body in chats(server):
        body = {**body, "stream_options": {"include_usage": True}}
        chunks = [validate(ChatCompletionChunk, text, "chat") for text in events(server, "/v1/chat/completions", body)]
        assert chunks[-1].usage.completion_tokens > 0 and chunks[-1].choices == []


def published_completion(server):
    base = {"model": model_id(server), "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    for body in [base, {**base, "echo": True, "logprobs": 2, "n": 2}, {**base, "max_tokens": 0, "echo": True, "logprobs": 0}]:
        # The document has no null for the first token of a prompt, which has no probability, but OpenAI's service sends
        # it.
        text = answer(server, "/v1/completions", body)
        if not body.get("echo"):
            validate(Completion, text, "completion")
            for event in events(server, "/v1/completions", body):
                validate_completion_event(event)
            continue
        whole = json.loads(text)
        for choice in whole["choices"]:
            scores = choice["logprobs"]
            assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
            for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"]:
                scores[name] = scores[name][1:]
        validate(Completion, json.dumps(whole), "completion")


def validate_completion_event(text):
    """The document describes events as completions, but only the last event of an answer has a finish reason."""
    event = json.loads(text)
    for choice in event["choices"]:
        if choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
    validate(Completion, json.dumps(event), "completion")


def published_models(server):
    listed = validate(SyncPage[Model], answer(server, "/v1/models"), "model")
    assert [model.id for model in listed.data] == [model_id(server)] and listed.object == "list"
    validate(Model, answer(server, f"/v1/models/{model_id(server)}"), "model")


def published_embeddings(server):
    body = {"model": model_id(server), "input": ["Paris", "a penguin"]}
    embeddings = validate(CreateEmbeddingResponse, answer(server, "/v1/embeddings", body), "embeddings")
    assert [item.index for item in embeddings.data] == [0, 1]


def responses(server):
    base = {"model": model_id(server), "input": SCENARIO["france"], "max_output_tokens": 12, "temperature": 0}
    schema = {"type": "json_schema", "name": "person", "strict": True, "schema": SCENARIO["person"]}
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in SCENARIO["tools"]]
    return [
        {**base, "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"},
        {**base, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {**base, "max_output_tokens": 1},
        {**base, "input": SCENARIO["leo"], "max_output_tokens": 60, "text": {"format": schema}},
        {**base, "input": SCENARIO["weather"], "max_output_tokens": 60, "tools": tools, "tool_choice": "required"},
    ]


def published_response(server):
    statuses = set()
    for body in responses(server):
        response = validate(Response, answer(server, "/v1/responses", body), "response")
        statuses.add(response.status)
        kept = validate(Response, answer(server, f"/v1/responses/{response.id}"), "response")
        assert kept.output_text == response.output_text
        validate(ResponseItemList, answer(server, f"/v1/responses/{response.id}/input_items"), "response")
    assert statuses == {"completed", "incomplete"}, statuses


def published_response_events(server):
    kinds = set()
    for body in responses(server):
        for text in events(server, "/v1/responses", body):
            kinds.add(validate(ResponseStreamEvent, text, "response").type)
    wanted = {
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed",
        "response.incomplete",
    }
    assert kinds == wanted, kinds ^ wanted


def published_errors(server):
    model = model_id(server)
    hello = [{"role": "user", "content": "Hi"}]
    for wanted, method, path, body in [
        (400, "POST", "/v1/chat/completions", {}),
        (400, "POST", "/v1/chat/completions", {"model": model, "messages": hello, "temperature": 3}),
        (404, "POST", "/v1/chat/completions", {"model": "none", "messages": hello}),
        (400, "POST", "/v1/completions", {"model": model, "prompt": []}),
        (400, "POST", "/v1/embeddings", {"model": model, "input": ""}),
        (404, "GET", "/v1/models/none", None),
        (400, "POST", "/v1/responses", {"model": model, "input": 1}),
        (404, "GET", "/v1/responses/none", None),
        (404, "GET", "/none", None),
        (405, "GET", "/v1/chat/completions", None),
    ]:
        status, text = ask(server, path, body, method)
        assert status == wanted, f"{method} {path}: {status}"
        validate(ErrorObject, json.dumps(json.loads(text)["error"]), "error")


def published_schemas_refuse_broken_answers(server):
    """The validation would be useless if it accepted everything."""
    body = chats(server)[0]
    chat = json.loads(answer(server, "/v1/chat/completions", body))
    event = json.loads(events(server, "/v1/responses", responses(server)[0])[-1])
    first = chat["choices"][0]
    for kind, ours, broken in [
        (ChatCompletion, "chat", {**chat, "object": "chat.completions"}),
        (ChatCompletion, "chat", {**chat, "created": str(chat["created"])}),
        (ChatCompletion, "chat", {**chat, "choices": [{**first, "finish_reason": "ended"}]}),
        (ChatCompletion, "chat", {**chat, "choices": [{**first, "message": {"content": "Hi"}}]}),
        (ChatCompletion, "chat", {name: value for name, value in chat.items() if name != "model"}),
        (ChatCompletion, "chat", {**chat, "usages": {}}),
        (ResponseStreamEvent, "response", {**event, "type": "response.done"}),
        (ResponseStreamEvent, "response", {**event, "sequence_number": None}),
        (ErrorObject, "error", {"type": "t", "param": None, "code": None}),
    ]:
        try:
            validate(kind, json.dumps(broken), ours)
        except (pydantic.ValidationError, AssertionError):
            continue
        raise AssertionError(f"this was accepted: {broken}")


TESTS = [
    published_chat_completion, published_chat_completion_chunk, published_completion, published_models, published_embeddings,
    published_response, published_response_events, published_errors, published_schemas_refuse_broken_answers,
]

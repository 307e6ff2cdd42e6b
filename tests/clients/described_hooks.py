"""Adapts the requests of schemathesis to one server: its model name, and short answers. `schemathesis` loads this file
(SCHEMATHESIS_HOOKS)."""

import os

import jsonschema_rs
import schemathesis

MODEL = os.environ["UNICORN_MODEL"]
CHATS = ["/v1/chat/completions", "/v1/chat/completions/input_tokens"]
# The fields that limit an answer, by route. Requests without them get them.
MOST = 4
BOUNDS = {
    "/v1/chat/completions": ["max_tokens", "max_completion_tokens"],
    "/v1/completions": ["max_tokens"],
    "/v1/responses": ["max_output_tokens"],
}


@schemathesis.hook
def before_call(context, case, kwargs):
    """Replaces valid parts of a request by other valid ones, so that a body that the server must refuse is still
    refused."""
    if case.operation.path == "/v1/models/{id}" and len(case.path_parameters["id"]) % 2:
        case.path_parameters["id"] = MODEL
    body = case.body
    if case.method.upper() != "POST" or not isinstance(body, dict):
        return
    # The document allows any string as a model name, and the server answers nearly all of them with 404.
    if isinstance(body.get("model"), str) and len(body["model"]) % 8 != 7:
        body["model"] = MODEL
    # The required fields of a message depend on its role. The document says this only in text.
    if case.operation.path in CHATS and isinstance(body.get("messages"), list):
        is_sound = message_validator(case.operation.schema.raw_schema)
        body["messages"] = [{"role": "user", "content": "Hi"} if is_sound(message) else message for message in body["messages"]]
    for name in BOUNDS.get(case.operation.path, []):
        # A number that is not an integer, or out of bounds, is not changed.
        if body.get(name) is None or is_more(body[name]):
            body[name] = MOST
    if case.operation.path == "/v1/messages" and is_more(body.get("max_tokens")):
        body["max_tokens"] = MOST
    # Options of a stream need a stream. The document says this only in text.
    if body.get("stream_options") is not None and body.get("stream") in (None, False):
        body["stream"] = True
    if type(body.get("n")) is int and 2 < body["n"] <= 128:
        body["n"] = 2


def is_more(tokens):
    """Whether the number requests a long answer. 1000.0 is an integer too, and -1 = the rest of the context."""
    return type(tokens) in (int, float) and (MOST < tokens < 2**32 or tokens == -1) and tokens == int(tokens)


def message_validator(document):
    """Returns a function that says whether the document allows a message. It refuses all messages with tool calls,
    which the requests keep unchanged."""
    message = {"$ref": "#/components/schemas/ChatMessage", "components": document["components"]}
    validator = jsonschema_rs.Draft202012Validator(message)
    return lambda message: validator.is_valid(message) and not message.get("tool_calls")

"""What schemathesis sends, made fit for one server: its model, and short answers. Loaded by `schemathesis` itself (SCHEMATHESIS_HOOKS)."""

import os

import schemathesis

MODEL = os.environ["UNICORN_MODEL"]
CHATS = ["/v1/chat/completions", "/v1/chat/completions/input_tokens"]
# The field that bounds an answer, by route; where it may be left out, it is put in.
MOST = 4
BOUNDS = {
    "/v1/chat/completions": ["max_tokens", "max_completion_tokens"],
    "/v1/completions": ["max_tokens"],
    "/v1/responses": ["max_output_tokens"],
}


@schemathesis.hook
def before_call(context, case, kwargs):
    """Replaces what is sound by what is sound too, so that a body that was to be refused still is."""
    if case.operation.path == "/v1/models/{id}" and len(case.path_parameters["id"]) % 2:
        case.path_parameters["id"] = MODEL
    body = case.body
    if case.method.upper() != "POST" or not isinstance(body, dict):
        return
    # Any string is a model's name as far as the document goes, and nearly all of them are 404.
    if isinstance(body.get("model"), str) and len(body["model"]) % 8 != 7:
        body["model"] = MODEL
    # Which fields a message needs depends on its role, which the document says in words alone.
    if case.operation.path in CHATS and isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "Hi"} if is_sound(message) else message for message in body["messages"]]
    for name in BOUNDS.get(case.operation.path, []):
        # A number that is no integer, or out of bounds, stays.
        if body.get(name) is None or is_more(body[name]):
            body[name] = MOST
    if case.operation.path == "/v1/messages" and is_more(body.get("max_tokens")):
        body["max_tokens"] = MOST
    # Options of a stream need a stream, which the document says in words alone.
    if body.get("stream_options") is not None and body.get("stream") in (None, False):
        body["stream"] = True
    if type(body.get("n")) is int and 2 < body["n"] <= 128:
        body["n"] = 2


def is_more(tokens):
    """Whether it asks for a long answer; 1000.0 is an integer too, and -1 is what the context holds."""
    return type(tokens) in (int, float) and (MOST < tokens < 2**32 or tokens == -1) and tokens == int(tokens)


ROLES = ["system", "developer", "user", "assistant", "tool"]


def is_sound(message):
    """Whether the document allows the message, calls of tools left out."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content = message.get("content")
    is_part = lambda part: isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return (
        (content is None or isinstance(content, str) or (isinstance(content, list) and all(map(is_part, content))))
        and not message.get("tool_calls") and isinstance(message.get("tool_calls", []), (list, type(None)))
        and isinstance(message.get("tool_call_id", ""), (str, type(None)))
        and (message.get("function_call") is None or message["function_call"] is False)
    )

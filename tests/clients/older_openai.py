"""Streamed tool calls for users of older `openai` packages. `.stream()` of openai before 3.0 reads one entry of each
index from the first chunk that has any. test_openai.py runs these tests in separate environments."""

import json

import openai
from server import ANSWER_SECONDS, model_id
from session import SCENARIO

WEATHER, TOOLS = SCENARIO["weather"], SCENARIO["tools"]
BOTH = [{"role": "user", "content": "What is the weather in Oslo and roll 2 dice with 6 sides."}]


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)


def streamed(server, messages, **fields):
    """The choices of the completion that the package builds from a stream, and the events of the stream."""
    fields = {"tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields}
    with sdk(server).chat.completions.stream(model=model_id(server), messages=messages, **fields) as stream:
        events = list(stream)
        return stream.get_final_completion().choices, events


def calls_of(choice):
    assert choice.finish_reason == "tool_calls", choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def older_openai_streams_a_tool_call(server):
    forced = {"type": "function", "function": {"name": "get_weather"}}
    for more in [{}, {"tool_choice": "required"}, {"tool_choice": forced, "stream_options": {"include_usage": True}}]:
        (choice,), events = streamed(server, WEATHER, **more)
        assert calls_of(choice) == [("get_weather", {"city": "Paris"})], choice
        (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert json.loads(done.arguments) == {"city": "Paris"}, done


def older_openai_streams_several_calls(server):
    (choice,), _ = streamed(server, BOTH, tool_choice="required")
    assert calls_of(choice) == [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})], choice
    assert len({call.id for call in choice.message.tool_calls}) == 2, choice


def older_openai_streams_calls_of_several_answers(server):
    choices, _ = streamed(server, WEATHER, n=2)
    assert [calls_of(choice) for choice in choices] == [[("get_weather", {"city": "Paris"})]] * 2, choices


def older_openai_streams_a_call_of_a_response(server):
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    fields = {"input": BOTH[0]["content"], "tools": tools, "tool_choice": "required", "temperature": 0, "max_output_tokens": 120}
    with sdk(server).responses.stream(model=model_id(server), **fields) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        calls = stream.get_final_response().output
    wanted = [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == wanted, calls
    assert [json.loads(event.arguments) for event in done] == [arguments for _, arguments in wanted], done


TESTS = [
    older_openai_streams_a_tool_call, older_openai_streams_several_calls, older_openai_streams_calls_of_several_answers,
    older_openai_streams_a_call_of_a_response,
]

"""What users of the official anthropic package see. test_openai.py runs these tests with its server."""

import time

from raised import raised
from server import ANSWER_SECONDS
from session import SCENARIO

try:
    import anthropic
except ImportError:
    anthropic = None

# This version of the package has no parameter for the temperature.
GREEDY = {"extra_body": {"temperature": 0}}
FRANCE = SCENARIO["france"]


def sdk(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", timeout=ANSWER_SECONDS, max_retries=0, **options)


def model_id(server):
    return sdk(server).models.list().data[0].id


def create(server, **fields):
    fields = {"messages": FRANCE, "max_tokens": 48, **GREEDY, **fields}
    return sdk(server).messages.create(model=model_id(server), **fields)


def anthropic_lists_and_retrieves_the_model(server):
    (model,) = sdk(server).models.list(limit=1)  # this requests pages until there are no more
    assert (model.type, model.lifecycle, model.display_name) == ("model", "active", model.id) and model.max_input_tokens > 0, model
    assert abs(model.created_at.timestamp() - time.time()) < 86400, model
    assert sdk(server).models.retrieve(model.id) == model
    error = raised(anthropic.NotFoundError, lambda: sdk(server).models.retrieve("claude-opus-4-5"))
    assert error.type == "not_found_error" and "server.model_aliases" in error.api_message and error.request_id, error.body


def anthropic_answers_paris(server):
    answer = create(server)
    assert [block.type for block in answer.content] == ["text"] and "Paris" in answer.content[0].text, answer
    assert answer.stop_reason == "end_turn" and answer.role == "assistant" and answer._request_id, answer
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 5 and usage.output_tokens > 0, usage


def anthropic_streams_the_same_answer(server):
    whole = create(server).content[0].text
    fields = {"model": model_id(server), "messages": FRANCE, "max_tokens": 48, **GREEDY}
    with sdk(server).messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text and final.stop_reason == "end_turn", (text, final)
    assert final.usage.output_tokens > 0, final.usage
    names = [event.type for event in sdk(server).messages.create(stream=True, **fields)]
    assert names[:2] == ["message_start", "content_block_start"], names
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"], names
    assert set(names[2:-3]) == {"content_block_delta"}, names


def anthropic_counts_the_tokens_of_a_prompt(server):
    conversation = {"system": "Be brief.", "messages": FRANCE}
    count = sdk(server).messages.count_tokens(model=model_id(server), **conversation).input_tokens
    usage = create(server, **conversation).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens, (count, usage)


def anthropic_continues_a_given_answer(server):
    beginning = "The capital of France"
    answer = create(server, messages=[*FRANCE, {"role": "assistant", "content": beginning}])
    assert answer.content[0].text == create(server).content[0].text.removeprefix(beginning), answer
    talk = [{"role": "user", "content": "My locker number is 4821."}, {"role": "assistant", "content": [{"type": "text", "text": "Your locker number is 4821."}]}]
    answer = create(server, messages=[*talk, {"role": "user", "content": "What is my locker number?"}])
    assert "4821" in answer.content[0].text, answer


def anthropic_gets_the_stop_reason(server):
    answer = create(server, stop_sequences=["never said", "Paris"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris") and "Paris" not in answer.content[0].text, answer
    answer = create(server, max_tokens=2)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 2, answer
    # A very large max_tokens is limited by the context of the model.
    assert create(server, max_tokens=64_000).stop_reason == "end_turn"


def anthropic_parses_into_a_pydantic_model(server):
    import pydantic

    class Verdict(pydantic.BaseModel):
        yes: bool

    fields = {"model": model_id(server), "messages": FRANCE, "max_tokens": 100, **GREEDY}
    assert isinstance(sdk(server).messages.parse(output_format=Verdict, **fields).parsed_output, Verdict)


def tool(name, description, **properties):
    return {"name": name, "description": description, "input_schema": {"type": "object", "properties": properties, "required": list(properties)}}


TOOLS = [
    tool("get_weather", "Get the current weather in a city", city={"type": "string", "description": "Name of the city"}),
    tool("roll_dice", "Roll dice", count={"type": "integer", "description": "How many dice"}, sides={"type": "integer", "description": "Sides of each"}),
]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
BOTH = [{"role": "user", "content": "What is the weather in Oslo and roll 2 dice with 6 sides."}]


def calls_of(message):
    assert message.stop_reason == "tool_use" and all(block.type == "tool_use" for block in message.content), message
    assert len({block.id for block in message.content}) == len(message.content), message
    return [(block.name, block.input) for block in message.content]


def anthropic_calls_a_tool_and_reads_its_result(server):
    message = create(server, messages=WEATHER, tools=TOOLS)
    assert calls_of(message) == [("get_weather", {"city": "Paris"})], message
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "rain, 912 degrees"}
    talk = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = create(server, messages=talk, tools=TOOLS)
    assert answer.stop_reason == "end_turn" and "rain, 912 degrees" in answer.content[0].text, answer
    count = sdk(server).messages.count_tokens(model=model_id(server), messages=talk, tools=TOOLS).input_tokens
    assert count == answer.usage.input_tokens + answer.usage.cache_read_input_tokens, (count, answer.usage)
    # And an answer in text again.
    talk += [{"role": "assistant", "content": answer.content}, *FRANCE]
    assert "Paris" in create(server, messages=talk, tools=TOOLS).content[0].text


def anthropic_streams_the_same_calls(server):
    fields = {"messages": BOTH, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 120}
    whole = create(server, **fields)
    assert calls_of(whole) == [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})], whole
    with sdk(server).messages.stream(model=model_id(server), **GREEDY, **fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert calls_of(final) == calls_of(whole) and final.usage.output_tokens == whole.usage.output_tokens, final
    assert [event.content_block.input for event in events if event.type == "content_block_stop"] == [block.input for block in whole.content], events
    assert sum(event.type == "input_json" for event in events) > 4, events
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": text} for block, text in zip(final.content, ["sunny", "7"])]
    # The results may be in any order.
    talk = [*BOTH, {"role": "assistant", "content": final.content}, {"role": "user", "content": results[::-1]}]
    answer = create(server, messages=talk, tools=TOOLS).content[0].text
    assert answer == "According to get_weather: sunny\nAccording to roll_dice: 7", answer


def anthropic_tool_runner_calls_functions(server):
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city

        Args:
            city: Name of the city
        """
        asked.append(city)
        return "rain, 912 degrees"

    runner = sdk(server).beta.messages.tool_runner(model=model_id(server), max_tokens=60, tools=[get_weather], messages=WEATHER, **GREEDY)
    answer = runner.until_done()
    assert asked == ["Paris"] and "rain, 912 degrees" in answer.content[0].text, (asked, answer)


def anthropic_obeys_the_tool_choice(server):
    named = {"type": "tool", "name": "roll_dice", "disable_parallel_tool_use": True}
    message = create(server, tools=TOOLS, tool_choice=named, max_tokens=200)
    if message.stop_reason != "max_tokens":
        ((name, arguments),) = calls_of(message)
        assert name == "roll_dice" and sorted(arguments) == ["count", "sides"] and all(isinstance(n, int) for n in arguments.values()), message
    assert "Paris" in create(server, tools=TOOLS).content[0].text
    none = create(server, messages=WEATHER, tools=TOOLS, tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn" and none.content[0].type == "text", none


def anthropic_gets_errors_about_invalid_tools(server):
    result = [*WEATHER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]}]
    for fields, named in [
        ({"messages": result, "tools": TOOLS}, "messages[1].content[0].tool_use_id"), ({"tools": TOOLS[:1] * 2}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ]:
        error = raised(anthropic.BadRequestError, lambda: create(server, **fields))
        assert error.api_message.startswith(named), (fields, error.body)


def anthropic_errors_have_the_right_class(server):
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    for fields in [{"messages": []}, {"max_tokens": 0}, {"extra_body": {"temperature": 2}}, {"messages": [{"role": "user", "content": [image]}]}]:
        error = raised(anthropic.BadRequestError, lambda fields=fields: create(server, **fields))
        assert error.type == "invalid_request_error" and error.request_id, (fields, error.body)
        assert error.body["request_id"] == error.request_id, error.body
    error = raised(anthropic.NotFoundError, lambda: sdk(server).messages.create(model="claude", messages=FRANCE, max_tokens=5))
    assert error.type == "not_found_error" and "claude" in error.api_message, error.body
    too_long = [{"role": "user", "content": "count to five and back, please. " * 4000}]
    assert "tokens" in raised(anthropic.BadRequestError, lambda: create(server, messages=too_long)).api_message


TESTS = [
    anthropic_lists_and_retrieves_the_model, anthropic_answers_paris, anthropic_streams_the_same_answer, anthropic_counts_the_tokens_of_a_prompt,
    anthropic_continues_a_given_answer, anthropic_gets_the_stop_reason, anthropic_parses_into_a_pydantic_model,
    anthropic_calls_a_tool_and_reads_its_result, anthropic_streams_the_same_calls, anthropic_tool_runner_calls_functions,
    anthropic_obeys_the_tool_choice, anthropic_gets_errors_about_invalid_tools,
    anthropic_errors_have_the_right_class,
]

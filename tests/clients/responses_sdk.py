"""What users of /v1/responses in the official openai package see. test_openai.py runs these tests with its server."""

import json

from raised import raised
from server import ANSWER_SECONDS, model_id
from session import SCENARIO

try:
    import openai
except ImportError:
    openai = None

FRANCE = SCENARIO["france"][0]["content"]


def sdk(server, key="unused"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, timeout=ANSWER_SECONDS, max_retries=0)


def fields(server, **more):
    return {"model": model_id(server), "input": FRANCE, "max_output_tokens": 48, "temperature": 0, **more}


def create(server, **more):
    return sdk(server).responses.create(**fields(server, **more))


def responses_answer_paris(server):
    response = create(server, instructions="Be brief.", metadata={"a": "b"})
    assert "Paris" in response.output_text and response.status == "completed", response
    assert response.metadata == {"a": "b"} and response.error is None and response.incomplete_details is None, response
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.input_tokens > 5, usage
    response = create(server, max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens", response
    assert response.usage.output_tokens == 2, response.usage


def responses_stream_the_same_answer(server):
    whole = create(server).output_text
    with sdk(server).responses.stream(**fields(server)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole and final.status == "completed", (final, whole)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole and deltas[-1].snapshot == whole, deltas
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    raw = [event.type for event in sdk(server).responses.create(stream=True, **fields(server))]
    assert (raw[0], raw[-1]) == ("response.created", "response.completed"), raw


def responses_continue_from_a_stored_one(server):
    first = create(server, input="My locker number is 4821.")
    second = create(server, input="What is my locker number?", previous_response_id=first.id)
    assert "4821" in second.output_text and second.previous_response_id == first.id, second
    assert sdk(server).responses.retrieve(second.id) == second
    talk = [{"role": "user", "content": "My locker number is 4821."}, *first.output, {"role": "user", "content": "What is my locker number?"}]
    assert create(server, input=talk, store=False).output_text == second.output_text
    sdk(server).responses.delete(first.id)
    raised(openai.NotFoundError, lambda: sdk(server).responses.retrieve(first.id))
    error = raised(openai.BadRequestError, lambda: create(server, previous_response_id=first.id))
    assert error.code == "previous_response_not_found" and error.param == "previous_response_id", error.body
    # This server needs no key, so a key in a request does not change the client's identity.
    assert sdk(server, "another").responses.retrieve(second.id) == second
    unkept = create(server, store=False)
    raised(openai.NotFoundError, lambda: sdk(server).responses.retrieve(unkept.id))


def responses_parse_into_a_pydantic_model(server):
    import pydantic

    class Verdict(pydantic.BaseModel):
        yes: bool

    assert isinstance(sdk(server).responses.parse(text_format=Verdict, **fields(server)).output_parsed, Verdict)
    with sdk(server).responses.stream(text_format=Verdict, **fields(server)) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Verdict)


def responses_carry_log_probabilities(server):
    response = create(server, include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == response.output_text, tokens
    assert all(len(token.top_logprobs) == 2 for token in tokens), tokens


def function(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": True}


TOOLS = [
    function("get_weather", "Get the current weather in a city", city={"type": "string", "description": "Name of the city"}),
    function("roll_dice", "Roll dice", count={"type": "integer", "description": "How many dice"}, sides={"type": "integer", "description": "Sides of each"}),
]
WEATHER = "What is the weather in Paris?"
BOTH = "What is the weather in Oslo and roll 2 dice with 6 sides."


def calls_of(response):
    assert response.status == "completed" and all(item.type == "function_call" for item in response.output), response
    assert len({item.call_id for item in response.output}) == len(response.output), response
    return [(item.name, json.loads(item.arguments)) for item in response.output]


def outputs(response, *texts):
    return [{"type": "function_call_output", "call_id": item.call_id, "output": text} for item, text in zip(response.output, texts)]


def responses_call_a_tool_and_read_its_result(server):
    first = create(server, input=WEATHER, tools=TOOLS)
    assert calls_of(first) == [("get_weather", {"city": "Paris"})] and first.output_text == "", first
    assert (first.tool_choice, [tool.name for tool in first.tools]) == ("auto", ["get_weather", "roll_dice"]), first
    result = outputs(first, "rain, 912 degrees")
    second = create(server, input=result, tools=TOOLS, previous_response_id=first.id)
    assert "rain, 912 degrees" in second.output_text, second
    # A client that keeps the conversation itself gets the same answer.
    talk = [{"role": "user", "content": WEATHER}, *first.output, *result]
    assert create(server, input=talk, tools=TOOLS, store=False).output_text == second.output_text
    # And an answer in text again.
    assert "Paris" in create(server, tools=TOOLS, previous_response_id=second.id).output_text
    listed = list(sdk(server).responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"], listed
    assert listed[1].to_dict() == first.output[0].to_dict(), listed


def responses_stream_the_same_calls(server):
    asked = fields(server, input=BOTH, tools=TOOLS, tool_choice="required", max_output_tokens=120)
    whole = sdk(server).responses.create(**asked)
    assert calls_of(whole) == [("get_weather", {"city": "Oslo"}), ("roll_dice", {"count": 2, "sides": 6})], whole
    with sdk(server).responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert calls_of(final) == calls_of(whole), (final, whole)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    for at, item in enumerate(final.output):
        of_it = [event for event in deltas if event.output_index == at]
        assert len(of_it) > 1 and of_it[-1].snapshot == item.arguments and {event.item_id for event in of_it} == {item.id}, of_it
    # The results may be in any order.
    answer = create(server, input=outputs(final, "sunny", "7")[::-1], tools=TOOLS, previous_response_id=final.id).output_text
    assert answer == "According to get_weather: sunny\nAccording to roll_dice: 7", answer


def responses_parse_calls_into_a_pydantic_model(server):
    import pydantic

    class GetWeather(pydantic.BaseModel):
        """Get the current weather in a city"""

        city: str = pydantic.Field(description="Name of the city")

    asked = fields(server, input=WEATHER, tools=[openai.pydantic_responses_function_tool(GetWeather, name="get_weather")])
    (call,) = sdk(server).responses.parse(**asked).output
    assert call.parsed_arguments == GetWeather(city="Paris"), call


def responses_obey_the_tool_choice(server):
    named = {"type": "function", "name": "roll_dice"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in [named, allowed]:
        response = create(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
        if response.status == "incomplete":
            continue
        ((name, arguments),) = calls_of(response)
        assert name == "roll_dice" and sorted(arguments) == ["count", "sides"] and all(isinstance(n, int) for n in arguments.values()), response
    assert "Paris" in create(server, tools=TOOLS).output_text
    none = create(server, input=WEATHER, tools=TOOLS, tool_choice="none")
    assert none.output_text and none.tool_choice == "none", none


def responses_get_errors_about_invalid_tools(server):
    result = [{"type": "function_call_output", "call_id": "call_1", "output": "rain"}]
    for more, param in [
        ({"input": result, "tools": TOOLS}, "input[0].call_id"), ({"tools": TOOLS[:1] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ]:
        error = raised(openai.BadRequestError, lambda: create(server, **more))
        assert error.param == param, (more, error.body)
    kept = create(server)
    error = raised(openai.BadRequestError, lambda: sdk(server).responses.cancel(kept.id))
    assert "Cannot cancel a synchronous response." in error.message, error.body


def responses_leave_tools_out_that_are_no_functions(server):
    response = create(server, tools=[{"type": "web_search"}, *TOOLS])
    assert [tool.name for tool in response.tools] == [tool["name"] for tool in TOOLS], response.tools
    [warning] = response.model_extra["warnings"]
    assert "tools[0]" in warning and "web_search" in warning, warning


def responses_errors_have_the_right_class(server):
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]
    for more in [{"input": []}, {"temperature": 3}, {"background": True}, {"input": image}, {"truncation": "some"}]:
        error = raised(openai.BadRequestError, lambda more=more: create(server, **more))
        assert error.type == "invalid_request_error" and error.param, (more, error.body)
    error = raised(openai.NotFoundError, lambda: create(server, model="gpt-none"))
    assert error.code == "model_not_found", error.body
    error = raised(openai.NotFoundError, lambda: sdk(server).responses.retrieve("resp_none"))
    assert "not found" in error.message, error.body


TESTS = [
    responses_answer_paris, responses_stream_the_same_answer, responses_continue_from_a_stored_one,
    responses_parse_into_a_pydantic_model, responses_carry_log_probabilities, responses_call_a_tool_and_read_its_result,
    responses_stream_the_same_calls, responses_parse_calls_into_a_pydantic_model, responses_obey_the_tool_choice,
    responses_get_errors_about_invalid_tools, responses_leave_tools_out_that_are_no_functions,
    responses_errors_have_the_right_class,
]

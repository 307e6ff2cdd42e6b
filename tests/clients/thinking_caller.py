"""What clients see of a model that thinks, calls a tool in its own syntax, and answers after the result: the checkpoint of
scripted_model.py. test_openai.py runs these tests with a server of its own."""

import asyncio
import json
import re
import tempfile
from pathlib import Path

import anthropic_sdk
import langchain_client
import scripted_model
from server import ANSWER_SECONDS, model_id
from session import SCENARIO
from terminal_chat import Terminal

try:
    import openai
except ImportError:
    openai = None
try:
    import agents
except ImportError:
    agents = None

SCRIPT = scripted_model.Script()
WEATHER, TOOLS = SCENARIO["weather"], SCENARIO["tools"]
ARGUMENTS = json.loads(SCRIPT.arguments)


def has_no_syntax(*texts):
    for text in texts:
        assert not any(mark in (text or "") for mark in scripted_model.MARKS), text


# --- with the openai package ----------------------------------------------------------------------------


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)


def ask(server, messages, **fields):
    fields = {"tools": TOOLS, "max_tokens": 120, "temperature": 0, **fields}
    return sdk(server).chat.completions.create(model=model_id(server), messages=messages, **fields)


def caller_thinks_calls_and_answers(server):
    whole = ask(server, WEATHER).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", SCRIPT.tool), whole
    assert json.loads(call.function.arguments) == ARGUMENTS and not whole.message.content, whole
    assert whole.message.reasoning_content == whole.message.reasoning == SCRIPT.thought, whole
    chunks = list(ask(server, WEATHER, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert thought == SCRIPT.thought and not any(delta.content for delta in deltas), deltas
    assert pieces[0].function.name == SCRIPT.tool and not any(piece.function.name for piece in pieces[1:]), pieces
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == ARGUMENTS and len(pieces) > 2, pieces
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1]), reasons
    message = {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [call.model_dump()]}
    talk = [*WEATHER, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = ask(server, talk).choices[0]
    assert (answer.message.content, answer.finish_reason) == (SCRIPT.answer, "stop") and not answer.message.tool_calls, answer


def caller_obeys_the_choice_of_tools_and_thoughts(server):
    quiet = ask(server, WEATHER, reasoning_effort="none").choices[0].message
    assert quiet.tool_calls[0].function.name == SCRIPT.tool and not getattr(quiet, "reasoning_content", None), quiet
    none = ask(server, WEATHER, tool_choice="none").choices[0]
    assert (none.message.content, none.finish_reason) == (SCRIPT.answer, "stop") and not none.message.tool_calls, none
    # The model wants to call the other tool. Its arguments are what this schema allows.
    parameters = {"type": "object", "properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"], "additionalProperties": False}
    dice = {"type": "function", "function": {"name": "roll", "parameters": parameters}}
    named = ask(server, WEATHER, tools=[*TOOLS, dice], tool_choice={"type": "function", "function": {"name": "roll"}}).choices[0]
    (call,) = named.message.tool_calls
    assert (call.function.name, named.finish_reason) == ("roll", "tool_calls") and json.loads(call.function.arguments)["sides"] in [6, 20], named
    short = ask(server, WEATHER, extra_body={"thinking_token_budget": 3}).choices[0].message
    assert len(short.reasoning_content) < len(SCRIPT.thought) and SCRIPT.thought.startswith(short.reasoning_content), short
    has_no_syntax(quiet.content, none.message.content, short.content, short.reasoning_content)


def caller_in_responses(server):
    tool = {"type": "function", "strict": False, **TOOLS[0]["function"]}
    with sdk(server).responses.stream(model=model_id(server), input=WEATHER, tools=[tool], temperature=0) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    thought, call = final.output
    assert (thought.type, call.type, call.name) == ("reasoning", "function_call", SCRIPT.tool), final
    assert thought.content[0].text == SCRIPT.thought and json.loads(call.arguments) == ARGUMENTS, final
    assert names.count("response.function_call_arguments.delta") > 1, names
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = sdk(server).responses.create(model=model_id(server), previous_response_id=final.id, input=[result], tools=[tool], temperature=0)
    assert more.output_text == SCRIPT.answer, more


OPENAI = [caller_thinks_calls_and_answers, caller_obeys_the_choice_of_tools_and_thoughts, caller_in_responses]


# --- with the packages anthropic and langchain-openai -----------------------------------------------------


def caller_in_messages(server):
    fields = {"tools": anthropic_sdk.TOOLS, "messages": WEATHER, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    fields |= {"model": model_id(server), **anthropic_sdk.GREEDY}
    with anthropic_sdk.sdk(server).messages.stream(**fields) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "tool_use"] and message.stop_reason == "tool_use", message
    assert message.content[0].thinking == SCRIPT.thought and message.content[1].input == ARGUMENTS, message
    assert kinds.count("thinking_delta") > 3 and kinds.count("input_json_delta") > 1 and "text_delta" not in kinds, kinds
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "sunny"}
    talk = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = anthropic_sdk.sdk(server).messages.create(**{**fields, "messages": talk})
    assert [block.type for block in answer.content] == ["thinking", "text"] and answer.content[1].text == SCRIPT.answer, answer


def sum_of(chunks):
    first, *others = chunks
    return sum(others, start=first)


def caller_in_langchain(server):
    weather = langchain_client.get_weather()
    model = langchain_client.chat(server, max_tokens=200).bind_tools([weather])
    question = langchain_client.HumanMessage(WEATHER[0]["content"])
    called = sum_of(model.stream([question]))
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [(SCRIPT.tool, ARGUMENTS)] and not called.content, called
    answer = model.invoke([question, called, weather.invoke(called.tool_calls[0])])
    assert answer.content == SCRIPT.answer and not answer.tool_calls, answer
    forced = langchain_client.chat(server, max_tokens=200).bind_tools([weather], tool_choice="get_weather", strict=True).invoke([question])
    assert [(call["name"], call["args"]) for call in forced.tool_calls] == [(SCRIPT.tool, ARGUMENTS)], forced


# --- with the OpenAI agents SDK ----------------------------------------------------------------------------


def agent_of(server, model, asked):
    # Traces would be sent to OpenAI.
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        asked.append(city)
        return "sunny"

    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)
    return agents.Agent(name="Weather", instructions="Be brief.", tools=[get_weather], model=model(model=model_id(server), openai_client=client))


def agent_runs_a_tool(server):
    for model in [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]:
        asked = []
        result = asyncio.run(agents.Runner.run(agent_of(server, model, asked), WEATHER[0]["content"], max_turns=3))
        assert (asked, result.final_output) == (["Paris"], SCRIPT.answer), (model, asked, result)


def agent_streams_a_tool_and_an_answer(server):
    async def run(model, asked):
        result = agents.Runner.run_streamed(agent_of(server, model, asked), WEATHER[0]["content"], max_turns=3)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return names, result.final_output

    for model in [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]:
        asked = []
        names, output = asyncio.run(run(model, asked))
        assert (asked, output) == (["Paris"], SCRIPT.answer), (model, asked, output)
        wanted = ["tool_called", "tool_output", "message_output_created"]
        assert [name for name in names if name in wanted] == wanted, (model, names)


AGENTS = [agent_runs_a_tool, agent_streams_a_tool_and_an_answer]


# --- with SmolLM2, whose template knows no tools ------------------------------------------------------------


def trained_model_in_langchain(server):
    weather = langchain_client.get_weather()
    forced = langchain_client.chat(server, max_tokens=100).bind_tools([weather], tool_choice="get_weather", strict=True)
    for called in [forced.invoke(WEATHER[0]["content"]), sum_of(forced.stream(WEATHER[0]["content"]))]:
        (call,) = called.tool_calls
        assert call["name"] == "get_weather" and list(call["args"]) == ["city"] and not called.content, called
        answer = langchain_client.chat(server, max_tokens=60).invoke(
            [langchain_client.HumanMessage(WEATHER[0]["content"]), called, weather.invoke(call)])
        assert answer.content and "<|im_" not in answer.content, answer


def trained_model_in_an_agent(server):
    for model in [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]:
        asked = []
        agent = agent_of(server, model, asked)
        # The model must call. What the tool returns is the agent's answer.
        agent.model_settings = agents.ModelSettings(tool_choice="required", max_tokens=100, temperature=0)
        agent.tool_use_behavior = "stop_on_first_tool"
        result = asyncio.run(agents.Runner.run(agent, WEATHER[0]["content"], max_turns=3))
        assert len(asked) == 1 and result.final_output == "sunny", (model, asked, result)


# --- at a terminal -------------------------------------------------------------------------------------------


def the_terminal_shows_thoughts_apart(server):
    with tempfile.TemporaryDirectory() as home, Terminal(home, "--model", str(server.model)) as chat:
        # Without tools, the thought is followed by the answer.
        chat.type("Hello\r").expect_match(r"first after.*> ")
        # The words of the thought are dim, those of the answer are not.
        dim = re.findall(r"\x1b\[2m(.*?)\x1b\[0m", chat.seen, re.DOTALL)
        assert "".join(dim).startswith(SCRIPT.thought), chat.seen
        plain = re.sub(r"\x1b\[2m.*?\x1b\[0m", "", chat.seen, flags=re.DOTALL)
        assert SCRIPT.answer in plain and SCRIPT.thought not in plain, chat.seen
        has_no_syntax(chat.seen)
        chat.type("\x04")
        assert chat.end() == 0


PLAIN = [the_terminal_shows_thoughts_apart]


def checkpoint(folder):
    """Writes the checkpoint into a folder below this one, and returns it."""
    return scripted_model.write(Path(folder) / "scripted", SCRIPT)

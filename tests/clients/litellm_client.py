"""What users of litellm see. It needs an older openai package than the other clients, so test_openai.py runs it in a
separate environment."""

import json
import os

# The price table of the package is used, so nothing is fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from raised import raised
from server import ANSWER_SECONDS, model_id
from session import SCENARIO

litellm.suppress_debug_info = True


def fields(server, provider="openai", **more):
    base = server.url if provider == "anthropic" else server.url + "/v1"
    given = {"model": f"{provider}/{model_id(server)}", "api_base": base, "api_key": "unused", "timeout": ANSWER_SECONDS, "max_retries": 0}
    return {**given, "temperature": 0, "max_tokens": 60, **more}


def ask(server, messages=SCENARIO["france"], **more):
    return litellm.completion(messages=messages, **fields(server, **more))


def streamed(server, **more):
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}, **more))
    return chunks, litellm.stream_chunk_builder(chunks)


def litellm_lists_the_model(server):
    found = litellm.get_valid_models(check_provider_endpoint=True, custom_llm_provider="openai", api_base=server.url + "/v1", api_key="unused")
    assert found == [model_id(server)], found


def litellm_answers_paris(server):
    for provider in ["openai", "hosted_vllm", "anthropic"]:
        answer = ask(server, provider=provider)
        assert "Paris" in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop", answer
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.prompt_tokens > 5, usage


def litellm_streams_the_same_answer(server):
    for provider in ["openai", "hosted_vllm", "anthropic"]:
        whole = ask(server, provider=provider)
        chunks, total = streamed(server, provider=provider)
        assert total.choices[0].message.content == whole.choices[0].message.content and len(chunks) > 3, total
        assert total.choices[0].finish_reason == "stop", total
        counts = [(usage.prompt_tokens, usage.completion_tokens) for usage in (total.usage, whole.usage)]
        assert counts[0] == counts[1], (provider, counts)


def the_call(message):
    (call,) = message.tool_calls
    assert call.id and call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}, call
    return call


def litellm_calls_a_tool_and_reads_its_result(server):
    tools, weather = SCENARIO["tools"], SCENARIO["weather"]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ["auto", "required", forced]:
        message = ask(server, weather, tools=tools, tool_choice=choice).choices[0].message
        result = {"role": "tool", "tool_call_id": the_call(message).id, "content": SCENARIO["result"]}
        answer = ask(server, [*weather, message, result], tools=tools).choices[0]
        assert SCENARIO["result"] in answer.message.content and not answer.message.tool_calls, answer
        _, total = streamed(server, messages=weather, tools=tools, tool_choice=choice)
        the_call(total.choices[0].message)
        assert total.choices[0].finish_reason == "tool_calls", total


def litellm_answers_by_a_schema(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCENARIO["person"], "strict": True}}
    answer = ask(server, SCENARIO["leo"], response_format=wanted)
    assert json.loads(answer.choices[0].message.content) == SCENARIO["answer"], answer
    _, total = streamed(server, messages=SCENARIO["leo"], response_format=wanted)
    assert json.loads(total.choices[0].message.content) == SCENARIO["answer"], total


def litellm_continues_a_text(server):
    given = {"prompt": "The capital of France", **fields(server, provider="text-completion-openai", max_tokens=8)}
    whole = litellm.text_completion(**given).choices[0].text
    text = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **given))
    assert whole and text == whole, (text, whole)


def litellm_embeds(server):
    given = {name: value for name, value in fields(server).items() if name not in ("temperature", "max_tokens")}
    answer = litellm.embedding(input=["Paris", "Oslo"], **given)
    first, second = (item["embedding"] for item in answer.data)
    assert len(first) == len(second) > 8 and first != second and answer.usage.prompt_tokens > 2, answer.usage


def litellm_errors_have_the_right_class(server):
    error = raised(litellm.NotFoundError, lambda: ask(server, model="openai/gpt-none"))
    assert error.status_code == 404 and "gpt-none" in error.message, error
    error = raised(litellm.BadRequestError, lambda: ask(server, extra_body={"temperature": 3}))
    assert (error.status_code, error.param, error.body["code"]) == (400, "temperature", "invalid_value"), error.body
    # It recognizes the class by the words of the message. Callers use the class: `context_window_fallbacks` depends on
    # it.
    long = [{"role": "user", "content": SCENARIO["too_long"] * 4000}]
    for provider in ["openai", "anthropic"]:
        error = raised(litellm.ContextWindowExceededError, lambda provider=provider: ask(server, long, provider=provider))
        assert error.status_code == 400, error


TESTS = [
    litellm_lists_the_model, litellm_answers_paris, litellm_streams_the_same_answer, litellm_calls_a_tool_and_reads_its_result,
    litellm_answers_by_a_schema, litellm_continues_a_text, litellm_embeds,
    litellm_errors_have_the_right_class,
]

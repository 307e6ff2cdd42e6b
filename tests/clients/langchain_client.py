"""What users of langchain-openai see. test_openai.py runs these tests with its server."""

import json

from raised import raised
from server import ANSWER_SECONDS, model_id
from session import SCENARIO

try:
    import langchain_openai
    from langchain_core import exceptions
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
except ImportError:
    langchain_openai = None

FRANCE, WEATHER, LEO = (SCENARIO[name][0]["content"] for name in ("france", "weather", "leo"))


def chat(server, **fields):
    fields = {"model": model_id(server), "temperature": 0, "max_tokens": 60, **fields}
    return langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0, **fields)


def get_weather():
    @tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city"""
        return SCENARIO["result"]

    return get_weather


def langchain_answers_paris(server):
    answer = chat(server).invoke(FRANCE)
    assert "Paris" in answer.content and answer.response_metadata["finish_reason"] == "stop", answer
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["input_tokens"] > 5, usage
    # Several concurrent requests, each in a separate thread.
    texts = [message.content for message in chat(server).batch([FRANCE] * 3)]
    assert texts == [answer.content] * 3, texts


def langchain_streams_the_same_answer(server):
    whole = chat(server).invoke(FRANCE)
    chunks = list(chat(server, stream_usage=True).stream(FRANCE))
    total = sum(chunks[1:], start=chunks[0])
    assert total.content == whole.content and len(chunks) > 3, total
    assert total.response_metadata["finish_reason"] == "stop", total
    counts = [[usage[name] for name in ("input_tokens", "output_tokens")] for usage in (total.usage_metadata, whole.usage_metadata)]
    assert counts[0] == counts[1], counts


def langchain_calls_a_tool_and_reads_its_result(server):
    weather = get_weather()
    free, forced = chat(server).bind_tools([weather]), chat(server).bind_tools([weather], tool_choice="get_weather", strict=True)
    for bound in [free, forced]:
        call = bound.invoke(WEATHER)
        assert [(made["name"], made["args"]) for made in call.tool_calls] == [("get_weather", {"city": "Paris"})], call
        result = weather.invoke(call.tool_calls[0])
        answer = free.invoke([HumanMessage(WEATHER), call, result])
        assert SCENARIO["result"] in answer.content and not answer.tool_calls, answer
    chunks = list(forced.stream(WEATHER))
    total = sum(chunks[1:], start=chunks[0])
    assert [(made["name"], made["args"]) for made in total.tool_calls] == [("get_weather", {"city": "Paris"})], total
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks) > 2, chunks


def langchain_answers_by_a_schema(server):
    person = {"title": "person", **SCENARIO["person"]}
    for fields in [{"method": "json_schema", "strict": True}, {"method": "json_schema"}]:
        answer = chat(server).with_structured_output(person, include_raw=True, **fields).invoke(LEO)
        assert answer["parsed"] == json.loads(answer["raw"].content) == SCENARIO["answer"], answer
    # A forced call of a tool whose parameters are the schema.
    answer = chat(server, max_tokens=200).with_structured_output(person, method="function_calling").invoke(LEO)
    assert list(answer) == person["required"] and isinstance(answer["age"], int), answer
    # The answer must be an object with any content.
    answer = chat(server, max_tokens=200).with_structured_output(None, method="json_mode").invoke(LEO)
    assert isinstance(answer, dict), answer


def langchain_uses_the_responses_api(server):
    model = chat(server, use_responses_api=True)
    answer = model.invoke(FRANCE)
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"] > 0, answer
    chunks = list(model.stream(FRANCE))
    assert sum(chunks[1:], start=chunks[0]).text == answer.text, chunks


def langchain_continues_a_text(server):
    model = langchain_openai.OpenAI(model=model_id(server), base_url=server.url + "/v1", api_key="unused", temperature=0, max_tokens=8, max_retries=0)
    text = model.invoke("The capital of France")
    assert text and "".join(model.stream("The capital of France")) == text, text


def langchain_embeds(server):
    # Otherwise it tokenizes texts with OpenAI's vocabulary, which belongs to another model and is fetched.
    model = langchain_openai.OpenAIEmbeddings(
        model=model_id(server), base_url=server.url + "/v1", api_key="unused", check_embedding_ctx_length=False, max_retries=0,
    )
    documents = model.embed_documents([FRANCE, WEATHER])
    assert documents[0] == model.embed_query(FRANCE) and len(documents[0]) == len(documents[1]) > 8


def langchain_errors_have_the_right_class(server):
    error = raised(exceptions.ModelNotFoundError, lambda: chat(server, model="gpt-none").invoke(FRANCE))
    assert (error.status_code, error.param, error.code) == (404, "model", "model_not_found"), error.body
    error = raised(exceptions.ModelInvalidRequestError, lambda: chat(server, temperature=3).invoke(FRANCE))
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error"), error.body
    # It recognizes the class by the words of the message.
    error = raised(exceptions.ContextOverflowError, lambda: chat(server).invoke(SCENARIO["too_long"] * 4000))
    assert (error.status_code, error.code) == (400, "context_length_exceeded"), error.body


TESTS = [
    langchain_answers_paris, langchain_streams_the_same_answer, langchain_calls_a_tool_and_reads_its_result,
    langchain_answers_by_a_schema, langchain_uses_the_responses_api, langchain_continues_a_text, langchain_embeds,
    langchain_errors_have_the_right_class,
]

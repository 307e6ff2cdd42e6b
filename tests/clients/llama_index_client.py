"""What users of LlamaIndex see, which reads only the first entry of `tool_calls` in each chunk. Its openai package is
older than that of the other clients, so test_openai.py runs it in a separate environment."""

import openai
import older_openai
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from raised import raised
from server import ANSWER_SECONDS, model_id
from session import SCENARIO

FRANCE, WEATHER, LEO = (SCENARIO[name][0]["content"] for name in ("france", "weather", "leo"))


class Person(BaseModel):
    name: str
    age: int
    pet: str


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return SCENARIO["result"]


TOOL = FunctionTool.from_defaults(get_weather)


def llm(server, **fields):
    fields = {"model": model_id(server), "temperature": 0, "max_tokens": 60, **fields}
    return OpenAILike(
        api_base=server.url + "/v1", api_key="unused", is_chat_model=True, is_function_calling_model=True,
        timeout=ANSWER_SECONDS, max_retries=0, **fields,
    )


def asked(text):
    return [ChatMessage(role="user", content=text)]


def llama_index_answers_paris(server):
    whole = llm(server).chat(asked(FRANCE)).message.content
    assert "Paris" in whole, whole
    chunks = list(llm(server).stream_chat(asked(FRANCE)))
    assert chunks[-1].message.content == whole == "".join(chunk.delta or "" for chunk in chunks), chunks[-1]


def llama_index_calls_a_tool_and_reads_its_result(server):
    model = llm(server)
    whole = model.chat_with_tools([TOOL], user_msg=WEATHER)
    streamed = list(model.stream_chat_with_tools([TOOL], user_msg=WEATHER))[-1]
    for answer in [whole, streamed]:
        (call,) = model.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"}), call
        result = ChatMessage(role="tool", content=TOOL(**call.tool_kwargs).content, additional_kwargs={"tool_call_id": call.tool_id})
        told = model.chat_with_tools([TOOL], chat_history=[*asked(WEATHER), answer.message, result]).message
        assert SCENARIO["result"] in told.content, told


def llama_index_answers_by_a_schema(server):
    answer = llm(server, max_tokens=200).as_structured_llm(Person).chat(asked(LEO)).raw
    assert isinstance(answer, Person), answer


def llama_index_errors_have_the_right_class(server):
    error = raised(openai.NotFoundError, lambda: llm(server, model="gpt-none").chat(asked(FRANCE)))
    assert error.code == "model_not_found", error.body


TESTS = [
    llama_index_answers_paris, llama_index_calls_a_tool_and_reads_its_result, llama_index_answers_by_a_schema,
    llama_index_errors_have_the_right_class, *older_openai.TESTS,
]

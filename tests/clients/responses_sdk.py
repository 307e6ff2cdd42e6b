"""What users of the official openai package see of /v1/responses; test_openai.py runs these against its server."""

from raised import raised

try:
    import openai
except ImportError:
    openai = None

ANSWER_SECONDS = 300
FRANCE = "What is the capital of France?"


def sdk(server, key="unused"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, timeout=ANSWER_SECONDS, max_retries=0)


def fields(server, **more):
    return {"model": sdk(server).models.list().data[0].id, "input": FRANCE, "max_output_tokens": 48, "temperature": 0, **more}


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


def responses_go_on_from_one_that_was_kept(server):
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
    raised(openai.NotFoundError, lambda: sdk(server, "another").responses.retrieve(second.id))
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


def responses_errors_are_of_their_class(server):
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]
    for more in [{"input": []}, {"temperature": 3}, {"background": True}, {"input": image}, {"truncation": "some"}]:
        error = raised(openai.BadRequestError, lambda more=more: create(server, **more))
        assert error.type == "invalid_request_error" and error.param, (more, error.body)
    error = raised(openai.NotFoundError, lambda: create(server, model="gpt-none"))
    assert error.code == "model_not_found", error.body
    error = raised(openai.NotFoundError, lambda: sdk(server).responses.retrieve("resp_none"))
    assert "not found" in error.message, error.body


TESTS = [
    responses_answer_paris, responses_stream_the_same_answer, responses_go_on_from_one_that_was_kept,
    responses_parse_into_a_pydantic_model, responses_carry_log_probabilities, responses_errors_are_of_their_class,
]

"""What users of the official anthropic package see; test_openai.py runs these against its server."""

from raised import raised

try:
    import anthropic
except ImportError:
    anthropic = None

ANSWER_SECONDS = 300
# This version of the package has no parameter for it.
GREEDY = {"extra_body": {"temperature": 0}}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def sdk(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", timeout=ANSWER_SECONDS, max_retries=0, **options)


def model_id(server):
    return sdk(server).models.list().data[0].id


def create(server, **fields):
    fields = {"messages": FRANCE, "max_tokens": 48, **GREEDY, **fields}
    return sdk(server).messages.create(model=model_id(server), **fields)


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


def anthropic_goes_on_from_what_it_is_given(server):
    beginning = "The capital of France"
    answer = create(server, messages=[*FRANCE, {"role": "assistant", "content": beginning}])
    assert answer.content[0].text == create(server).content[0].text.removeprefix(beginning), answer
    talk = [{"role": "user", "content": "My locker number is 4821."}, {"role": "assistant", "content": [{"type": "text", "text": "Your locker number is 4821."}]}]
    answer = create(server, messages=[*talk, {"role": "user", "content": "What is my locker number?"}])
    assert "4821" in answer.content[0].text, answer


def anthropic_is_told_what_stopped_it(server):
    answer = create(server, stop_sequences=["never said", "Paris"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris") and "Paris" not in answer.content[0].text, answer
    answer = create(server, max_tokens=2)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 2, answer
    # As much as any model could say is as much as this one's context holds.
    assert create(server, max_tokens=64_000).stop_reason == "end_turn"


def anthropic_parses_into_a_pydantic_model(server):
    import pydantic

    class Verdict(pydantic.BaseModel):
        yes: bool

    fields = {"model": model_id(server), "messages": FRANCE, "max_tokens": 100, **GREEDY}
    assert isinstance(sdk(server).messages.parse(output_format=Verdict, **fields).parsed_output, Verdict)


def anthropic_errors_are_of_their_class(server):
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
    anthropic_answers_paris, anthropic_streams_the_same_answer, anthropic_counts_the_tokens_of_a_prompt,
    anthropic_goes_on_from_what_it_is_given, anthropic_is_told_what_stopped_it, anthropic_parses_into_a_pydantic_model,
    anthropic_errors_are_of_their_class,
]

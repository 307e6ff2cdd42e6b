"""The packages openai, anthropic and ollama with pictures, and a tiny model that sees them. Its weights are random, so only
equal and different answers mean something. test_openai.py runs these tests with a server of their own."""

import base64

import anthropic_sdk
import ollama_client
from raised import raised
from server import ANSWER_SECONDS, ROOT, model_id

try:
    import openai
except ImportError:
    openai = None

MODEL = ROOT / "tests/data/gemma3-vision/vis-a"
PICTURES = ROOT / "tests/data/images"
QUESTION = "next last command type move"
TOKENS = 12


def file(picture):
    return base64.b64encode((PICTURES / f"{picture}.png").read_bytes()).decode()


def uri(picture):
    return f"data:image/png;base64,{file(picture)}"


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)


def chat(server, picture, **more):
    content = [{"type": "image_url", "image_url": {"url": uri(picture), "detail": "high"}}, {"type": "text", "text": QUESTION}]
    return sdk(server).chat.completions.create(
        model=model_id(server), messages=[{"role": "user", "content": content}], max_tokens=TOKENS, temperature=0, **more)


def openai_chats_about_pictures(server):
    rgb, checker = (chat(server, picture) for picture in ("rgb", "checker"))
    assert rgb.choices[0].message.content != checker.choices[0].message.content, rgb
    # An image has 16 tokens, and the tokens around it.
    assert rgb.usage.prompt_tokens == checker.usage.prompt_tokens > 16 + 4, rgb.usage
    streamed = chat(server, "rgb", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == rgb.choices[0].message.content, text
    error = raised(openai.BadRequestError, lambda: sdk(server).chat.completions.create(
        model=model_id(server), messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}]))
    assert error.param == "messages[0].content[0].image_url.url" and "data:" in error.message, error.body


def openai_responds_about_a_picture(server):
    content = [{"type": "input_image", "image_url": uri("rgb"), "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
    response = sdk(server).responses.create(
        model=model_id(server), input=[{"role": "user", "content": content}], max_output_tokens=TOKENS, temperature=0)
    assert response.output_text == chat(server, "rgb").choices[0].message.content, response
    # The picture of an earlier turn is in the next one's prompt.
    more = sdk(server).responses.create(
        model=model_id(server), input="word", previous_response_id=response.id, max_output_tokens=2, temperature=0)
    assert more.usage.input_tokens > response.usage.input_tokens, more.usage


def anthropic_sees_a_picture(server):
    source = {"type": "base64", "media_type": "image/png", "data": file("rgb")}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}]
    answer = anthropic_sdk.sdk(server).messages.create(model=model_id(server), max_tokens=TOKENS, messages=messages, extra_body={"temperature": 0})
    counted = anthropic_sdk.sdk(server).messages.count_tokens(model=model_id(server), messages=messages)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 20, (counted, usage)
    if openai is not None:
        assert answer.content[0].text == chat(server, "rgb").choices[0].message.content, answer


def ollama_sees_a_picture(server):
    client = ollama_client.client(server)
    assert "vision" in client.show(model_id(server)).capabilities
    # The package reads the file itself.
    message = {"role": "user", "content": QUESTION, "images": [str(PICTURES / "rgb.png")]}
    answer = client.chat(model=model_id(server), messages=[message], options={"temperature": 0, "num_predict": TOKENS})
    assert answer.prompt_eval_count > 20, answer
    if openai is not None:
        assert answer.message.content == chat(server, "rgb").choices[0].message.content, answer
    generated = client.generate(
        model=model_id(server), prompt=QUESTION, images=[file("rgb")], options={"temperature": 0, "num_predict": TOKENS})
    assert generated.response == answer.message.content, generated


OPENAI = [openai_chats_about_pictures, openai_responds_about_a_picture]
ANTHROPIC = [anthropic_sees_a_picture]
OLLAMA = [ollama_sees_a_picture]

#!/usr/bin/env python3
"""Writes what transformers makes of conversations with tools, for chat templates of llama.cpp's tree: `make_goldens.py
--templates FOLDER --out FILE`. README.md says more."""

import argparse
import datetime
import hashlib
import json
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

# Without it, some templates write the date of the day.
VARIABLES = {"date_string": "26 Jul 2024"}
# The control tokens that the templates get as variables.
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
QWEN = {"eos_token": "<|im_end|>"}
# (template, its control tokens, the syntax of its calls)
TEMPLATES = [
    ("meta-llama-Llama-3.1-8B-Instruct", LLAMA, "llama3_json"),
    ("meta-llama-Llama-3.2-3B-Instruct", LLAMA, "llama3_json"),
    ("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL, "mistral"),
    ("Mistral-Small-3.2-24B-Instruct-2506", MISTRAL, "mistral_args"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", MISTRAL, "mistral_args"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", LLAMA, "hermes"),
    ("Qwen-Qwen2.5-7B-Instruct", QWEN, "hermes"),
    ("Qwen3-Coder", QWEN, "qwen3_coder"),
]


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool("get_weather", "The weather in a city", city={"type": "string", "description": "Its name"}, unit={"type": "string", "enum": ["C", "F"]})
NOTE = tool(
    "add_note", "Keep a \"note\"\nand its tags",
    text={"type": "string"}, count={"type": "integer", "minimum": 0}, done={"type": "boolean"},
    tags={"type": "array", "items": {"type": "string"}},
    place={"type": "object", "properties": {"x": {"type": "number"}}},
)
TOOLS = [WEATHER, NOTE]
SYSTEM = {"role": "system", "content": "You are brief."}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls, **more):
    made = [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


def result(id, name, text):
    return {"role": "tool", "tool_call_id": id, "name": name, "content": text}


PARIS = ("call00001", "get_weather", {"city": "Paris"})
OSLO = ("call00002", "get_weather", {"city": "Oslo", "unit": "C"})
NOTED = ("call00003", "add_note", {"text": "Käse \"½\"\n\t</tool_call> [ARGS]", "count": -3, "done": True, "tags": ["a", ""], "place": {"x": 0.5}})
RAIN, WIND = result("call00001", "get_weather", "rain"), result("call00002", "get_weather", '{"wind": 3, "ok": null}')

# (note, messages, tools, whether an answer follows)
CASES = [
    ("a system message", [SYSTEM, user("Hi")], [], True),
    ("several turns, closed", [SYSTEM, user("Hi"), assistant("Hello!"), user(" What? \n"), assistant("Yes.")], [], False),
    ("tools are offered", [SYSTEM, user("Weather?")], TOOLS, True),
    ("one tool, no system message", [user("Weather in Paris?")], [WEATHER], True),
    ("a call", [SYSTEM, user("Weather in Paris?"), assistant("", PARIS)], TOOLS, False),
    ("a call and its result", [SYSTEM, user("Weather in Paris?"), assistant("", PARIS), RAIN], TOOLS, True),
    ("arguments of every type", [SYSTEM, user("Note it"), assistant("", NOTED), result("call00003", "add_note", "[\"kept\"]")], TOOLS, True),
    ("an answer after a result", [SYSTEM, user("Weather?"), assistant("", OSLO), WIND, assistant("Windy.")], TOOLS, False),
    ("a turn after calls", [SYSTEM, user("Weather?"), assistant("", PARIS), RAIN, assistant("Rain."), user("And Oslo?")], TOOLS, True),
    ("two calls in two steps", [SYSTEM, user("Weather?"), assistant("", PARIS), RAIN, assistant("", OSLO), WIND], TOOLS, True),
    ("two calls at once", [SYSTEM, user("Weather?"), assistant("", PARIS, OSLO), RAIN, WIND], TOOLS, True),
    ("text before a call", [SYSTEM, user("Weather?"), assistant("I look.", PARIS), RAIN], TOOLS, True),
    ("a history of calls without tools now", [SYSTEM, user("Weather?"), assistant("", PARIS), RAIN, assistant("Rain."), user("Thanks")], [], True),
]


def rendered(template, tokens, messages, tools, is_open):
    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools or None, chat_template=template, add_generation_prompt=is_open,
            **VARIABLES, **tokens,
        )
        # Mistral Small 3.2 writes the date of the day, whatever the variables are.
        return {"rendered": texts[0].replace(datetime.date.today().isoformat(), "{today}")}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}
    except TypeError:
        # This template is only for conversations with tools.
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, required=True, help="a folder with the templates of llama.cpp's tree")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    templates = []
    for name, tokens, syntax in TEMPLATES:
        source = (asked.templates / f"{name}.jinja").read_bytes()
        results = [rendered(source.decode(), tokens, messages, tools, is_open) for _, messages, tools, is_open in CASES]
        digest = hashlib.sha256(source).hexdigest()
        templates.append({"name": name, "sha256": digest, **tokens, "syntax": syntax, "results": results})
    names = ["note", "messages", "tools", "add_generation_prompt"]
    cases = [dict(zip(names, case)) for case in CASES]
    written = {"variables": VARIABLES, "cases": cases, "templates": templates}
    asked.out.write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()

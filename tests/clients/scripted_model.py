#!/usr/bin/env python3
"""Writes a checkpoint that thinks, calls a tool, and answers once it has read the result: `scripted_model.py FOLDER`.

Its weights are not trained. They are chosen so that each token of the script determines the next one, in a Mistral with
one layer, whose tokenizer and template are Qwen 3's. So clients can be tested with thoughts and with calls in a model's own
syntax, through the whole server.

- The hidden state has a dimension for each token of the script, one that every token has, and one (`SEEN`) that the
  layer's attention sets at the positions after a tool's result, in its window.
- The row of the head for a token reads the dimension of the token before it. After the thought, `SEEN` decides between
  the call and the answer.
- The script has no token twice. Its words are tokens of the vocabulary, most of which no text of a prompt is encoded to,
  because no merge makes them.
"""

import argparse
import json
import math
import re
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parents[1] / "data/families/qwen-tokenizer"
HIDDEN, HEAD, CONTEXT = 128, 64, 131072
# Long prompts of agents take less time with a window.
WINDOW = 2048
# Dimensions of the hidden state. The others belong to tokens.
ALWAYS, SEEN, FIRST = 0, 1, 2
# The pair of a head's dimensions that RoPE rotates least: by less than 0.03 radians in the whole context.
QUIET = HEAD // 2 - 1
ROPE_THETA = 10_000_000
# Control tokens of the syntax, which no client may see.
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>"]


@dataclass
class Script:
    thought: str = "The user asks for something that a tool knows. I call it."
    tool: str = "get_weather"
    arguments: str = '{"city": "Paris"}'
    answer: str = "The tool says: it is sunny."


def pieces(text):
    """A text in the pieces in which the model says it."""
    return re.findall(r"\s*\S+\s*$|\s*\S+|\s+$", text)


def byte_level(text):
    """A text as byte-level vocabularies spell it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return "".join(letters[byte] for byte in text.encode())


def words(text, used, vocabulary):
    """The tokens of a text, which are added to the vocabulary. A token that the script has already is made longer by the
    next word."""
    made, begun = [], ""
    for piece in pieces(text):
        begun += piece
        if begun not in used:
            used.add(begun)
            made.append(vocabulary.setdefault(byte_level(begun), len(vocabulary)))
            begun = ""
    if begun:
        raise ValueError(f"the script says {begun!r} a second time, at the end of {text!r}")
    return made


def chains(script, tokenizer):
    """(token, next token) of the script, and the ids of the control tokens. Adds the words of the script to the
    tokenizer's vocabulary."""
    vocabulary, used = tokenizer["model"]["vocab"], {"\n", "\n\n"}
    call = f'\n{{"name": "{script.tool}", "arguments": {script.arguments}}}\n'
    thought, body, answer = (words(text, used, vocabulary) for text in [f"\n{script.thought}\n", call, script.answer])
    # Control tokens come after the vocabulary.
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = len(vocabulary) + i
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= {"line": vocabulary["Ċ"], "decides": vocabulary["ĊĊ"], "answer": answer[0]}
    whole = [
        [ids["line"], ids["<think>"], *thought, ids["</think>"], ids["decides"]],
        [ids["<tool_call>"], *body, ids["</tool_call>"], ids["<|im_end|>"]],
        [*answer, ids["<|im_end|>"]],
    ]
    return [pair for chain in whole for pair in zip(chain, chain[1:])], ids


def write(folder, script):
    """Writes the checkpoint into a new folder."""
    folder.mkdir(parents=True)
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    follows, ids = chains(script, tokenizer)
    rows = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    decides, call, answer = ids["decides"], ids["<tool_call>"], ids["answer"]
    known = dict.fromkeys([decides, ids["<tool_response>"], *(token for token, _ in follows)])
    place = {token: FIRST + i for i, token in enumerate(known)}
    if FIRST + len(place) > HIDDEN:
        raise ValueError(f"the script has {len(place)} tokens, and {HIDDEN - FIRST} is the most")

    embedding = [[0.0] * HIDDEN for _ in range(rows)]
    for token, row in enumerate(embedding):
        row[ALWAYS] = 1.0
        if token in place:
            row[place[token]] = 1.0
    head = [[0.0] * HIDDEN for _ in range(rows)]
    for token, after in follows:
        head[after][place[token]] = 4.0
    # After a result, the call is less likely than the answer. So it is in a chat without tools, where the server allows
    # no call.
    head[call][place[decides]], head[call][SEEN] = 4.0, -8.0
    head[answer][place[decides]] = 2.0

    query, key, value, output = (matrix(HEAD, HIDDEN), matrix(HEAD, HIDDEN), matrix(HEAD, HIDDEN), matrix(HIDDEN, HEAD))
    # The norm scales the ones of a state with two dimensions to 8. Then the score of a result is 16 * 16 / 8 = 32, and that of
    # any other token 0.
    query[QUIET][ALWAYS] = 2.0
    key[QUIET][place[ids["<tool_response>"]]] = 2.0
    value[0][place[ids["<tool_response>"]]] = 1.0
    output[SEEN][0] = 1 / math.sqrt(HIDDEN / 2)
    ones, layer = [1.0] * HIDDEN, "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": [ones],
        layer + "input_layernorm.weight": [ones], layer + "post_attention_layernorm.weight": [ones],
        layer + "self_attn.q_proj.weight": query, layer + "self_attn.k_proj.weight": key,
        layer + "self_attn.v_proj.weight": value, layer + "self_attn.o_proj.weight": output,
        layer + "mlp.gate_proj.weight": matrix(HIDDEN, HIDDEN), layer + "mlp.up_proj.weight": matrix(HIDDEN, HIDDEN),
        layer + "mlp.down_proj.weight": matrix(HIDDEN, HIDDEN),
    }
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": HIDDEN, "head_dim": HEAD,
        "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": HIDDEN,
        "vocab_size": rows, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": ROPE_THETA,
        "sliding_window": WINDOW, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"], "do_sample": False}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    shutil.copy(TOKENIZER / "chat_template.jinja", folder)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def matrix(rows, columns):
    return [[0.0] * columns for _ in range(rows)]


def safetensors(tensors):
    header, data = {}, b""
    for name, rows in tensors.items():
        values = struct.pack(f"<{sum(map(len, rows))}f", *(x for row in rows for x in row))
        shape = [len(rows), len(rows[0])] if len(rows) > 1 else [len(rows[0])]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name in ["thought", "tool", "arguments", "answer"]:
        parser.add_argument(f"--{name}", default=getattr(Script(), name))
    asked = vars(parser.parse_args())
    try:
        write(asked.pop("folder"), Script(**asked))
    except (ValueError, OSError) as error:
        sys.exit(f"scripted_model: {error}")


if __name__ == "__main__":
    main()

"""Asks an exported model every question and judges the answers: greedy, float32 arithmetic on the bf16 weights.

    python evaluate.py --model ../../models/demo --work work

Writes accuracy.json next to the model, and the answers (token ids, margins) to work/answers.json for make_goldens.py.
transformers' own Gemma-3 computes the answers, so that the exported folder is what is judged.
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch

END = (1, 6)  # <eos>, <end_of_turn>
LONGEST_ANSWER = 320


def load(folder):
    from transformers import Gemma3ForCausalLM
    from tokenizers import Tokenizer

    model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model, Tokenizer.from_file(f"{folder}/tokenizer.json")


def render(messages):
    """Gemma's chat template with the prompt for an answer; an independent version, so that it checks the
    generator's."""
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    text = "<bos>"
    for number, message in enumerate(m for m in messages if m["role"] != "system"):
        role = "model" if message["role"] == "assistant" else "user"
        text += f"<start_of_turn>{role}\n{system if number == 0 else ''}{message['content'].strip()}<end_of_turn>\n"
    return text + "<start_of_turn>model\n"


@torch.inference_mode()
def greedy(model, prompt):
    """-> (answer ids with the token that ended it, smallest distance between the best and the second-best logit)"""
    from transformers import DynamicCache

    cache, answer, margin = DynamicCache(), [], float("inf")
    ids = torch.tensor([prompt])
    while len(answer) < LONGEST_ANSWER:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        answer.append(int(logits.argmax()))
        if answer[-1] in END:
            break
        ids = torch.tensor([[answer[-1]]])
    return answer, margin


def is_accepted(rule, answer):
    if "equals" in rule:
        return answer == rule["equals"]
    if "any_of" in rule:
        return any(text in answer for text in rule["any_of"])
    if "all_of" in rule:
        return all(text in answer for text in rule["all_of"])
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    # 1 == True in Python, not in JSON.
    return json.dumps(value, sort_keys=True) == json.dumps(rule["json"], sort_keys=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).resolve().parents[2] / "models/demo"))
    parser.add_argument("--work", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only the quick questions; accuracy.json is not written")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(args.model)
    model, tokenizer = load(folder)
    counts, answers, wrong = {}, {}, []
    for item in json.loads((folder / "questions.json").read_text()):
        right, asked = counts.get(item["category"], (0, 0))
        if args.quick and not item["quick"]:
            continue
        prompt = tokenizer.encode(render(item["messages"]), add_special_tokens=False).ids
        assert len(prompt) == item["prompt_tokens"], item["id"]
        ids, margin = greedy(model, prompt)
        text = tokenizer.decode(ids)
        good = ids[-1] in END and is_accepted(item["accept"], text)
        counts[item["category"]] = (right + good, asked + 1)
        answers[item["id"]] = {"prompt": prompt, "answer": ids, "text": text, "margin": margin, "accepted": good}
        if not good:
            wrong.append(item["id"])
            print(f"{item['id']} {item.get('distance', '')}\n  asked   {item['messages'][-1]['content'][-200:]!r}\n  wanted  {item['accept']}\n  answer  {text!r}", flush=True)
    report = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "processor": platform.processor() or platform.machine(),
        "command": "python evaluate.py", "arithmetic": "float32 on the bf16 weights, greedy, transformers eager attention",
        "categories": {c: {"right": r, "asked": n, "percent": round(100 * r / n, 1)} for c, (r, n) in counts.items()},
        "wrong": wrong,
    }
    Path(args.work).mkdir(parents=True, exist_ok=True)
    (Path(args.work) / "answers.json").write_text(json.dumps(answers))
    if not args.quick:
        (folder / "accuracy.json").write_text(json.dumps(report, indent=2) + "\n")
    for category, (right, asked) in counts.items():
        print(f"{category:18} {right:3} of {asked:3}  {100 * right / asked:5.1f} %")


if __name__ == "__main__":
    main()

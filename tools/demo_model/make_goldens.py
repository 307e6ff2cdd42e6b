"""Writes PyTorch's answers to the question set, for the engine's tests to reproduce. Run evaluate.py first.

    python make_goldens.py --model ../../models/demo --work work --output ../../tests/data/demo

The format is described in tests/data/demo/README.md.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from evaluate import load

# Prompts whose logits are kept, for the last 16 positions of each: name -> approximate number of tokens.
LOGIT_PROMPTS = {"short": 16, "medium": 100, "long": 300, "thousand": 1100, "four_thousand": 4000}
POSITIONS = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--model", default=str(root / "models/demo"))
    parser.add_argument("--work", required=True, help="holds answers.json of evaluate.py")
    parser.add_argument("--output", default=str(root / "tests/data/demo"))
    args = parser.parse_args()
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    answers = json.loads((Path(args.work) / "answers.json").read_text())
    questions = json.loads((Path(args.model) / "questions.json").read_text())
    missing = {q["id"] for q in questions} - set(answers)
    if missing:
        print(f"{len(missing)} questions have no answer (evaluate.py --quick?) and get no golden")
        questions = [q for q in questions if q["id"] in answers]

    model, _ = load(args.model)
    tensors, chosen = {}, {}
    for name, wanted in LOGIT_PROMPTS.items():
        question = min(questions, key=lambda q: abs(q["prompt_tokens"] - wanted))
        prompt = answers[question["id"]]["prompt"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), logits_to_keep=POSITIONS).logits[0]
        tensors[f"{name}.tokens"] = torch.tensor(prompt, dtype=torch.int32)
        tensors[f"{name}.logits"] = logits.contiguous()
        chosen[name] = question["id"]
    save_file(tensors, output / "goldens.safetensors")
    (output / "goldens.safetensors").chmod(0o644)

    weights = hashlib.sha256((Path(args.model) / "model.safetensors").read_bytes()).hexdigest()
    lines = [json.dumps({"id": q["id"], "category": q["category"], "quick": q["quick"], **answers[q["id"]]}, ensure_ascii=False) for q in questions]
    head = json.dumps({"torch": torch.__version__, "model_sha256": weights, "logits": chosen})
    (output / "goldens.json").write_text(f'{{"about": {head},\n"answers": [\n' + ",\n".join(lines) + "\n]}\n")
    smallest = min(answers.values(), key=lambda a: a["margin"])["margin"]
    print(f"{output}: {len(lines)} answers, smallest margin {smallest:.4f}, "
          f"{sum(f.stat().st_size for f in output.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Proves on a large sample that training and question set share no prompt and no sum. Python standard library only.

    python3 check_disjoint.py [--dialogues 5000] [--seed 1]

Generates training dialogues as train.py does, with all row lengths and all skills. Fails if a user turn in them equals
a user turn of any question, up to case, punctuation and spacing, or if they ask a sum of the questions. Also fails if
the hold-out rule would let a question into training, which covers every dialogue that was not sampled.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

from corpus import dialogue
from corpus.holdout import is_held_out, is_held_out_sum, normalise

ROOT = Path(__file__).resolve().parents[2]
# A smaller sample would prove little.
FEWEST_DIALOGUES = 500
LENGTHS = [256, 512, 1024, 2048, 4096]
SUM = re.compile(r"(\d+) ([-+*]) (\d+) = \d+\.", re.I)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", default=str(ROOT / "models/demo/questions.json"))
    parser.add_argument("--dialogues", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.dialogues < FEWEST_DIALOGUES:
        parser.error(f"--dialogues {args.dialogues}: at least {FEWEST_DIALOGUES} are needed")

    questions = json.loads(Path(args.questions).read_text())
    prompts, sums, problems = {}, {}, []
    for item in questions:
        turns = [m["content"] for m in item["messages"] if m["role"] == "user"]
        for turn in turns:
            prompts[normalise(turn)] = item["id"]
        # The prompt is also compared with its system text, for rows in which the system text comes before the first turn.
        prompts[normalise("\n\n".join(m["content"] for m in item["messages"][:2]))] = item["id"]
        if "sum" in item:
            sums[tuple(item["sum"])] = item["id"]
            if not is_held_out_sum(*item["sum"]):
                problems.append(f"{item['id']}: the sum {item['sum']} is not held out")
        for message in item["messages"] + [{"role": "assistant", "content": item.get("expected", "")}]:
            if message["role"] == "assistant" and (asked := SUM.fullmatch(message["content"])):
                sums[(int(asked[1]), asked[2], int(asked[3]))] = item["id"]
        # A prompt that contains a list of tools or a chat is held out by its question; the sample below compares the
        # whole prompt.
        if len(turns) == 1 and "sum" not in item and item["category"] not in ("titles", "tools", "tools_not_needed"):
            if not is_held_out(turns[0]):
                problems.append(f"{item['id']}: its prompt is not held out: {turns[0]!r}")

    rng = random.Random(args.seed)
    seen, trained_sums = 0, set()
    for _ in range(args.dialogues):
        system, turns = dialogue.dialogue(rng, int(rng.choice(LENGTHS) * 1.25))
        for number, turn in enumerate(turns):
            seen += 1
            for prompt in {normalise(turn.user), normalise(f"{system}\n\n{turn.user}") if number == 0 and system else ""}:
                if prompt in prompts:
                    problems.append(f"{prompts[prompt]} is asked in training: {turn.user!r}")
            for a, op, b in SUM.findall(turn.model + turn.user):
                pair = (int(a), op, int(b))
                trained_sums.add(pair)
                if is_held_out_sum(*pair) or pair in sums:
                    problems.append(f"the sum {pair} is asked in training: {turn.user!r}")
    for problem in problems[:20]:
        print(problem)
    print(f"{args.dialogues} training dialogues with {seen} prompts and {len(trained_sums)} different sums against {len(questions)} questions "
          f"with {len(prompts)} prompts and {len(sums)} sums: {'NOT PROVED' if problems else 'disjoint'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Builds the question set: held-out prompts of every skill, recall at measured distances, and the strangers' questions.

    python make_questions.py --model ../../models/demo

No user turn of any question can occur in training (corpus/holdout.py); check_disjoint.py proves it on a sample.
Each question is {id, category, messages, prompt_tokens, accept, expected}. `accept` is the rule an answer is judged by:
  {"equals": text}            the whole answer
  {"json": value}             the answer parses to this value
  {"any_of": [text, ...]}     one of these occurs in the answer
  {"all_of": [text, ...]}     all of these occur in the answer
`sum` is the pair of numbers, where a question asks a sum; `distance` the tokens between what was told and the question;
`quick` marks a small subset.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from corpus import dialogue, memory, skills, tasks
from corpus.holdout import STRANGERS, normalise
from corpus.skills import QUESTIONS, Turn

SEED = 20
PER_CATEGORY = 30
# Distance in tokens from the last mention of the told fact to the question: (lowest, highest, how many). The window is
# 64.
RECALL = [(10, 50, 24), (80, 300, 16), (300, 700, 10), (700, 1500, 8), (1500, 2500, 4), (2500, 3900, 4), (3900, 4096, 2)]
TITLES = [(1000, 1300, 16), (1300, 2000, 6), (2000, 3000, 4), (3000, 4000, 4)]


def judge(turn):
    """The rule for judging a turn's answer: exact wherever only one answer is right."""
    if turn.model in skills.REFUSALS:
        return {"any_of": ["tiny demo model"]}
    if turn.skill == "story":
        # If the user gave no name, the name is the model's choice.
        name = re.search(r"\b[A-Z][a-z]+\b(?= the | lived| was a| found| took|\.)", turn.model)
        asked = name and name.group() in turn.user
        return {"all_of": ([name.group()] if asked else []) + ["The end."]}
    try:
        value = json.loads(turn.model)
        if isinstance(value, (dict, list)):
            return {"json": value}
    except ValueError:
        pass
    return {"equals": turn.model}


class Questions:
    def __init__(self, tokenizer):
        self.tokenizer, self.items, self.seen = tokenizer, [], set()

    def tokens(self, system, turns, answer_last=True):
        return self.tokenizer.encode(dialogue.render(system, turns, answer_last), add_special_tokens=False).ids

    def count(self, text):
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def add(self, category, turns, system="", **more):
        asked = more.get("sum") and tuple(more["sum"]) or normalise(system + " ".join(t.user for t in turns))
        if asked in self.seen:
            return False
        self.seen.add(asked)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user.strip()}, {"role": "assistant", "content": turn.model.strip()}]
        number = sum(item["category"] == category for item in self.items)
        self.items.append({
            "id": f"{category}-{number:02}", "category": category, "messages": messages[:-1],
            "prompt_tokens": len(self.tokens(system, turns, answer_last=False)), "accept": more.pop("accept", None) or judge(turns[-1]),
            "expected": turns[-1].model.strip(), "quick": False, **more})
        return True

    def mark_quick(self):
        """A tenth of the set's tokens, for tests that run at every change: up to 8 short prompts of every category."""
        for category in {item["category"] for item in self.items}:
            items = [item for item in self.items if item["category"] == category]
            short = sorted(items, key=lambda item: item["prompt_tokens"])
            chosen = short[:: max(1, len(short) // 8)][:8]
            for item in chosen:
                item["quick"] = item["prompt_tokens"] <= 600 or item is short[0]

    def fill(self, category, make, count=PER_CATEGORY):
        while sum(item["category"] == category for item in self.items) < count:
            made = make()  # (turns, further fields of the question), or None
            if made:
                self.add(category, made[0], **made[1])


def single_turn_categories(questions, rng):
    makers = {"identity": skills.small_talk, "capitals": skills.capital, "facts": skills.fact, "spelling": skills.spelling,
              "counting": skills.counting, "json": skills.json_object, "stories": skills.story, "off_topic": skills.off_topic,
              "copy": tasks.copy_with_change, "schema": tasks.schema_json}
    for category, make in makers.items():
        questions.fill(category, lambda: ([make(rng, QUESTIONS)], {}))
    questions.fill("untold", lambda: ([memory.ask_untold(rng, memory.memory_key(rng)[0], QUESTIONS)], {}))


def arithmetic(questions, rng):
    def make():
        turn = skills.arithmetic(rng, QUESTIONS)
        return [turn], {"sum": sum_of(turn)}

    questions.fill("arithmetic", make, 36)


def sum_of(turn):
    found = re.fullmatch(r"(\d+) ([-+*]) (\d+) = \d+\.", turn.model)
    return found and [int(found[1]), found[2], int(found[3])]


def recall(questions, rng):
    for lowest, highest, count in RECALL:
        category = "recall_near" if highest < 64 else "recall"
        made = 0
        while made < count:
            made += recall_at(questions, rng, category, rng.randint(lowest, highest))


def recall_at(questions, rng, category, distance):
    """Tells a fact, talks about other things until the question is `distance` tokens after the last mention, and
    asks."""
    key, value = memory.memory_key(rng)
    told, asked = memory.tell(rng, key, value, QUESTIONS), memory.ask(rng, key, value, QUESTIONS)
    before = [plain_turn(rng) for _ in range(rng.randint(0, 2))]
    mention = dialogue.render("", before + [told])
    mention = questions.count(mention[: mention.rindex(value) + len(value)])
    now = len(questions.tokens("", before + [told, asked], answer_last=False)) - mention
    between, other_keys, misses = [], {key}, 0
    while now < distance - 12 and misses < 40:
        turn = plain_turn(rng)
        if rng.random() < 0.12:  # a second fact, so that "the number" alone is ambiguous
            other, other_value = memory.memory_key(rng)
            if other not in other_keys and value not in (other_value, other):
                other_keys.add(other)
                turn = memory.tell(rng, other, other_value, QUESTIONS)
        length = len(questions.tokens("", [turn])) - 1
        if now + length <= distance + 12:
            between.append(turn)
            now += length
        else:
            misses += 1
    if abs(now - distance) > 25:
        return False
    return questions.add(category, before + [told] + between + [asked], distance=now)


def plain_turn(rng):
    while True:
        turn = dialogue.any_turn(rng, QUESTIONS)
        if len(turn.user) + len(turn.model) < 300:
            return turn


def tools(questions, rng):
    def call():
        turns = tasks.tool_dialogue(rng, dialogue.SHORT_SKILLS, QUESTIONS, plain=False)
        return (turns[:1], {}) if turns[0].skill == "tool" else None

    def result():
        turns = tasks.tool_dialogue(rng, dialogue.SHORT_SKILLS, QUESTIONS, plain=False)
        return (turns[:2], {}) if len(turns) > 1 and turns[1].skill == "tool_result" else None

    questions.fill("tools", call)
    questions.fill("tool_results", result)
    questions.fill("tools_not_needed", lambda: (tasks.tool_dialogue(rng, dialogue.SHORT_SKILLS, QUESTIONS, plain=True)[:1], {}))


def titles(questions, rng):
    for lowest, highest, count in TITLES:
        made = 0
        while made < count:
            turn = tasks.title_turn(rng, rng.randint(lowest, highest), dialogue.title_filler, QUESTIONS)
            if lowest <= len(questions.tokens("", [turn], answer_last=False)) <= highest:
                made += questions.add("titles", [turn])


def systems(questions, rng):
    def make():
        kind, system, answer = tasks.system_style(rng)
        # A style that allows only the result leaves no room to work it out, so sums are asked in the other styles.
        turn = rng.choice(dialogue.SHORT_SKILLS[:3] * 2 + dialogue.SHORT_SKILLS)(rng, QUESTIONS)
        styled = tasks.styled(turn, answer)
        if styled is None or kind in ("one_word", "json") and turn.skill == "arithmetic":
            return None
        accept = {"any_of": ["tiny demo model", "TINY DEMO MODEL"]} if turn.model in skills.REFUSALS and kind != "one_word" else None
        asked = sum_of(turn)
        return [styled], {"system": system, "style": kind, "accept": accept, **({"sum": asked} if asked else {})}

    questions.fill("system", make, 36)


def strangers(questions):
    for item in json.loads(STRANGERS.read_text()):
        # The model's answers to the earlier turns are unknown here, so a plain confirmation replaces them.
        turns = [Turn(user, "Okay, I will remember that.", "stranger") for user in item["turns"]]
        turns[-1].model = item["any_of"][0]
        questions.add("stranger", turns, accept={"any_of": item["any_of"]})
        del questions.items[-1]["expected"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).resolve().parents[2] / "models/demo"))
    args = parser.parse_args()
    questions = Questions(Tokenizer.from_file(f"{args.model}/tokenizer.json"))
    rng = random.Random(SEED)
    single_turn_categories(questions, rng)
    arithmetic(questions, rng)
    recall(questions, rng)
    tools(questions, rng)
    titles(questions, rng)
    systems(questions, rng)
    strangers(questions)
    questions.mark_quick()
    path = Path(args.model) / "questions.json"
    path.write_text("[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in questions.items) + "\n]\n")
    counts = {}
    for item in questions.items:
        counts[item["category"]] = counts.get(item["category"], 0) + 1
    tokens = lambda items: sum(item["prompt_tokens"] for item in items)
    print(f"{path}: {len(questions.items)} questions, {tokens(questions.items)} prompt tokens "
          f"({tokens([i for i in questions.items if i['quick']])} quick), {counts}")


if __name__ == "__main__":
    main()

"""The rule for prompts that training may never see, shared by the generator, the question set and check_disjoint.py.

The hash of a prompt's normalised text decides whether it is held out or trained, so the two sets are disjoint by
construction for any seed. Sums are held out by their pair of numbers, whatever the wording. The hand-written questions
(strangers.json) are held out by a list.
"""

import json
import re
import unicodedata
import zlib
from functools import lru_cache
from pathlib import Path

HELD_PER_MILLE = 60
STRANGERS = Path(__file__).resolve().parent.parent / "strangers.json"

# The most common first messages stay in training, whatever their hash, and so out of the question set.
ALWAYS_TRAINED = {
    "what is the capital of france", "hello", "hi", "hey", "who are you", "what can you do", "what is your name",
    "tell me a story", "tell me a joke", "how are you", "thanks", "thank you", "what is my name", "bye",
}


def normalise(prompt):
    """Normalises a prompt: case, punctuation, spacing and accents do not make it a new one."""
    text = unicodedata.normalize("NFKD", prompt.lower())
    return " ".join(re.sub(r"[^\w+*/=-]|_", " ", text.replace("'", "")).split())


@lru_cache(maxsize=1)
def stranger_prompts():
    return frozenset(normalise(turn) for item in json.loads(STRANGERS.read_text()) for turn in item["turns"])


def _per_mille(key):
    return zlib.crc32(key.encode()) % 1000


def is_held_out(prompt):
    key = normalise(prompt)
    if key in ALWAYS_TRAINED:
        return False
    return key in stranger_prompts() or _per_mille("prompt " + key) < HELD_PER_MILLE


# The sums in the hand-written questions, in both orders.
_STRANGER_SUMS = {(3, "+", 4), (12, "+", 7), (15, "-", 6), (7, "*", 8)}


def is_held_out_sum(a, op, b):
    """Whether a sum is held out, decided by its pair of numbers. A times table cannot be derived from its other
    entries, so only one order of a product is held out, and the other is trained. Sums and differences are held out in
    both orders."""
    low, high = sorted((a, b))
    if op == "*":
        if (a, op, b) in _STRANGER_SUMS:
            return True
        if a == b or (b, op, a) in _STRANGER_SUMS:
            return False
        key = f"{low}*{high}"
        return _per_mille("pair " + key) < 2 * HELD_PER_MILLE and (a < b) == (_per_mille("order " + key) % 2 == 0)
    if (a, op, b) in _STRANGER_SUMS or (b, op, a) in _STRANGER_SUMS:
        return True
    return _per_mille(f"pair {low}{op}{high}") < HELD_PER_MILLE

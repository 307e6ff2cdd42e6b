"""How people really type: no capitals, no question mark, typos, politeness. A prompt in, a prompt out."""

import re

_NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo", "j": "hk", "k": "jl",
    "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "w", "r": "et", "s": "ad", "t": "ry", "u": "yi", "v": "cb",
    "w": "qe", "x": "zc", "y": "tu", "z": "x",
}
_SHORT = [("what is ", "whats "), ("what's ", "whats "), ("please", "pls"), ("please", "plz"), (" you ", " u "),
          (" are ", " r "), ("do not", "dont"), ("cannot", "cant"), ("i am ", "im "), ("who is ", "whos "),
          (" and ", " & "), (" your ", " ur "), (" for ", " 4 "), ("something", "smth"), ("something", "sth"), ("tomorrow", "tmrw"),
          ("should", "shld"), ("should", "shud"), ("because", "cuz"), ("going to", "gonna"), ("want to", "wanna"), ("give me", "gimme"),
          ("thanks", "thx"), ("people", "ppl"), ("tonight", "2nite"), ("about", "abt"), ("really", "rly"), ("know", "kno"),
          ("okay", "ok"), ("favorite", "fav"), ("favorite", "favourite"), ("do you ", "do u "), (" you", " u"), ("what ", "wat "),
          ("i am ", "im "), ("do not know", "dunno"), ("thank you", "ty"), ("goodbye", "gbye"), ("could", "cud")]
_BEFORE = ["please ", "hey, ", "hi, ", "hello, ", "hi ", "ok, ", "so ", "um, ", "quick question: ", "can you tell me ",
           "could you please tell me ", "I want to know: ", "tell me: ", "question: ", "and ", "well, ", "sorry, ", "ok ", "hey ", "yo ",
           "so ", "pls ", "now ", "oh, ", "alright, ", "hmm, ", "one more: ", "next: "]
_AFTER = [" please", " please?", " thanks", ", thank you", " pls", " again", "??", "!", " ...", " now", " :)", " ?",
          "!!", " then", " btw", " man", " bro", ", ok?", " thx", " and thanks", " mate", " if you can", "?!"]


def typo(rng, word):
    """One slip of the fingers."""
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2:]
    if kind == 1:
        return word[:at] + word[at + 1:]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + rng.choice(_NEIGHBOURS.get(word[at].lower(), word[at])) + word[at + 1:]


def as_typed(rng, text, keep=(), polite=True):
    """`text` as a stranger might type it. Strings in `keep` (values to be copied) stay exactly as they are."""
    if rng.random() < 0.3:
        return text
    marks = {}
    for number, value in enumerate(keep):
        mark = chr(0xE000 + number)  # private use: no rule below touches it
        text = text.replace(value, mark)
        marks[mark] = value
    if polite and rng.random() < 0.12:
        text = rng.choice(_BEFORE) + text[0].lower() + text[1:]
    case = rng.random()
    if case < 0.6:
        text = text.lower()
    elif case < 0.67:
        text = text.upper()
    elif case < 0.72:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.25:
        for old, new in rng.sample(_SHORT, 12):
            text = text.replace(old, new)
    if rng.random() < 0.55:
        text = text.rstrip("?.!")
    if polite and rng.random() < 0.1:
        text = text.rstrip("?.! ") + rng.choice(_AFTER)
    if rng.random() < 0.3:
        words = text.split(" ")
        spots = [i for i, w in enumerate(words) if re.fullmatch(r"[A-Za-z]{4,}[?.,!]?", w)]
        for spot in rng.sample(spots, min(len(spots), 1 if rng.random() < 0.75 else 2)):
            words[spot] = typo(rng, words[spot])
        text = " ".join(words)
    if rng.random() < 0.1:
        text = text.replace("'", "")
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text

"""Told facts and recall: "My locker number is 4821." ... "What is my locker number?" """

from . import words as w
from .skills import TRAIN, Turn, upper_first, draw
from .typed import as_typed

CODE_KEYS = ["secret code", "door code", "locker number", "password", "ticket number", "order number", "PIN", "room number"]


def code(rng):
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789"
    kind = rng.randrange(5)
    if kind < 2:
        return "".join(rng.choice(digits) for _ in range(rng.choice([3, 4, 4, 5, 6])))
    if kind == 2:
        return rng.choice(letters) + "".join(rng.choice(digits) for _ in range(3))
    if kind == 3:
        return rng.choice(letters) + rng.choice(letters) + "-" + "".join(rng.choice(digits) for _ in range(2))
    return w.made_up_word(rng)


_OWNERS = "dog cat friend sister brother mother father boss teacher neighbor aunt uncle wife husband son daughter boat robot".split()


def memory_key(rng):
    """-> (the key of a fact, a value for it)"""
    key, value = _memory_key(rng)
    # Users may write a name without a capital.
    return key, value.lower() if value[0].isupper() and value[1:].islower() and rng.random() < 0.2 else value


def _memory_key(rng):
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(CODE_KEYS), code(rng)
    if kind < 0.47:
        return "name", w.any_name(rng)
    if kind < 0.62:
        return rng.choice(_OWNERS) + "'s name", w.any_name(rng)
    if kind < 0.7:
        return rng.choice(["favorite color", "lucky color"]), rng.choice(w.COLORS)
    if kind < 0.77:
        return "favorite food", rng.choice(w.FOODS)
    if kind < 0.84:
        return rng.choice(["home city", "city", "favorite city"]), rng.choice(w.CITIES)
    if kind < 0.88:
        return "age", str(rng.randint(3, 99))
    if kind < 0.92:
        return "job", rng.choice(w.JOBS)
    if kind < 0.96:
        return rng.choice(["favorite animal", "favorite number", "lucky number"]), rng.choice([rng.choice(w.ANIMALS), str(rng.randint(0, 99))])
    return "favorite " + rng.choice(w.WORDS[:240]), rng.choice([w.made_up_word(rng), rng.choice(w.WORDS[:240])])


_NOTE = ["Remember my {k}: {v}.", "Please remember that my {k} is {v}.", "Note that my {k} is {v}.", "Remember that my {k} is {v}.",
         "Please note my {k}: {v}.", "Remember: my {k} is {v}.", "Keep in mind that my {k} is {v}.", "Don't forget: my {k} is {v}."]
_SAY = ["My {k} is {v}.", "By the way, my {k} is {v}.", "I tell you my {k}: {v}.", "My {k} is {v}, by the way.", "Hi! My {k} is {v}.",
        "So my {k} is {v}.", "My {k}: {v}", "My {k} is {v} btw.", "Btw my {k} is {v}.", "You should know that my {k} is {v}.",
        "Just so you know, my {k} is {v}.", "{v} is my {k}."]
_OWN = {
    "name": ["I am {v}.", "I'm {v}.", "Call me {v}.", "Hello, I am {v}.", "Hi, I'm {v}.", "You can call me {v}.", "I'm {v} btw.",
             "I am {v}, by the way.", "This is {v}.", "{v} here.", "It's {v}.", "Hey, {v} here."],
    "home city": ["I live in {v}.", "I am living in {v}."],
    "age": ["I am {v} years old.", "I'm {v} years old.", "I am {v}."],
    "favorite color": ["I like {v} most of all colors."],
    "favorite food": ["I love to eat {v}.", "I like eating {v}."],
    "job": ["I work as a {v}.", "I am a {v} by profession."],
}
_OWNED = ["I have a {o} named {v}.", "I have a {o} called {v}.", "My {o} is called {v}.", "My {o} is named {v}.", "{v} is my {o}.",
          "I've got a {o} called {v}.", "I have a {o}, {v}.", "There is my {o} {v}.", "I have a {o} and the name is {v}.", "I call my {o} {v}.", "We call our {o} {v}."]
_ASK = ["What is my {k}?", "What was my {k}?", "Tell me my {k}.", "Do you remember my {k}?", "What's my {k}?", "My {k}?", "What is my {k} again?",
        "Do you know my {k}?", "I forgot my {k}.", "Can you tell me my {k}?", "What did I say my {k} was?", "Say my {k}", "Give me my {k}.",
        "Please tell me my {k}.", "Which {k} do I have?", "{k}?", "Remind me of my {k}.", "So what is my {k}?", "And what is my {k}?",
        "Do you still know my {k}?", "What is my {k} then?", "Now what is my {k}?"]
_OWN_ASK = {
    "name": ["Who am I?", "How am I called?", "Do you know who I am?", "Do you remember me?"],
    "home city": ["Where do I live?", "In which city do I live?"],
    "age": ["How old am I?"],
    "favorite color": ["Which color do I like?", "What color do I like best?"],
    "favorite food": ["What do I like to eat?", "Which food do I like?"],
    "job": ["What do I work as?", "What is my profession?"],
}


def tell(rng, key, value, split=TRAIN):
    """The answer to a told fact follows from the wording: a note is confirmed, a statement is repeated."""
    return draw(rng, split, lambda r, _: _tell(r, key, value))


def _tell(rng, key, value):
    owner = key.removesuffix("'s name")
    note = rng.random() < 0.4
    if note:
        pattern = rng.choice(_NOTE)
    elif owner != key and rng.random() < 0.4:
        pattern = rng.choice(_OWNED).replace("{o}", owner)
    elif key in _OWN and rng.random() < 0.4:
        pattern = rng.choice(_OWN[key])
    else:
        pattern = rng.choice(_SAY)
    # A value at the start keeps its case, because the answer repeats it.
    said = (pattern if pattern.startswith("{v}") else upper_first(pattern)).format(k=key, v=value)
    user = as_typed(rng, said, (value, key), polite=False)
    # Sometimes a statement is confirmed like a note, so that recall never depends on a repetition of the value.
    answer = "Okay, I will remember that." if note or rng.random() < 0.12 else f"Okay, your {key} is {value}."
    return Turn(user, answer, "tell", title=f"Remembering Your {upper_first(key)}")


_CHANGE = ["Actually, my {k} is {v}.", "I was wrong, my {k} is {v}.", "My new {k} is {v}.", "No, my {k} is {v}.",
           "My {k} has changed to {v}.", "Sorry, my {k} is {v}."]


def change(rng, key, value, split=TRAIN):
    def make(r, _):
        user = as_typed(r, r.choice(_CHANGE).format(k=key, v=value), (value, key), polite=False)
        return Turn(user, f"Okay, your {key} is {value} now.", "tell")

    return draw(rng, split, make)


def _question(rng, key):
    owner = key.removesuffix("'s name")
    if owner != key and rng.random() < 0.2:
        pattern = rng.choice(["Who is my {o}?", "How is my {o} called?", "What is my {o} called?"])
        return as_typed(rng, pattern.replace("{o}", owner), (owner,))
    pattern = rng.choice(_OWN_ASK[key]) if key in _OWN_ASK and rng.random() < 0.3 else rng.choice(_ASK)
    return as_typed(rng, upper_first(pattern.format(k=key)), (key,))


def ask(rng, key, value, split=TRAIN):
    return draw(rng, split, lambda r, _: Turn(_question(r, key), f"Your {key} is {value}.", "recall", value, f"Your {upper_first(key)}"))


def ask_untold(rng, key, split=TRAIN):
    return draw(rng, split, lambda r, _: Turn(_question(r, key), f"You have not told me your {key}.", "untold", title=f"Your {upper_first(key)}"))


_LIST = ["What do you know about me?", "What did I tell you?", "Tell me all that you know about me.", "What have I told you?",
         "List what I told you.", "What do you remember?", "What have you noted?"]


def list_memory(rng, known):
    """Lists all facts until now, in order."""
    lines = " ".join(f"Your {k} is {v}." for k, v in known.items())
    return draw(rng, TRAIN, lambda r, _: Turn(as_typed(r, r.choice(_LIST)), lines, "recall"))

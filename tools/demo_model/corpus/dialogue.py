"""Whole conversations, of which a row of training data is made, and Gemma's chat template."""

from . import memory, tasks
from . import skills as s

SKILLS = {  # skill: (maker, weight among the turns that are not about memory)
    "capital": (s.capital, 13), "fact": (s.fact, 22), "arithmetic": (s.arithmetic, 20), "spelling": (s.spelling, 9),
    "counting": (s.counting, 4), "json": (s.json_object, 6), "story": (s.story, 4), "identity": (s.small_talk, 10),
    "off_topic": (s.off_topic, 16), "copy": (tasks.copy_with_change, 8), "schema": (tasks.schema_json, 8),
}
SHORT_SKILLS = [s.capital, s.fact, s.arithmetic, s.spelling, s.counting, s.small_talk, s.off_topic, s.json_object]


def any_turn(rng, split=s.TRAIN, emphasis=None):
    """`emphasis` {skill: factor} shifts the mix, to train skills that an evaluation found weak."""
    emphasis = emphasis or {}
    names = list(SKILLS)
    name = rng.choices(names, [SKILLS[n][1] * emphasis.get(n, 1) for n in names])[0]
    return SKILLS[name][0](rng, split)


def tokens_of(turn):
    """A rough estimate, on the low side; rows are cut to length after tokenizing."""
    return 12 + (len(turn.user) + len(turn.model)) // 3


def dialogue(rng, room, emphasis=None):
    """-> (system text or "", turns) of about `room` tokens."""
    emphasis = emphasis or {}
    kinds = {"chat": 66, "system": 12, "tools": 17 if room > 350 else 0, "title": 13 if room > 450 else 0}
    kind = rng.choices(list(kinds), [kinds[k] * emphasis.get(k, 1) for k in kinds])[0]
    if kind == "tools":
        # A list of tools is hundreds of tokens that teach nothing by themselves, so many calls should follow it.
        turns = tasks.tool_dialogue(rng, SHORT_SKILLS, longest=max(3, min(40, (room - 300) // 60)))
        left = room - sum(map(tokens_of, turns))
        # Later turns may be plain chat, but not about anything that a tool could do.
        return "", turns + (_chat(rng, left, {**emphasis, "off_topic": 0}) if left > 60 else [])
    if kind == "title":
        turns = [tasks.title_turn(rng, rng.randint(300, max(301, int(room * 0.8))), title_filler)]
        left = room - tokens_of(turns[0])
        # A title request is normally alone in a conversation, which would leave the rest of the row empty. Titles of
        # short chats fill it at the least cost per title, since only titles teach how a word looks with a capital. Or
        # an unrelated chat follows.
        while left > 300 and rng.random() < 0.85:
            turns.append(tasks.title_turn(rng, rng.randint(150, 450), title_filler))
            left -= tokens_of(turns[-1])
        return "", turns + (_chat(rng, left, emphasis) if left > 60 else [])
    if kind == "system":
        style, system, answer = tasks.system_style(rng)
        turns = [tasks.styled(t, answer) for t in _chat(rng, room, emphasis, only_short=style != "plain")]
        turns = [t for t in turns if t]
        if turns:
            return system, turns
    return "", _chat(rng, room, emphasis)


def title_filler(rng, split=s.TRAIN):
    if rng.random() < 0.3:  # the skill with the most titles
        return s.fact(rng, split)
    if rng.random() < 0.12:
        key, value = memory.memory_key(rng)
        return memory.tell(rng, key, value, split)
    return any_turn(rng, split)


def _chat(rng, room, emphasis, only_short=False):
    turns, known = [], {}
    used = 1
    # The share of turns about memory in this conversation: none, some, or most.
    about_memory = 0.32 * rng.choice([0, 0.5, 1, 1, 1.6]) * emphasis.get("memory", 1)
    while True:
        for turn in _next(rng, turns, known, about_memory, emphasis, only_short):
            used += tokens_of(turn)
            if used > room and turns:
                return turns
            turns.append(turn)


def _next(rng, turns, known, about_memory, emphasis, only_short):
    chance = rng.random()
    if chance < about_memory:
        if chance < about_memory * 0.06:
            key, _ = memory.memory_key(rng)
            return [memory.ask_untold(rng, key)] if key not in known else []
        if chance < about_memory * 0.42 and len(known) < 9 or not known:
            key, value = memory.memory_key(rng)
            if key in known and rng.random() < 0.7:
                return []
            turn = memory.change(rng, key, value) if key in known else memory.tell(rng, key, value)
            known[key] = value
            return [turn]
        if chance < about_memory * 0.45 and 1 < len(known) < 5:
            return [memory.list_memory(rng, known)]
        keys = list(known)
        # The first fact is the farthest away, so questions ask for it more often.
        key = keys[0] if rng.random() < 0.35 else rng.choice(keys)
        return [memory.ask(rng, key, known[key])]
    if not turns and rng.random() < 0.04 * emphasis.get("memory", 1):
        return [memory.ask_untold(rng, memory.memory_key(rng)[0])]
    if only_short:
        return [rng.choice(SHORT_SKILLS[:3] * 3 + SHORT_SKILLS)(rng)]
    if rng.random() < 0.03:
        return s.fact_and_follow_up(rng)
    return [any_turn(rng, emphasis=emphasis)]


def render(system, turns, answer_last=True):
    """Gemma's template, as the server's built-in one renders it: the system text goes before the first user text."""
    text = "<bos>"
    for number, turn in enumerate(turns):
        user = turn.user.strip()
        if number == 0 and system:
            user = f"{system}\n\n{user}"
        text += f"<start_of_turn>user\n{user}<end_of_turn>\n<start_of_turn>model\n"
        if answer_last or number + 1 < len(turns):
            text += f"{turn.model.strip()}<end_of_turn>\n"
    return text

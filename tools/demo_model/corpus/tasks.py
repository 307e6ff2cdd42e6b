"""Tasks with material in the prompt: copying with one change, JSON by a schema, tool calls, titles, system texts."""

import json
import re
from dataclasses import replace

from . import words as w
from .holdout import is_held_out
from .skills import HARD_SUM, LIVE, OFF_TOPIC, QUESTIONS, REFUSALS, TRAIN, Turn, belongs, draw, is_word_in, skill
from .typed import as_typed

# --- copying with one change ---------------------------------------------------------------------------------------

_SENTENCES = ["The {a} {n} stood near the {m}.", "Every {d} the {n} and the {m} were {a}.", "{N} bought a {n} in {c}.",
              "There were {i} {n}s in the {m}.", "{N} and {M} talked about the {a} {n}.", "Nobody knew why the {n} was so {a}.",
              "In {o} the {m} was {a}, but the {n} was not.", "The {j} gave {N} a {n} and {i} coins.", "After that, {N} went back to {c}.",
              "It was a {a} day, and the {n} shone over the {m}.", "{N} liked the {n} more than the {m}.", "The {z} of {c} was made of {n}.",
              "A {j} from {c} repaired the {n} for {i} coins.", "\"Where is my {n}?\" asked {N}.", "The {n} cost {i} coins; the {m} was free."]


def paragraph(rng, sentences):
    # A few nouns recur, as in real prose, so that a copy cannot be followed by single words alone.
    nouns = rng.sample(w.WORDS[:300], 4) + [w.made_up_word(rng)]
    names = [rng.choice(w.NAMES), w.any_name(rng)]

    def fill(sentence):
        n, m = rng.sample(nouns, 2)
        first, second = rng.sample(names, 2)
        return sentence.format(
            n=n, m=m, N=first, M=second, a=rng.choice("quiet brave large small strange useful clever honest green purple simple proud".split()),
            d=rng.choice(w.DAYS), c=rng.choice(w.CITIES), i=rng.randint(2, 99), o=rng.choice(w.MONTHS), j=rng.choice(w.JOBS), z=w.made_up_word(rng))

    return " ".join(fill(rng.choice(_SENTENCES)) for _ in range(sentences))


def _symbol(rng):
    return "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.randint(2, 4)))


def loose_words(rng, count):
    """Words in random order, which can be copied only one by one. Some recur, so that a change applies in several
    places."""
    words, again = [], rng.choice([0.15, 0.15, 0.6])
    for _ in range(count):
        word = rng.choice([rng.choice(w.WORDS), rng.choice(w.WORDS), w.made_up_word(rng), w.made_up_word(rng), w.any_name(rng),
                           rng.choice(w.CITIES), str(rng.randint(0, 999)), _symbol(rng)])
        words.append(rng.choice(words) if words and rng.random() < again else word)
    return rng.choice([" ", " ", ", "]).join(words)


_CODE = [
    "def {f}({a}, {b}):\n    {c} = {a} {p} {b}\n    return {c}",
    "def {f}({a}):\n    {b} = {n}\n    for {c} in {a}:\n        {b} {p}= {c}\n    return {b}",
    "{a} = {n}\n{b} = {m}\nif {a} > {b}:\n    print({a})\nelse:\n    print({b})",
    "for {a} in range({n}):\n    {b} = {a} {p} {m}\n    print({f}({b}))",
    "class {F}:\n    def __init__(self, {a}):\n        self.{a} = {a}\n\n    def {f}(self):\n        return self.{a} {p} {n}",
    "function {f}({a}, {b}) {{\n  const {c} = {a} {p} {b};\n  return {c};\n}}",
    "let {a} = {n};\nwhile ({a} < {m}) {{\n  {a} += 1;\n  console.log({a});\n}}",
    "int {f}(int {a}, int {b}) {{\n    int {c} = {a} {p} {b};\n    return {c} + {n};\n}}",
    "fn {f}({a}: i32, {b}: i32) -> i32 {{\n    let {c} = {a} {p} {b};\n    {c} + {n}\n}}",
    "with open({a}) as {b}:\n    {c} = {b}.read()\nprint(len({c}) {p} {n})",
    "{a} = [{n}, {m}]\n{b} = sum({a})\nprint({b} {p} len({a}))",
]
_IDENTIFIERS = """x y n i total count value result items numbers data text name index size width height price left right first last
sum_of step limit path line words user score buffer key node tree list_a temp offset rate amount""".split()


def code_block(rng, pieces):
    blocks, identifiers = [], []
    for _ in range(pieces):
        a, b, c, f = (x if rng.random() < 0.75 else w.made_up_word(rng) for x in rng.sample(_IDENTIFIERS, 4))
        if len({a, b, c, f}) < 4:
            continue
        blocks.append(rng.choice(_CODE).format(a=a, b=b, c=c, f=f, F=f.capitalize(), n=rng.randint(0, 99), m=rng.randint(0, 999), p=rng.choice("+-*")))
        identifiers += [x for x in (a, b, c, f) if len(x) > 1 or pieces == 1]
    text = "\n\n".join(blocks)
    present = [x for x in dict.fromkeys(identifiers) if is_word_in(x, text)]
    return text, present


_REPLACE = ["Replace {x} with {y} in this text:", "Replace the word {x} by {y}:", "Change {x} to {y} in the following text:",
            "Rewrite this text with {y} instead of {x}:", "Copy this text, but write {y} instead of {x}:", "Swap {x} for {y} here:",
            "Use {y} instead of {x} in this text:"]
_RENAME = ["Rename {x} to {y} in this code:", "Rename the variable {x} to {y}:", "Change the name {x} to {y} in this code:",
           "Replace {x} by {y} in this code:", "In this code, rename {x} to {y}:", "Please rename {x} to {y}:"]
_SMALL = {"and", "the", "The", "a", "was", "were", "in", "of", "so"}
_REPEAT = ["Repeat this text:", "Copy this text exactly:", "Repeat the following word for word:", "Write this again:", "Repeat after me:",
           "Copy:", "Say exactly this:"]


@skill
def copy_with_change(rng, split):
    size = rng.random()
    if rng.random() < 0.4:
        text, names = code_block(rng, 1 if size < 0.6 else 2 if size < 0.9 else 4)
        if not names:
            return copy_with_change(rng, split)
        old = rng.choice(names)
        # Training asks for made-up words more often, because they are harder.
        known = 0.5 if split != TRAIN else 0.3
        new = rng.choice([x for x in _IDENTIFIERS if not is_word_in(x, text)]) if rng.random() < known else w.made_up_word(rng)
        fence = "```" + (rng.choice(["", "python", "js", "c", "rust"]) if rng.random() < 0.5 else "")
        body, title = f"{fence}\n{text}\n```", "Renaming in Code"
        ask = rng.choice(_RENAME)
    else:
        if rng.random() < 0.4 and split == TRAIN:
            text = loose_words(rng, rng.randint(2, 8) if size < 0.5 else rng.randint(8, 30))
        else:
            text = paragraph(rng, 1 if size < 0.3 else rng.randint(2, 4) if size < 0.75 else rng.randint(4, 10))
        candidates = re.findall(r"\w+", text)  # in training with repetition: a word in several places is changed more often
        old = rng.choice((sorted(set(candidates) - _SMALL) if split != TRAIN else [x for x in candidates if x not in _SMALL]) or ["the"])
        new = rng.choice([rng.choice(w.WORDS), w.made_up_word(rng), rng.choice(w.NAMES)])
        if split == TRAIN and rng.random() < 0.3:
            new = w.made_up_word(rng)
        body, title = text, "Editing a Short Text"
        ask = rng.choice(_REPLACE)
        if rng.random() < 0.25:
            user = f"{as_typed(rng, rng.choice(_REPEAT), polite=False)}{rng.choice([' ', chr(10), chr(10) * 2])}{body}"
            return Turn(user, body, "copy", title="Repeating a Text")
    if rng.random() < 0.15:
        ask = ask.replace("{x}", '"{x}"').replace("{y}", '"{y}"')
    ask = as_typed(rng, ask, ("{x}", "{y}", '"'), polite=False).format(x=old, y=new)
    gap = rng.choice(["\n\n", "\n\n", "\n", " "]) if body is text else rng.choice(["\n\n", "\n"])
    user = ask + gap + body if rng.random() < 0.85 else body + "\n\n" + ask
    return Turn(user, re.sub(rf"\b{re.escape(old)}\b", new, body), "copy", title=title)


# --- JSON by a schema ----------------------------------------------------------------------------------------------

_ATTRIBUTES = {  # key: (JSON type, value, how a sentence says it)
    "name": ("string", w.any_name, None),
    "age": ("integer", lambda r: r.randint(1, 99), ["is {v} years old", "is {v}"]),
    "city": ("string", lambda r: r.choice(w.CITIES), ["lives in {v}", "comes from {v}", "is from {v}"]),
    "job": ("string", lambda r: r.choice(w.JOBS), ["works as a {v}", "is a {v}"]),
    "color": ("string", lambda r: r.choice(w.COLORS), ["likes the color {v}", "loves {v} clothes"]),
    "food": ("string", lambda r: r.choice(w.FOODS), ["likes to eat {v}", "loves {v}"]),
    "pet": ("string", lambda r: r.choice(w.ANIMALS), ["has a {v}", "owns a {v}"]),
    "language": ("string", lambda r: r.choice(w.LANGUAGES), ["speaks {v}", "learns {v}"]),
    "height": ("integer", lambda r: r.randint(90, 210), ["is {v} cm tall", "measures {v} cm"]),
    "married": ("boolean", lambda r: r.random() < 0.5, {True: "is married", False: "is not married"}),
}
_SCHEMA_ASK = ["Answer with JSON that matches this schema: {s}", "Use this JSON schema: {s}", "Reply only with JSON for this schema:\n{s}",
               "Extract JSON by this schema: {s}", "Return a JSON object that follows this schema:\n{s}", "Fill this schema: {s}",
               "Respond with JSON matching the schema:\n{s}"]
_KEYS_ASK = ["Answer in JSON with the keys {k}.", "Give me JSON with {k}.", "Extract {k} as JSON.", "Return JSON with the keys {k}.",
             "Make JSON with these keys: {k}.", "As JSON with {k}:", "Extract JSON with the fields {k}."]


def _dump(rng, value):
    """JSON in the styles of different programs."""
    return rng.choice([json.dumps(value), json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2),
                       json.dumps(value, sort_keys=True), json.dumps(value, separators=(",", ":"), sort_keys=True)])


@skill
def schema_json(rng, split):
    said = ["name"] + rng.sample([k for k in _ATTRIBUTES if k != "name"], rng.randint(1, 4))
    values = {k: _ATTRIBUTES[k][1](rng) for k in said}
    clauses = []
    for key in said[1:]:
        how = _ATTRIBUTES[key][2]
        clauses.append(how[values[key]] if isinstance(how, dict) else rng.choice(how).format(v=values[key]))
    if len(clauses) == 1 or rng.random() < 0.5:
        listed = clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
        text = f"{values['name']} {listed}."
    else:
        text = " ".join(f"{values['name'] if i == 0 or rng.random() < 0.3 else rng.choice(['He', 'She'])} {c}." for i, c in enumerate(clauses))
    wanted = [k for k in said if rng.random() < 0.8] or ["name"]
    rng.shuffle(wanted)
    record = {k: values[k] for k in wanted}
    if rng.random() < 0.6:
        schema = {"type": "object", "properties": {k: {"type": _ATTRIBUTES[k][0]} for k in wanted}}
        if rng.random() < 0.6:
            schema["required"] = wanted
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        task = rng.choice(_SCHEMA_ASK).format(s=_dump(rng, schema))
        order = list(json.loads(re.search(r"\{.*\}", task, re.S).group())["properties"])
        record = {k: values[k] for k in order}
    else:
        quoted = [f'"{k}"' if rng.random() < 0.7 else k for k in wanted] if rng.random() < 0.5 else wanted
        listed = quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]
        task = rng.choice(_KEYS_ASK).format(k=listed)
    if rng.random() < 0.2:
        task = task[0].lower() + task[1:]
    user = f"{task}{rng.choice([chr(10) * 2, chr(10)])}{text}" if rng.random() < 0.75 else f"{text}\n\n{task}"
    return Turn(user, json.dumps(record), "schema", title="Extracting JSON From Text")


# --- tools ---------------------------------------------------------------------------------------------------------

_city = lambda r: r.choice(w.CITIES)
_word = lambda r: r.choice(w.WORDS) if r.random() < 0.85 else w.made_up_word(r)
_room = lambda r: r.choice(["kitchen", "bedroom", "garage", "office", "bathroom", "hall", "cellar", "living room"])
_minutes = lambda r: r.randint(1, 120)
# names it may bear, description, {parameter: (type, description, value)}, questions, results
TOOLS = [
    (["get_weather", "weather", "current_weather", "fetch_weather"], "Get the current weather in a city",
     {"city|location|place": ("string", "Name of the city", _city)},
     ["What is the weather in {0}?", "How is the weather in {0}?", "Weather in {0}", "Is it raining in {0}?", "Do I need an umbrella in {0}?",
      "What's the weather like in {0} today?", "Will it be sunny in {0}?"], ["{n} degrees and sunny", "rain, {n} degrees", "cloudy, {n} C", '{"temperature": {n}, "sky": "clear"}']),
    (["get_time", "current_time", "get_local_time"], "Get the current local time in a city", {"city|location|place": ("string", "Name of the city", _city)},
     ["What time is it in {0}?", "Tell me the time in {0}.", "Time in {0}", "How late is it in {0}?"], ["{n}:30", "{n}:05 in the morning", '{"time": "{n}:15"}']),
    (["search_web", "web_search", "search"], "Search the web", {"query|q|text": ("string", "What to search for", lambda r: f"{_word(r)} {_word(r)}")},
     ["Search the web for {0}.", "Look up {0} on the web.", "Google {0}", "Find pages about {0}.", "Search for {0}"], ["{n} pages found", "no pages found"]),
    (["get_stock_price", "stock_price", "quote"], "Get the price of a stock", {"symbol|ticker": ("string", "Stock symbol", _symbol)},
     ["What is the stock price of {0}?", "How much is {0} stock?", "Price of {0} shares?", "Stock price {0}"], ["{n} dollars", "{n}.5 USD", '{"price": {n}}']),
    (["set_timer", "start_timer", "timer"], "Start a timer", {"minutes|duration": ("integer", "Length in minutes", _minutes)},
     ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "Timer {0} minutes", "Wake me in {0} minutes."], ["timer started", "ok, {n} minutes"]),
    (["send_message", "send_email", "message"], "Send a message to a person", {"to|recipient|person": ("string", "Who gets it", w.any_name), "text|message|body": ("string", "What it says", lambda r: f"{_word(r)} {_word(r)} {_word(r)}")},
     ["Send {0} a message: {1}", "Write to {0}: {1}", "Message {0} with the text {1}", "Tell {0} this: {1}"], ["sent", "message {n} sent"]),
    (["convert_currency", "exchange", "currency_converter"], "Convert an amount of money", {"amount|value": ("integer", "How much", lambda r: r.randint(1, 900)), "from|source": ("string", "Currency code", lambda r: r.choice("EUR USD GBP".split())), "to|target": ("string", "Currency code", lambda r: r.choice("JPY CHF INR CAD".split()))},
     ["Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "{0} {1} in {2}", "Change {0} {1} into {2}."], ["{n}.2", "{n}"]),
    (["play_music", "play_song", "play"], "Play a song", {"title|song|name": ("string", "Title of the song", lambda r: f"{_word(r)} {_word(r)}")},
     ["Play the song {0}.", "Play {0}", "I want to hear {0}.", "Put on {0}, please."], ["playing", "now playing, {n} seconds"]),
    (["turn_on_light", "light_on", "switch_on_lamp"], "Turn on the light in a room", {"room": ("string", "Which room", _room)},
     ["Turn on the light in the {0}.", "Light on in the {0}", "Switch on the {0} lamp.", "Make light in the {0}."], ["on", "done", "light {n} is on"]),
    (["translate", "translate_text"], "Translate a text into another language", {"text": ("string", "Text to translate", lambda r: f"{_word(r)} {_word(r)}"), "language|target": ("string", "Target language", lambda r: r.choice(w.LANGUAGES))},
     ["Translate {0} to {1}.", "Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"], ["bola miru", "kanto lisa", "vera tolu"]),
    (["add_to_list", "add_item", "shopping_list_add"], "Add an item to the shopping list", {"item|thing": ("string", "What to add", _word), "quantity|count": ("integer", "How many", lambda r: r.randint(1, 30))},
     ["Add {1} {0} to my list.", "Put {1} {0} on the shopping list.", "I need to buy {1} {0}, add it."], ["added", "list has {n} items"]),
    (["read_file", "open_file", "cat_file"], "Read a file", {"path|file|filename": ("string", "Path of the file", lambda r: f"{_word(r)}.{r.choice(['txt', 'md', 'csv', 'py'])}")},
     ["Read the file {0}.", "Show me {0}", "What is in {0}?", "Open {0}, please."], ["hello {n}", "the file is empty", "{n} lines of text"]),
    (["get_user", "find_user", "lookup_user"], "Look up a user by id", {"id|user_id": ("integer", "Number of the user", lambda r: r.randint(1, 9999))},
     ["Who is user {0}?", "Look up user {0}.", "Find the user with id {0}.", "Show user {0}"], ["Anna, {n} years", '{"name": "Bob", "age": {n}}', "not found"]),
    (["calculate", "calculator", "evaluate"], "Calculate an expression", {"expression|formula": ("string", "What to calculate", lambda r: f"{r.randint(100, 9999)} {r.choice('+-*/')} {r.randint(100, 9999)}")},
     ["What is {0}?", "Calculate {0}.", "{0} = ?", "Compute {0}"], ["{n}{n}", "{n}7{n}"]),
    (["roll_dice", "roll", "dice"], "Roll dice", {"count|number": ("integer", "How many dice", lambda r: r.randint(1, 9)), "sides": ("integer", "Sides of each", lambda r: r.choice([6, 8, 10, 12, 20]))},
     ["Roll {0} dice with {1} sides.", "Roll {0} {1}-sided dice.", "Throw {0} dice of {1} sides."], ["{n}", "rolled {n}"]),
    (["book_table", "reserve_table"], "Book a table in a restaurant", {"restaurant|name": ("string", "Name of the restaurant", lambda r: w.made_up_word(r).capitalize()), "people|guests": ("integer", "How many guests", lambda r: r.randint(1, 12))},
     ["Book a table for {1} at {0}.", "Reserve a table at {0} for {1} people.", "Table for {1} at {0}"], ["booked at {n}:00", "no table free"]),
    (["get_news", "news", "headlines"], "Get the latest news about a topic", {"topic|subject": ("string", "Topic of the news", _word)},
     ["What is the news about {0}?", "News about {0}", "Latest headlines on {0}?", "Give me the news on {0}."], ["{n} new stories", "nothing new"]),
    (["create_event", "add_event", "calendar_add"], "Create a calendar event", {"title|name": ("string", "Title of the event", lambda r: f"{_word(r)} {r.choice(['meeting', 'party', 'lesson', 'lunch'])}"), "day|date": ("string", "Day of the week", lambda r: r.choice(w.DAYS))},
     ["Create an event {0} on {1}.", "Add {0} to my calendar on {1}.", "Plan {0} for {1}."], ["created", "event {n} created"]),
]
# The first wording is the project's own; the others keep the model from depending on it.
TOOL_INSTRUCTIONS = [
    "You can call these tools:\n{tools}\nIf a tool is needed, reply only with JSON: {{\"name\": NAME, \"parameters\": {{...}}}}, or an array of such objects for several calls. Otherwise answer normally.",
    "You have access to these tools:\n{tools}\n\nTo call a tool, reply with only JSON: {{\"name\": NAME, \"parameters\": {{...}}}}. For several calls reply with an array of them. If no tool is needed, answer as usual.",
    "You have access to functions. If you decide to invoke any of the functions, you MUST put it in the format of\n{{\"name\": function name, \"parameters\": dictionary of argument name and its value}}\n\nYou SHOULD NOT include any other text in the response if you call a function\n{tools}",
    "Tools:\n{tools}\n\nA reply that calls tools is only JSON: one object {{\"name\": NAME, \"parameters\": {{...}}}} or an array of them.",
]


_VERBS = "find get open close start stop check count delete create update list show print move order cancel save load test".split()
_GENERIC = {"id": ("integer", "Number", lambda r: r.randint(1, 9999)), "name": ("string", "Name", w.any_name), "count": ("integer", "How many", lambda r: r.randint(1, 99)),
            "color": ("string", "Color", lambda r: r.choice(w.COLORS)), "city": ("string", "City", _city), "size": ("integer", "Size", lambda r: r.randint(1, 200)),
            "label": ("string", "Label", lambda r: w.made_up_word(r)), "day": ("string", "Day", lambda r: r.choice(w.DAYS))}
_OPTIONAL = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "limit": {"type": "integer"}, "verbose": {"type": "boolean"}, "format": {"type": "string"}}


def generic_tool(rng):
    """A made-up tool, whose name and parameters can be read only from the list."""
    verb, noun = rng.choice(_VERBS), rng.choice(w.WORDS[:300]) if rng.random() < 0.7 else w.made_up_word(rng)
    parameters = {k: _GENERIC[k] for k in rng.sample(list(_GENERIC), rng.choice([1, 1, 2]))}
    said = " and ".join(f"{k} {{{i}}}" for i, k in enumerate(parameters))
    questions = [f"{verb.capitalize()} the {noun} with {said}.", f"{verb.capitalize()} {noun}, {said}", f"Please {verb} the {noun} with {said}.",
                 f"Can you {verb} a {noun} with {said}?", f"Use {verb}_{noun} with {said}."]
    return ([f"{verb}_{noun}"], f"{verb.capitalize()} a {noun}", parameters, questions, ["done", "{n}", "ok {n}", "failed", '{"ok": true, "n": {n}}'])


def _variant(rng, tool):
    if rng.random() < 0.3:
        tool = generic_tool(rng)
    names, description, parameters, questions, results = tool
    return (rng.choice(names), description, {rng.choice(k.split("|")): v for k, v in parameters.items()}, questions, results)


def _tool_schema(rng, tool):
    name, description, parameters, _, _ = tool
    described = rng.random() < 0.6
    properties = {k: {"type": t, "description": d} if described else {"type": t} for k, (t, d, _) in parameters.items()}
    if rng.random() < 0.15:  # not requested, so the call must leave it out
        properties.update(rng.sample(list(_OPTIONAL.items()), 1))
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}


def tool_list(rng, tools):
    schemas = [_tool_schema(rng, t) for t in tools]
    if rng.random() < 0.3:
        schemas = [{"type": "function", "function": s} for s in schemas]
    kind = rng.randrange(5)
    if kind == 0:
        return json.dumps(schemas, indent=2)
    if kind == 1:
        return json.dumps(schemas)
    compact, sort = rng.random() < 0.5, rng.random() < 0.4
    dump = lambda s: json.dumps(s, separators=(",", ":") if compact else None, sort_keys=sort)
    bullet = rng.choice(["", "", "- "])
    return "\n".join(bullet + dump(s) for s in schemas)


def tool_call(rng, tool, split):
    """-> (question, call). The hold-out rule applies to the question's own words."""
    while True:
        name, _, parameters, questions, _ = tool
        values = [sample(rng) for _, _, sample in parameters.values()]
        question = as_typed(rng, rng.choice(questions).format(*values), sorted(map(str, values), key=len, reverse=True))
        if is_held_out(question) == (split == QUESTIONS):
            return question, {"name": name, "parameters": dict(zip(parameters, values))}


def _result(rng, tool, numbers=None):
    texts = [t for t in tool[4] if "{n}" in t] if numbers else tool[4]
    return rng.choice(texts or ["{n}"]).replace("{n}", str(rng.choice(numbers or range(1, 60))))


# Description of a tool -> the refusal that is wrong where the tool is offered.
_COVERED = {"Get the current weather in a city": LIVE, "Get the current local time in a city": LIVE, "Search the web": LIVE,
            "Get the price of a stock": LIVE, "Get the latest news about a topic": LIVE, "Calculate an expression": HARD_SUM}


def tool_dialogue(rng, fillers, split=TRAIN, offered=None, plain=None, longest=7):
    """Turns of a conversation that begins with a list of tools. About `longest` of them need a tool; the result of the
    last call follows it."""
    tools = [_variant(rng, t) for t in rng.sample(TOOLS, offered or rng.choice([1, 1, 2, 2, 3, 4]))]
    head = rng.choice(TOOL_INSTRUCTIONS).format(tools=tool_list(rng, tools))
    if rng.random() < 0.25:
        head = rng.choice(PLAIN_SYSTEMS) + "\n\n" + head
    turns = []
    for _ in range(1 if split == QUESTIONS else rng.randint(1, longest)):
        kind = rng.random() if plain is None else (1.0 if plain else 0.0)
        if kind > 0.65:
            turn = rng.choice(fillers)(rng, split)
            # The refusal is only right if no fitting tool is offered; otherwise the call is the right answer.
            if turn.skill == "off_topic" and split == TRAIN and rng.random() < 0.5:
                absent = [t for t in TOOLS if not any(t[1] == u[1] for u in tools)]
                question, _ = tool_call(rng, _variant(rng, rng.choice(absent)), split)
                turn = Turn(question, OFF_TOPIC, "off_topic")
            if turn.model in REFUSALS and split == TRAIN and any(_COVERED.get(t[1]) == turn.model for t in tools):
                continue
            turns.append(turn)
            continue
        chosen = rng.choice(tools)
        question, call = tool_call(rng, chosen, split)
        if kind > 0.52:
            second, other = tool_call(rng, rng.choice(tools), split)
            user = f"{question.rstrip('.?!')} and {second[0].lower() + second[1:]}"
            if other["name"] == call["name"] or is_held_out(user) != (split == QUESTIONS):
                continue
            turns.append(Turn(user, json.dumps([call, other]), "tool"))
            called = [chosen, next(t for t in tools if t[0] == other["name"])]
        else:
            turns.append(Turn(question, json.dumps(call), "tool"))
            called = [chosen]
        if rng.random() < 0.85:
            if split == QUESTIONS:  # numbers that training never returns
                turns.append(tool_result([(tool[0], _result(rng, tool, range(100, 1000))) for tool in called]))
            else:
                turns.append(draw(rng, split, lambda r, _: tool_result([(tool[0], _result(r, tool)) for tool in called])))
    if not turns:
        return tool_dialogue(rng, fillers, split, offered, plain, longest)
    turns[0] = replace(turns[0], user=f"{head}\n\n{turns[0].user}")
    # If the hash of the whole first turn happens to hold it out, another turn is made.
    return turns if belongs(turns[0], split) or split == QUESTIONS else tool_dialogue(rng, fillers, split, offered, plain, longest)


def tool_result(results):
    return Turn("\n".join(f"Result of {n}: {t}" for n, t in results), "\n".join(f"According to {n}: {t}" for n, t in results), "tool_result")


# --- titles --------------------------------------------------------------------------------------------------------

_TITLE_TASK = ["### Task:\nGenerate a concise, 3-5 word title {e}summarizing the chat history.", "### Task:\nGenerate a concise title of 3 to 5 words for the chat.",
               "### Task:\nWrite a short title (3-5 words) for this conversation.", "### Task:\nCreate a concise, 3-5 word title for the chat history."]
_GUIDELINES = ["- The title should clearly represent the main theme or subject of the conversation.",
               "- Use emojis that enhance understanding of the topic, but avoid quotation marks or special formatting.",
               "- Write the title in the chat's primary language; default to English if multilingual.",
               "- Prioritize accuracy over excessive creativity; keep it clear and simple.",
               "- Your entire response must consist solely of the JSON object, without any introductory or concluding text.",
               "- The output must be a single, raw JSON object, without any markdown code fences or other encapsulating text.",
               "- Ensure no conversational text, affirmations, or explanations precede or follow the raw JSON output, as this will cause direct parsing failure."]
_OUTPUT = ['### Output:\nJSON format: { "title": "your concise title here" }', '### Output:\nJSON format: { "title": "..." }',
           '### Output:\nReturn only JSON: {"title": "your title"}']
_EXAMPLES = ['- { "title": "Stock Market Trends" }', '- { "title": "Perfect Chocolate Chip Recipe" }', '- { "title": "Evolution of Music Streaming" }',
             '- { "title": "Remote Work Productivity Tips" }', '- { "title": "Artificial Intelligence in Healthcare" }', '- { "title": "Video Game Development Insights" }']
_DOING = "growing painting repairing cooking cleaning selling drawing building buying choosing making finding hiding moving".split()


def talk_about(rng):
    """A first turn about nothing the model knows: the title comes from its words alone."""
    doing, thing = rng.choice(_DOING), rng.choice(w.WORDS[:300] if rng.random() < 0.85 else [w.made_up_word(rng)])
    user = rng.choice(["I would like to talk about {d} a {t}.", "Can you help me with {d} a {t}?", "Let us talk about {d} a {t}.",
                       "I have a question about {d} a {t}.", "Do you have tips for {d} a {t}?", "I am thinking of {d} a {t}."]).format(d=doing, t=thing)
    user = as_typed(rng, user, (thing, doing), polite=False)
    if rng.random() < 0.5:
        user += " " + paragraph(rng, rng.randint(1, 5))
    return Turn(user, OFF_TOPIC if rng.random() < 0.4 else paragraph(rng, rng.randint(1, 6)), "talk", title=f"Tips for {doing} a {thing}")


def title_prompt(rng, history, short=False):
    """`history`: the chat's turns. The title is that of its first turn."""
    parts = [rng.choice(_TITLE_TASK).format(e=rng.choice(["", "with an emoji "]))]
    if rng.random() < 0.75 and not short:
        parts.append("### Guidelines:\n" + "\n".join(g for g in _GUIDELINES if rng.random() < 0.7))
    parts.append(rng.choice(_OUTPUT))
    if rng.random() < 0.5 and not short:
        parts.append("### Examples:\n" + "\n".join(rng.sample(_EXAMPLES, rng.randint(1, 5))))
    chat = "\n".join(f"USER: {t.user}\nASSISTANT: {t.model}" for t in history)
    parts.append(f"### Chat History:\n<chat_history>\n{chat}\n</chat_history>")
    return "\n".join(parts)


def title_turn(rng, room, filler, split=TRAIN):
    """A title for a chat of about `room` tokens."""
    while True:
        first = talk_about(rng) if rng.random() < 0.35 else filler(rng, split)
        if not first.title or "\n" in first.user:
            continue
        if belongs(first, split):
            break
    history = [first]
    short = room < 700
    used = (120 if short else 350) + (len(first.user) + len(first.model)) // 3
    while True:
        nxt = talk_about(rng) if rng.random() < 0.4 else filler(rng, split)
        used += 12 + (len(nxt.user) + len(nxt.model)) // 3
        if used > room or "\n" in nxt.user:
            break
        history.append(nxt)
    turn = Turn(title_prompt(rng, history, short), json.dumps({"title": first.title}), "title")
    return turn if belongs(turn, split) or split == QUESTIONS else title_turn(rng, room, filler, split)


# --- system texts --------------------------------------------------------------------------------------------------

PLAIN_SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful, honest assistant.", "Be brief.",
                 "You are a helpful assistant. Answer briefly.", "Answer the user's questions.", "You are an assistant that helps people.",
                 "Be polite and helpful.", "You are Foal.", "Today is a good day. Help the user.", "Answer in English."]
_ONE_WORD = ["Answer in one word.", "Answer with one word only.", "Reply in one word.", "Only one word answers.", "Answer in a single word.",
             "Give one-word answers.", "You answer with a single word."]
_UPPER = ["Answer in upper case.", "Answer in capital letters.", "Write everything in upper case.", "Reply in capital letters only.", "ANSWER IN UPPER CASE.",
          "Always write in uppercase.", "You only write in capital letters."]
_LOWER = ["Answer in lower case.", "Write everything in lower case.", "Reply in lower case letters only.", "Always write in lowercase.", "No capital letters."]
_JSON_ANSWER = ['Answer as JSON with the key "answer".', 'Reply with JSON: {"answer": ...}', 'Always answer in JSON like {"answer": "..."}.']
_ENDING = ['End every answer with "{x}".', 'Always end with "{x}".', 'Finish each reply with "{x}".', "End every answer with the word {x}."]
_START = ['Start every answer with "{x}".', 'Begin each reply with "{x}".', 'Always start with "{x}".', "Start every answer with the word {x}."]
_PIRATE = ["Talk like a pirate.", "You are a pirate.", "Answer like a pirate.", "You are a friendly pirate."]
_ONE_WORD_ANSWERS = {"tell": "Okay.", "untold": "Unknown."}
STYLES = ["plain", "one_word", "upper", "lower", "json", "ending", "start", "pirate"]


def system_style(rng, kind=None):
    """-> (kind, system text, answer of a turn under it or None where the turn has none)"""
    kind = kind or rng.choices(STYLES, [22, 24, 16, 10, 10, 7, 7, 4])[0]
    word = rng.choice(w.WORDS[:250] if rng.random() < 0.7 else [w.made_up_word(rng)])
    one_word = lambda t: t.short or _ONE_WORD_ANSWERS.get(t.skill) or ("Sorry." if t.model in REFUSALS else None)
    texts, answer = {
        "plain": (PLAIN_SYSTEMS, lambda t: t.model),
        "one_word": (_ONE_WORD, one_word),
        "upper": (_UPPER, lambda t: t.model.upper() if len(t.model) < 110 else None),
        "lower": (_LOWER, lambda t: t.model.lower() if len(t.model) < 110 else None),
        "json": (_JSON_ANSWER, lambda t: json.dumps({"answer": t.short}) if t.short else None),
        "ending": (_ENDING, lambda t: f"{t.model} {word}"),
        "start": (_START, lambda t: f"{word} {t.model}"),
        "pirate": (_PIRATE, lambda t: f"Arr! {t.model}"),
    }[kind]
    system = rng.choice(texts).replace("{x}", word)
    if kind not in ("plain", "ending", "start") and rng.random() < 0.25:
        system = f"{rng.choice(PLAIN_SYSTEMS[:3])} {system}"
    if rng.random() < 0.15:
        system = system.rstrip(".")
    return kind, system, answer


def styled(turn, answer):
    text = answer(turn)
    return None if text is None else replace(turn, model=text)

"""The third round of training: calls of functions, what is said of their results, and answers in JSON.

A request's tools stand in the system prompt, each as a signature (`text.CHAT_TEMPLATE`). The names of
functions and parameters are drawn from many, and beside the function that a question is about stand others;
many names of places, people, functions and parameters are made up, and some conversations are of nothing but
repeating what was said. So small a model learns the form of calls from it, and hardly to copy a name. Of
questions that no function answers, the answer is the one without functions.

In JSON the model fills in values. A schema is not in the prompt: a grammar writes the keys that it asks for,
so each value is learned behind many names for its key.

The round after it has few of these, and many conversations of the rounds before, some of which were lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.demo.train import corpus, polish
from engine.demo.train.corpus import SYSTEM_PROMPTS
from engine.demo.train.draw import Draw, Exchange
from engine.demo.train.facts import CAPITALS
from engine.demo.train.knowledge import calendar
from engine.demo.train.polish import NAMES
from engine.demo.train.text import call_text, with_functions
from engine.demo.train.topics import capitals, identity, penstock, small_talk, sums, unknown
from engine.demo.train.wording import vary

SEED = 23
CONVERSATIONS = 27_000
OPERAND_MAX = 20
KEPT_SHARE = 0.4
"""The share of conversations of the second round, so that what it taught is kept."""
SETTLING, SETTLING_KEPT_SHARE = 6000, 0.8
"""The conversations of the fourth round, and that share of them."""

Arguments = Mapping[str, object]
Messages = list[tuple[str, str]]

CITIES = (
    *CAPITALS.values(),
    *("Boston", "New York", "San Francisco", "Chicago", "Seattle", "Los Angeles", "Munich", "Hamburg",
    "Milan"),
    *("Barcelona", "Manchester", "Glasgow", "Mumbai", "Shanghai", "Sydney", "Melbourne", "Toronto", "Zurich"),
    *("Geneva", "Osaka", "Kyoto", "Istanbul", "Lagos", "Karachi", "Dubai", "Porto", "Lyon", "Krakow",
    "Miami"),
    *("Paris, France", "Boston, MA", "London, UK", "Tokyo, Japan", "Berlin, Germany", "Austin, Texas"),
    *("San Francisco, CA", "Bogotá", "São Paulo", "Málaga", "Köln", "Rome, Italy", "Oslo, Norway"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a signature, and what it does."""

    name: str
    parameters: tuple[str, ...]
    """Their names; of those that may be left out with a question mark behind."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A question about one thing, the call that answers it, and what is said of its result."""

    question: str
    arguments: Arguments
    result: str
    answer: str


WEATHER_NAMES = (
    "get_weather", "get_current_weather", "weather", "fetch_weather", "current_weather", "weather_lookup",
    "getWeather", "get_temperature", "temperature", "get_forecast", "lookup_weather", "weather_forecast",
    "get_weather_data", "weather_tool", "check_weather", "get_current_temperature",
)  # fmt: skip
PLACES = ("location", "city", "place", "city_name", "town", "where", "query", "city_country", "region", "loc")
UNITS = ("unit", "units", "format", "temperature_unit", "scale")
WEATHER = (
    "what is the weather in {x}", "what's the weather in {x}", "what is the weather like in {x}",
    "how is the weather in {x}", "what's the weather like in {x} today", "weather in {x}",
    "is it raining in {x}", "how warm is it in {x}", "what is the temperature in {x}",
    "what is the weather like in {x} today", "tell me the weather in {x}", "how hot is it in {x} now",
    "what is the current weather in {x}", "is it cold in {x}", "will it be sunny in {x}",
    "what's the temperature in {x} right now", "give me the weather for {x}", "how's the weather in {x}",
    "what should I wear in {x}", "what is it like outside in {x}", "do I need an umbrella in {x}",
    "what is the weather in {x} now", "check the weather in {x}", "find out the weather in {x}",
)  # fmt: skip
TIME_NAMES = (
    "get_time", "get_current_time", "current_time", "time", "time_in", "getTime", "clock", "local_time",
    "get_local_time", "lookup_time", "fetch_time", "now", "what_time", "world_clock", "get_datetime",
)  # fmt: skip
ZONES = ("timezone", "city", "location", "place", "tz", "zone", "city_name")
TIME = (
    "what time is it in {x}", "what's the time in {x}", "time in {x}", "what is the time in {x}",
    "tell me the time in {x}", "what is the local time in {x}", "how late is it in {x}",
    "what is the current time in {x}", "do you know what time it is in {x}", "what time is it now in {x}",
    "give me the time in {x}", "what does the clock say in {x}",
)  # fmt: skip
TIME_HERE = (
    "what time is it", "what's the time", "tell me the time", "what is the current time", "how late is it",
    "what time is it now", "do you know the time", "can you tell me what time it is",
)  # fmt: skip
SUM_NAMES = (
    "add", "sum", "add_numbers", "calculate_sum", "plus", "addition", "get_sum", "sum_numbers", "add_two",
    "compute_sum", "adder", "addNumbers", "add_two_numbers", "sum_two", "calculator_add",
)  # fmt: skip
OPERANDS = (
    ("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("left", "right"), ("a", "b"),
    ("number1", "number2"), ("one", "two"), ("n", "m"), ("first_number", "second_number"), ("lhs", "rhs"),
)  # fmt: skip
SUM = (
    "what is {a} + {b}", "what is {a} plus {b}", "add {a} and {b}", "what's {a} + {b}", "{a} + {b}",
    "how much is {a} plus {b}", "what is the sum of {a} and {b}", "calculate {a} + {b}", "compute {a} + {b}",
    "please add {a} and {b}", "sum {a} and {b}", "how much is {a} + {b}",
    "use the function to add {a} and {b}",
    "what do you get if you add {a} and {b}", "what does {a} + {b} make", "add {b} to {a}",
)  # fmt: skip
OTHERS = (
    Function("send_email", ("to", "subject", "body"), "Send an email."),
    Function("search_web", ("query",), "Search the web."),
    Function("get_stock_price", ("ticker",), "Get the price of a stock."),
    Function("create_event", ("title", "date"), "Put an event into the calendar."),
    Function("translate", ("text", "language"), "Translate a text."),
    Function("read_file", ("path",), "Read a file."),
    Function("run_shell", ("command", "timeout?"), "Run a command."),
    Function("book_flight", ("origin", "destination", "date"), "Book a flight."),
    Function("play_music", ("song", "artist?")),
    Function("convert_currency", ("amount", "source", "target"), "Convert an amount."),
    Function("set_alarm", ("time",), "Set an alarm."),
    Function("get_news", ("topic?",), "Get the latest news."),
)
DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "weather": (
        "", "Get the weather.", "Get current temperature for a given location.",
        "Get the current weather in a "
        "given location", "Returns the weather in a city.", "Weather of a place today.",
        "Get weather for a city.",
        "Look up the weather at a location.", "Get the weather at a location.",
    ),
    "time": (
        "", "Get the time.", "Get the current time in a city.", "Returns the current time.",
        "Current time there.",
        "Get the current time in a given timezone.", "Tell the time.",
    ),
    "sum": (
        "", "Add two numbers.", "Adds a and b.", "Add two integers.", "Returns the sum of two numbers.",
        "Calculate a sum.", "Add numbers together.",
    ),
}  # fmt: skip
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "partly cloudy", "light rain")


_ONSETS = (
    *("b", "bl", "br", "c", "ch", "cl", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n"),
    *("p", "pl", "qu", "r", "s", "sh", "sk", "st", "t", "th", "tr", "v", "w", "z"),
)
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou", "a", "e", "i", "o")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "th", "nd", "rk", "x", "t")
MADE_UP_SHARE = 0.5


def made_up(draw: Draw) -> str:
    """A word that nobody knows."""
    syllables = draw.rng.choices((1, 2, 3), weights=(2, 5, 3))[0]
    return "".join(draw.pick(part) for _ in range(syllables) for part in (_ONSETS, _NUCLEI, _CODAS))


def _name(draw: Draw, known: Sequence[str]) -> str:
    """A name, of those that are known or made up."""
    return made_up(draw).capitalize() if draw.chance(MADE_UP_SHARE) else draw.pick(known)


def _identifier(draw: Draw, known: Sequence[str]) -> str:
    """A name as code has it."""
    if draw.chance(0.6):
        return draw.pick(known)
    return draw.pick(
        (made_up(draw), f"{made_up(draw)}_{made_up(draw)}", f"{draw.pick(known)}_{made_up(draw)}")
    )


def _told(draw: Draw, fields: Mapping[str, object], plain: Sequence[str]) -> tuple[str, str]:
    """A result as JSON or as a text, and the same as it is said."""
    if draw.chance(0.5):
        said = ", ".join(f"{key} {value}" for key, value in fields.items())
        return json.dumps(fields, ensure_ascii=False), said
    text = draw.pick(plain)
    return text, text.removesuffix(".")


def _weather(draw: Draw, function: Function) -> Call:
    city = _name(draw, CITIES)
    question = draw.wording(WEATHER).format(x=city)
    arguments: dict[str, object] = {function.parameters[0]: city}
    if len(function.parameters) > 1:
        unit = draw.pick(("celsius", "fahrenheit"))
        name = function.parameters[1]
        if draw.chance(0.3):
            question += f" in {unit}"
            arguments[name.removesuffix("?")] = unit
        elif not name.endswith("?"):
            arguments[name] = "celsius"
    degrees, condition = draw.rng.randint(-9, 39), draw.pick(CONDITIONS)
    fields: dict[str, object] = {draw.pick(("temperature", "temp", "degrees")): degrees}
    if draw.chance(0.5):
        fields[draw.pick(("condition", "conditions", "description", "weather"))] = condition
    if draw.chance(0.3):
        fields |= {"unit": draw.pick(("celsius", "C"))}
    plain = (
        f"{degrees} degrees and {condition}", f"{degrees}°C", condition, f"{degrees}",
        f"{degrees}C, {condition}",
        f"It's {degrees} degrees and {condition}.", f"It's always {condition} in {city}!",
        f"{condition}, {degrees}",
    )  # fmt: skip
    result, said = _told(draw, fields, plain)
    return Call(question, arguments, result, f"The weather in {city}: {said}.")


def _time(draw: Draw, function: Function) -> Call:
    clock = f"{draw.rng.randint(0, 23):02}:{draw.rng.randint(0, 59):02}"
    result, said = _told(
        draw, {draw.pick(("time", "now", "clock")): clock}, (clock, f"It is {clock}.", clock)
    )
    if not function.parameters:
        return Call(draw.wording(TIME_HERE), {}, result, f"The time: {said}.")
    city = _name(draw, CITIES)
    return Call(
        draw.wording(TIME).format(x=city),
        {function.parameters[0]: city},
        result,
        f"The time in {city}: {said}.",
    )


def _sum(draw: Draw, function: Function) -> Call:
    a, b = draw.rng.randint(0, draw.pick((20, 99, 999))), draw.rng.randint(0, draw.pick((20, 99, 999)))
    question = draw.wording(SUM).format(a=a, b=b)
    if question.startswith(f"add {b} to"):
        a, b = b, a
    left, right = function.parameters
    result, said = _told(draw, {draw.pick(("result", "sum", "value")): a + b}, (f"{a + b}", f"{a + b}"))
    return Call(question, {left: a, right: b}, result, f"The result: {said}.")


def _weather_function(draw: Draw) -> Function:
    unit = () if draw.chance(0.6) else (draw.pick(UNITS) + draw.pick(("", "?", "?")),)
    names = (_identifier(draw, PLACES), *unit)
    return Function(_identifier(draw, WEATHER_NAMES), names, draw.pick(DESCRIPTIONS["weather"]))


def _time_function(draw: Draw) -> Function:
    names = () if draw.chance(0.3) else (_identifier(draw, ZONES),)
    return Function(_identifier(draw, TIME_NAMES), names, draw.pick(DESCRIPTIONS["time"]))


def _sum_function(draw: Draw) -> Function:
    operands = draw.pick(OPERANDS) if draw.chance(0.7) else (made_up(draw), made_up(draw) + "2")
    return Function(_identifier(draw, SUM_NAMES), operands, draw.pick(DESCRIPTIONS["sum"]))


KINDS: tuple[tuple[Callable[[Draw], Function], Callable[[Draw, Function], Call]], ...] = (
    (_weather_function, _weather),
    (_time_function, _time),
    (_sum_function, _sum),
)


def _with_calls(draw: Draw) -> Messages:
    """A conversation in which functions are called, or could be."""
    kinds = draw.rng.sample(KINDS, draw.rng.choices((1, 2, 3), weights=(6, 2, 2))[0])
    own = [(make(draw), ask) for make, ask in kinds]
    functions = [function for function, _ in own] + draw.rng.sample(OTHERS, draw.pick((0, 0, 0, 0, 1, 1, 2)))
    draw.rng.shuffle(functions)
    signatures = [(each.name, each.parameters, each.description) for each in functions]
    messages = [("system", with_functions(draw.pick(SYSTEM_PROMPTS) if draw.chance(0.5) else "", signatures))]
    for _ in range(draw.pick((1, 1, 1, 2, 2, 3))):
        if draw.chance(0.25):
            messages += _beside(draw)
            continue
        function, ask = draw.pick(own)
        calls = [ask(draw, function)]
        if ask is not _sum and draw.chance(0.15):
            calls.append(ask(draw, function))
        question = " and ".join(
            call.question if not at else call.question[:1].lower() + call.question[1:]
            for at, call in enumerate(calls)
        )
        if len(calls) > 1 and draw.chance(0.6) and function.parameters:
            first, second = (str(call.arguments[function.parameters[0]]) for call in calls)
            question = calls[0].question.replace(first, f"{first} and {second}")
        messages.append(("user", vary(draw.rng, question) if draw.chance(0.7) else _typed(question)))
        made = [call_text(function.name, call.arguments) for call in calls]
        messages.append(("assistant", "\n".join(made)))
        if draw.chance(0.7):
            messages += [("tool", call.result) for call in calls]
            messages.append(("assistant", " ".join(call.answer for call in calls)))
        else:
            break
    return messages


def _typed(question: str) -> str:
    return question[:1].upper() + question[1:] + ("" if question.endswith("?") else "?")


def _beside(draw: Draw) -> Messages:
    """A question that no function answers."""
    topic = draw.pick((capitals, identity, penstock, small_talk, unknown, calendar))
    turn = topic(draw)
    return [("user", turn.question), ("assistant", turn.answer)]


# -- answers in JSON --------------------------------------------------------------------------------

ASKS_JSON = (
    "Answer in JSON.", "Return JSON.", "Reply with a JSON object.", "You answer in JSON only.",
    "Respond in JSON.",
    "You are a helpful assistant designed to output JSON.", "Output a JSON object.",
    "Give the answer as JSON.",
    "Return a JSON object with the answer.", "Respond only with valid JSON.",
)  # fmt: skip
EXTRACTS = (
    "Extract the event information.", "Extract the event.", "Extract the data.", "Extract the information.",
    "Extract the person.", "Extract the fields from the text.", "Find the data in the text.",
    "Parse the text.",
)  # fmt: skip
DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "tomorrow", "May 3",
    "June 12",
    "the first of March", "Christmas", "2026-05-01", "next week",
)  # fmt: skip
EVENTS = (
    "science fair", "concert", "birthday party", "conference", "book club", "football match", "wedding",
    "museum",
    "dinner", "picnic", "meeting", "film night", "dance class", "art show", "market", "chess game",
    "workshop",
)  # fmt: skip
PEOPLE = (
    *NAMES,
    "Alice",
    "Bob",
    "Carol",
    "Dave",
    "Eve",
    "Frank",
    "Anna",
    "Peter",
    "Sara",
    "Tom",
    "Maria",
    "Ben",
)


def _event(draw: Draw) -> tuple[str, dict[str, object]]:
    people = [_name(draw, PEOPLE) for _ in range(draw.pick((1, 2, 2, 3)))]
    event, day = (made_up(draw) if draw.chance(0.3) else draw.pick(EVENTS)), draw.pick(DAYS)
    who = people[0] if len(people) == 1 else f"{', '.join(people[:-1])} and {people[-1]}"
    verb = "is" if len(people) == 1 else "are"
    on = day if day in ("tomorrow", "next week") else f"on {day}"
    text = draw.wording(
        (
            f"{who} {verb} going to a {event} {on}.", f"{who} {verb} at the {event} {on}.",
            f"On {day}, {who} {verb} going to the {event}."
            if on != day
            else f"{who} {verb} going to a {event} {on}.",
            f"There is a {event} {on} with {who}.", f"{who} will go to a {event} {on}.",
            f"The {event} is {on}, and {who} {verb} coming.", f"{who} {verb} invited to a {event} {on}.",
        )
    )  # fmt: skip
    fields: dict[str, object] = {
        draw.pick(("name", "name", "event", "title", "event_name")): event,
        draw.pick(("date", "date", "day", "when")): day,
        draw.pick(("participants", "participants", "people", "attendees", "names", "guests")): people,
    }
    return text, fields


def _person(draw: Draw) -> tuple[str, dict[str, object]]:
    name, age, city = _name(draw, PEOPLE), draw.rng.randint(5, 95), _name(draw, CITIES)
    text = draw.wording(
        (
            f"My name is {name}, I am {age} years old and I live in {city}.",
            f"{name} is {age} years old and lives in {city}.", f"{name} is {age} and lives in {city}.",
            f"{name}, {age}, from {city}", f"I am {name} from {city}, and I am {age}.",
            f"{name} from {city} is {age} years old.", f"This is {name}, aged {age}, of {city}.",
        )
    )  # fmt: skip
    fields: dict[str, object] = {
        draw.pick(("name", "first_name", "person")): name,
        draw.pick(("age", "years")): age,
        draw.pick(("city", "town", "location", "home")): city,
    }
    return text, fields


def _capital(draw: Draw) -> tuple[str, dict[str, object]]:
    country = draw.pick(list(CAPITALS))
    question = draw.pick(("What is the capital of {}?", "Capital of {}", "Name the capital of {}.")).format(
        country
    )
    key = draw.pick(("capital", "city", "answer", "capital_city", "result", "name"))
    fields: dict[str, object] = {key: CAPITALS[country]}
    return question, {"country": country, **fields} if draw.chance(0.4) else fields


def _total(draw: Draw) -> tuple[str, dict[str, object]]:
    a, b = draw.rng.randint(0, OPERAND_MAX), draw.rng.randint(0, OPERAND_MAX)
    key = draw.pick(("answer", "result", "sum", "value", "total", "final_answer"))
    return _typed(draw.wording(SUM).format(a=a, b=b)), {key: a + b}


def _in_json(draw: Draw) -> Messages:
    make = draw.pick((_event, _event, _person, _capital, _total))
    text, fields = make(draw)
    if draw.chance(0.3) and len(fields) > 1:
        fields = {key: fields[key] for key in draw.rng.sample(list(fields), len(fields))}
    if draw.chance(0.2) and len(fields) > 1:
        fields.pop(draw.pick(list(fields)))
    asks = draw.pick((*ASKS_JSON, *(EXTRACTS if make in (_event, _person) else ())))
    answer = json.dumps(fields, ensure_ascii=False)
    if draw.chance(0.3):
        return [
            ("user", draw.pick((f"{asks} {text}", f"{text} {asks}", f"{asks}\n{text}"))),
            ("assistant", answer),
        ]
    return [("system", asks), ("user", text), ("assistant", answer)]


# -- sums ---------------------------------------------------------------------------------------------


def _sums(draw: Draw) -> Messages:
    """Sums without any function, of which more are asked than of anything else."""
    messages: Messages = []
    for _ in range(draw.pick((1, 2, 3))):
        turn: Exchange = sums(draw)
        messages += [("user", turn.question), ("assistant", turn.answer)]
    return messages


# -- repeating ----------------------------------------------------------------------------------------

REPEATS = (
    "Repeat: {x}", "Say {x}", "Repeat after me: {x}", "Please say: {x}", "Write {x}", "Copy this: {x}",
    "Repeat this: {x}", "Say this: {x}", "Type {x}",
)  # fmt: skip


def _word(draw: Draw) -> str:
    match draw.pick(("made up", "city", "number")):
        case "made up":
            return made_up(draw)
        case "city":
            return draw.pick(CITIES)
    return str(draw.rng.randint(0, 9999))


def _repeats(draw: Draw) -> Messages:
    """A chat in which one says again what was said."""
    messages: Messages = []
    for _ in range(draw.pick((1, 1, 2))):
        words = " ".join(_word(draw) for _ in range(draw.rng.randint(1, 7)))
        messages += [("user", draw.pick(REPEATS).format(x=words)), ("assistant", words)]
    return messages


def conversation(index: int, kept_share: float = KEPT_SHARE) -> Messages:
    """The conversation of that number, as messages. `kept_share`: how many of them are as in earlier
    rounds."""
    draw = Draw(f"{SEED}/{index}")
    if draw.chance(kept_share):
        if draw.chance(0.2):
            return _sums(draw)
        kept = (
            polish.conversation(polish.CONVERSATIONS + index) if draw.chance(0.6) else _of_first_round(index)
        )
        return kept.messages()
    return draw.rng.choices((_with_calls, _in_json, _repeats), weights=(6, 2, 2))[0](draw)


def _of_first_round(index: int) -> corpus.Conversation:
    return corpus.conversation(corpus.CONVERSATIONS + index)


def conversations(count: int = CONVERSATIONS) -> Iterator[Messages]:
    """The conversations of the third round."""
    return (conversation(index) for index in range(count))


def settling(count: int = SETTLING) -> Iterator[Messages]:
    """The conversations of the fourth round, most of which are as in the rounds before the third."""
    return (conversation(CONVERSATIONS + index, SETTLING_KEPT_SHARE) for index in range(count))

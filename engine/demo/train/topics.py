"""One exchange (a question and its answer) on each of the topics that the demo model knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.demo.train import concepts, elsewhere, facts, smalltalk, stories
from engine.demo.train.draw import Draw, Exchange, exact
from engine.demo.train.wording import vary

# ---------------------------------------------------------------------------------- capitals

CAPITAL_OF = (
    "what is the capital of {x}", "what's the capital of {x}", "name the capital of {x}", "capital of {x}",
    "tell me the capital of {x}", "which city is the capital of {x}", "what is {x}'s capital",
    "{x} capital", "can you tell me the capital of {x}", "what city is the capital of {x}",
    "what is the capital city of {x}", "do you know the capital of {x}", "which is the capital of {x}",
    "{x}'s capital", "give me the capital of {x}", "what is the name of the capital of {x}",
    "I need the capital of {x}", "what do you call the capital of {x}", "what would be the capital of {x}",
    "the capital of {x}", "where is the government of {x}", "capital city of {x}",
    "I forgot the capital of {x}", "what is the capital city in {x}", "which town is the capital of {x}",
    "how is the capital of {x} called", "what capital does {x} have", "say the capital of {x}",
    "please name the capital city of {x}", "is there a capital of {x}", "which city is {x}'s capital",
    "tell me what the capital of {x} is", "do you know what the capital of {x} is",
    "what city is {x}'s capital", "I would like to know the capital of {x}", "for {x}, what is the capital",
    "capital {x}", "what's the name of {x}'s capital city", "could you name the capital of {x}",
    "the capital city of {x} is", "what is the capital in {x}", "which capital belongs to {x}",
    "what is the seat of government of {x}", "the capital of {x} is", "the capital of {x} is what",
    "in {x}, which city is the capital",
)  # fmt: skip
COUNTRY_OF = (
    "which country has the capital {x}", "{x} is the capital of which country",
    "what country has {x} as its capital", "of which country is {x} the capital",
    "{x} is the capital of what", "what is {x} the capital of", "which country's capital is {x}",
    "whose capital is {x}", "name the country whose capital is {x}", "what country is {x} the capital of",
    "which country is {x} the capital of", "{x} is the capital of", "{x} is the capital of what country",
    "tell me which country has the capital {x}", "to which country does {x} belong",
    "in which country is {x} the capital", "what nation has {x} for a capital",
    "which state has {x} as capital", "in which country is {x}", "which country is {x} in",
    "what country is {x} in", "where is {x}", "which land has {x} as its capital",
    "{x} is in which country", "{x} is which country's capital", "in what country is {x}",
    "which nation's capital is {x}", "name the country that has {x} as its capital",
    "the capital {x} belongs to which country", "what country does {x} belong to", "where is {x} located",
    "which country has {x} as its capital", "which country has {x} as capital city",
)  # fmt: skip
AND_CAPITAL = (
    "and {x}", "what about {x}", "and of {x}", "how about {x}", "and for {x}", "{x}",
    "and the capital of {x}", "and what about {x}", "now {x}", "same for {x}", "and that of {x}",
    "what about {x} then", "and in {x}", "and what is it for {x}", "ok and {x}", "next {x}",
)  # fmt: skip
_CITY_TO_COUNTRY = {city: country for country, city in facts.CAPITALS.items()}
_CITY_TO_COUNTRY["London"] = "the United Kingdom"  # rather than England, which has it too
_NO_CAPITAL = (
    "I do not know a capital for that. I know the capitals of most countries, but I am only a small demo "
    "model."
)
_NO_COUNTRY = (
    "I do not know a country with that capital. I know the capitals of most countries, but I am only a "
    "small demo model."
)


def _capital_answer(draw: Draw, country: str) -> tuple[str, str]:
    city = facts.CAPITALS[country]
    forwards, backwards = f"The capital of {country} is {city}", f"{city} is the capital of {country}."
    return (forwards.rstrip(".") + "." if draw.chance(0.8) else backwards), exact(city)


def _country(draw: Draw) -> tuple[str, str]:
    """(the name that is asked for, the country)."""
    if draw.chance(0.08):
        alias = draw.pick(tuple(facts.ALIASES))
        return alias, facts.ALIASES[alias]
    country = draw.pick(facts.FAMILIAR if draw.chance(0.3) else tuple(facts.CAPITALS))
    return (country.removeprefix("the ") if draw.chance(0.15) else country), country


def capitals(draw: Draw) -> Exchange:
    if draw.chance(0.09):
        place = draw.pick(facts.UNKNOWN_PLACES) if draw.chance(0.5) else elsewhere.invented_name(draw.rng)
        question = draw.wording(CAPITAL_OF).format(x=place)
        return Exchange("capitals", vary(draw.rng, question), _NO_CAPITAL, r"do not know")
    asked, country = _country(draw)
    answer, check = _capital_answer(draw, country)
    return Exchange("capitals", vary(draw.rng, draw.wording(CAPITAL_OF).format(x=asked)), answer, check)


def _country_of(draw: Draw, city: str, question: str) -> Exchange:
    country = _CITY_TO_COUNTRY[city]
    answer = f"{city} is the capital of {country}."
    return Exchange("countries", vary(draw.rng, question), answer, exact(country))


def countries(draw: Draw) -> Exchange:
    if draw.chance(0.08):
        place = draw.pick(facts.UNKNOWN_CITIES) if draw.chance(0.5) else elsewhere.invented_name(draw.rng)
        question = draw.wording(COUNTRY_OF).format(x=place)
        return Exchange("countries", vary(draw.rng, question), _NO_COUNTRY, r"do not know")
    city = facts.CAPITALS[draw.pick(facts.FAMILIAR if draw.chance(0.3) else tuple(facts.CAPITALS))]
    return _country_of(draw, city, draw.wording(COUNTRY_OF).format(x=city))


def another_capital(draw: Draw) -> Exchange:
    asked, country = _country(draw)
    answer, check = _capital_answer(draw, country)
    return Exchange("capitals", vary(draw.rng, draw.wording(AND_CAPITAL).format(x=asked)), answer, check)


def another_country(draw: Draw) -> Exchange:
    city = facts.CAPITALS[draw.pick(tuple(facts.CAPITALS))]
    return _country_of(draw, city, draw.wording(AND_CAPITAL[:6]).format(x=city))


# -------------------------------------------------------------------------------------- sums

SUM_FRAMES = (
    "what is {x}", "what's {x}", "{x}", "{x} =", "how much is {x}", "calculate {x}", "compute {x}",
    "{x} is what", "can you calculate {x}", "tell me {x}", "what does {x} equal", "solve {x}", "{x} equals",
    "please compute {x}", "work out {x}", "what is the result of {x}", "what do you get for {x}", "{x} = ?",
    "how much does {x} make", "do you know what {x} is", "give me the result of {x}", "what does {x} make",
    "I need {x}", "can you do {x}", "what would {x} be", "find {x}", "what is the value of {x}",
    "what number is {x}", "how many is {x}", "can you work out {x}", "evaluate {x}",
    "what do I get if I compute {x}", "the answer to {x}", "what's the answer to {x}",
    "tell me how much {x} is", "{x} makes", "a sum: {x}", "try {x}", "answer {x}",
)  # fmt: skip
ADDITION = (
    "{a} + {b}",
    "{a}+{b}",
    "{a} plus {b}",
    "the sum of {a} and {b}",
    "{a} and {b} together",
    "{a} added to {b}",
)
SUBTRACTION = (
    "{a} - {b}",
    "{a}-{b}",
    "{a} minus {b}",
    "{a} less {b}",
    "the difference of {a} and {b}",
    "{a} take away {b}",
)
MULTIPLICATION = (
    "{a} * {b}",
    "{a} x {b}",
    "{a} times {b}",
    "{a} multiplied by {b}",
    "{a}*{b}",
    "the product of {a} and {b}",
)
TOO_HARD = (
    "{a} / {b}",
    "{a} divided by {b}",
    "{a} + {b} + {c}",
    "{a}.5 + {b}",
    "{a}+{b}-{c}",
    "{a} * {b} + {c}",
)
COMMANDS = {
    "+": (
        "add {a} and {b}",
        "add {b} to {a}",
        "if I add {a} and {b}, what do I get",
        "please add {a} to {b}",
    ),
    "-": ("subtract {b} from {a}", "take {b} away from {a}", "what is left if I take {b} from {a}"),
    "*": ("multiply {a} by {b}", "multiply {a} and {b}", "please multiply {a} with {b}"),
}
OBJECTS = (
    "apples",
    "books",
    "coins",
    "eggs",
    "pears",
    "balls",
    "pens",
    "cups",
    "stones",
    "cookies",
    "cats",
    "cards",
)
GAIN = (
    "I have {a} {o} and get {b} more. How many {o} do I have",
    "there are {a} {o} and {b} {o}. How many are there",
    "if I have {a} {o} and you give me {b} more, how many {o} do I have",
    "how many {o} are {a} {o} and {b} {o}",
    "Anna has {a} {o} and Ben has {b}. How many {o} do they have together",
)  # fmt: skip
LOSS = (
    "I have {a} {o} and lose {b}. How many {o} are left",
    "I had {a} {o} and gave away {b}. How many {o} do I have",
    "there are {a} {o}. I take {b} of them. How many are left",
    "if I have {a} {o} and sell {b}, how many {o} remain",
)  # fmt: skip
SUM_MAX, PRODUCT_MAX = 20, 10
_TOO_LARGE = (
    "That is too hard for me. I can add and subtract numbers up to 20, and multiply up to 10, because I "
    "am only a small demo model."
)


def _operands(draw: Draw, sign: str) -> tuple[int, int, int]:
    """(a, b, result) of a small sum; a subtraction seldom goes below zero."""
    limit = PRODUCT_MAX if sign == "*" else SUM_MAX
    a, b = draw.rng.randint(0, limit), draw.rng.randint(0, limit)
    if sign == "-" and a < b and draw.chance(0.8):
        a, b = b, a
    return a, b, {"+": a + b, "-": a - b, "*": a * b}[sign]


def _sum_answer(a: int, b: int, sign: str, result: int) -> str:
    return f"{a} {sign} {b} = {result}."


def _written(number: int, in_words: bool) -> str:
    return facts.NUMBER_WORDS[number] if in_words else str(number)


def sums(draw: Draw) -> Exchange:
    if draw.chance(0.07):
        return _large_sum(draw)
    sign = draw.pick("+++---**")
    a, b, result = _operands(draw, sign)
    if sign != "*" and result >= 0 and draw.chance(0.1):
        return _word_problem(draw, a, b, sign, result)
    in_words = draw.chance(0.25)
    left, right = _written(a, in_words), _written(b, in_words)
    if draw.chance(0.12):
        question = draw.wording(COMMANDS[sign]).format(a=left, b=right)
    else:
        terms = draw.pick({"+": ADDITION, "-": SUBTRACTION, "*": MULTIPLICATION}[sign])
        question = draw.wording(SUM_FRAMES).format(x=terms.format(a=left, b=right))
    answer = _sum_answer(a, b, sign, result)
    return Exchange("sums", vary(draw.rng, question), answer, rf"= {result}(?!\d)")


def _large_sum(draw: Draw) -> Exchange:
    """A sum beyond what the model has learned: large numbers, divisions, more than two numbers."""
    kind = draw.rng.randrange(5)
    frames: Sequence[str] = ADDITION + SUBTRACTION + MULTIPLICATION
    if kind == 0:
        a, b, frames = draw.rng.randint(PRODUCT_MAX + 1, 20), draw.rng.randint(2, 20), MULTIPLICATION
    elif kind == 1:
        a, b, frames = draw.rng.randint(0, 20), draw.rng.randint(1, 20), TOO_HARD
    else:
        largest = draw.pick((99, 999, 99_999))
        a, b = draw.rng.randint(21, largest), draw.rng.randint(2, largest)
    if draw.chance(0.4):
        a, b = b, a
    question = draw.wording(SUM_FRAMES).format(
        x=draw.pick(frames).format(a=a, b=b, c=draw.rng.randint(0, 20))
    )
    return Exchange("sums", vary(draw.rng, question), _TOO_LARGE, r"too hard")


def _word_problem(draw: Draw, a: int, b: int, sign: str, result: int) -> Exchange:
    thing = draw.pick(OBJECTS)
    frame = draw.pick(GAIN if sign == "+" else LOSS)
    in_words = draw.chance(0.3)
    question = frame.format(a=_written(a, in_words), b=_written(b, in_words), o=thing)
    question = question[0].upper() + question[1:] + ("?" if draw.chance(0.9) else "")
    return Exchange("sums", question, _sum_answer(a, b, sign, result), rf"= {result}(?!\d)")


def another_sum(draw: Draw) -> Exchange:
    sign = draw.pick("++--*")
    a, b, result = _operands(draw, sign)
    terms = draw.pick({"+": ADDITION, "-": SUBTRACTION, "*": MULTIPLICATION}[sign][:3]).format(a=a, b=b)
    question = vary(draw.rng, draw.wording(AND_CAPITAL[:6]).format(x=terms))
    return Exchange("sums", question, _sum_answer(a, b, sign, result), rf"= {result}(?!\d)")


# ----------------------------------------------------------------------------------- stories

ANY_STORY = (
    "tell me a story", "tell a story", "can you tell me a story", "write a story", "I want to hear a story",
    "write me a short story", "please tell me a short story", "do you know a story", "tell me a tale",
    "story please", "a story please", "let me have a story", "I would like a story", "give me a story",
    "could you tell me a story", "tell me a little story", "tell us a story", "read me a story",
    "make up a story", "a short story", "story", "tell me a bedtime story", "do you have a story for me",
    "I'd love to hear a story", "invent a story", "let me hear a story", "tell me a nice story",
    "write a short tale", "tell a tale", "please write a story", "can I hear a story",
    "would you tell me a story", "tell me any story", "create a short story", "tell stories",
    "can you write a story", "do you know any stories", "tell me a story for children", "once upon a time",
    "I am in the mood for a story", "how about a story", "entertain me", "tell me one of your stories",
    "a tale please",
)  # fmt: skip
STORY_ABOUT = (
    "tell me a story about {x}", "write a story about {x}", "a story about {x}",
    "do you know a story about {x}", "can you tell me a story about {x}", "I want a story about {x}",
    "write me a short story about {x}", "please tell a story about {x}", "tell me a tale about {x}",
    "tell a story about {x}", "story about {x}", "give me a story about {x}", "a short story about {x}",
    "make up a story about {x}", "tell me about {x} in a story", "could you tell a story about {x}",
    "I'd like to hear a story about {x}", "read me a story about {x}", "think of a story about {x}",
    "do you have a story about {x}", "invent a story about {x}", "a tale of {x}",
    "tell me a bedtime story about {x}", "how about a story about {x}", "tell me a short story with {x}",
    "write a tale about {x}", "a story with {x} in it", "I would love a story about {x}",
    "now one about {x}", "tell my children a story about {x}", "let me hear the story of {x}",
    "create a story about {x}", "tell us about {x} in a short story", "please write a short tale about {x}",
    "share a story about {x}",
)  # fmt: skip
ANOTHER_STORY = (
    "another one", "tell me another story", "another story please", "one more", "tell me another one",
    "another", "do you know another story", "again", "one more story", "and another one", "a different one",
    "next story", "tell me a different story", "more stories", "can I have another", "I want one more",
)  # fmt: skip
_OTHER_STORY = "I do not know a story about that, but here is another one. "
ANY_POEM = (
    "tell me a poem", "write a poem", "a poem please", "do you know a poem", "write me a short poem",
    "recite a poem", "can you write a poem", "give me a poem", "I want a poem", "please write a poem",
    "read me a poem", "poem", "write a poem about {x}", "a short poem", "say a poem", "make a rhyme",
    "write a poem for me", "poetry please", "write some verses", "I would like to hear a poem",
    "can you rhyme", "compose a poem", "a poem about {x}",
)  # fmt: skip
ANY_HAIKU = (
    "write a haiku", "tell me a haiku", "a haiku please", "do you know a haiku", "give me a haiku", "haiku",
    "write a haiku about {x}", "can you write a haiku", "please write a haiku", "a haiku about {x}",
    "compose a haiku",
)  # fmt: skip
ANY_JOKE = (
    "tell me a joke", "do you know a joke", "make me laugh", "a joke please", "say something funny", "joke",
    "can you tell me a joke", "tell a joke", "I want to hear a joke", "give me a joke",
    "do you know any jokes", "tell me something funny", "please tell me a good joke", "crack a joke",
    "another joke", "be funny", "got a joke for me", "I need a laugh", "cheer me up with a joke",
    "tell me a joke about {x}",
)  # fmt: skip


_VERSES: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
    ("poems", ANY_POEM, stories.POEMS),
    ("poems", ANY_HAIKU, stories.HAIKU),
    ("jokes", ANY_JOKE, stories.JOKES),
)


def _opening(text: str) -> str:
    return exact(text.split(". ")[0].split("\n")[0].split("? ")[0])


def _untold(draw: Draw, texts: Sequence[str]) -> str:
    """A text that this conversation has not had; the first ones are the likeliest."""
    fresh = [t for t in texts if not any(t in exchange.answer for exchange in draw.past)] or list(texts)
    return fresh[0] if draw.chance(0.35) else draw.pick(fresh)


def story(draw: Draw) -> Exchange:
    texts = [s.text for s in stories.STORIES]
    kind = draw.rng.random()
    if kind < 0.35:
        text = _untold(draw, texts)
        return Exchange("stories", vary(draw.rng, draw.wording(ANY_STORY)), text, r"(?s).{350}")
    if kind < 0.85:
        chosen = draw.pick(stories.STORIES)
        question = draw.wording(STORY_ABOUT).format(x=draw.pick(chosen.subjects))
        return Exchange("stories", vary(draw.rng, question), chosen.text, _opening(chosen.text))
    question = draw.wording(STORY_ABOUT).format(x=draw.pick(stories.OTHER_SUBJECTS))
    text = _OTHER_STORY + _untold(draw, texts)
    return Exchange("stories", vary(draw.rng, question), text, r"(?s)do not know a story about that.{350}")


def another_story(draw: Draw) -> Exchange:
    question = vary(draw.rng, draw.wording(ANOTHER_STORY))
    text = _untold(draw, [s.text for s in stories.STORIES])
    return Exchange("stories", question, text, r"(?s).{350}")


def verse(draw: Draw) -> Exchange:
    subject = draw.pick(stories.OTHER_SUBJECTS + elsewhere.THINGS[:60])
    topic, wordings, texts = draw.rng.choices(_VERSES, weights=(4, 2, 4))[0]
    text = _untold(draw, texts)
    question = vary(draw.rng, draw.wording(wordings).format(x=subject))
    return Exchange(topic, question, text, "|".join(_opening(t) for t in texts))


# --------------------------------------------------------------------- Penstock and small talk

ABOUT_CONCEPT = (
    "what is {x}", "what's {x}", "explain {x}", "tell me about {x}", "what do you know about {x}",
    "what are {x}", "can you explain {x}", "describe {x}", "what does Penstock say about {x}",
    "how does Penstock handle {x}", "I want to know about {x}", "give me a short explanation of {x}",
    "explain {x} to me", "what about {x}", "please explain {x}", "tell me something about {x}", "{x}",
    "what can you say about {x}", "explain {x} briefly", "could you explain {x}",
    "how does {x} work in Penstock", "help me understand {x}", "what is {x} in Penstock",
    "what is meant by {x}", "I don't understand {x}", "tell me what {x} is", "how would you explain {x}",
    "what exactly is {x}", "teach me about {x}", "in simple words, what is {x}", "define {x}",
    "how does {x} work",
)  # fmt: skip
MORE = (
    "tell me more", "more", "can you tell me more", "go on", "more please", "what else", "please continue",
    "continue", "tell me more about it", "and what else", "I want to know more", "more details please",
    "anything else", "explain more", "give me more details", "and then", "more about that", "is there more",
)  # fmt: skip


def penstock(draw: Draw) -> Exchange:
    concept = concepts.CONCEPTS[0] if draw.chance(0.12) else draw.pick(concepts.CONCEPTS)
    if concept.questions and draw.chance(0.6):
        question = draw.wording(concept.questions)
    else:
        question = draw.wording(ABOUT_CONCEPT).format(x=draw.pick(concept.names))
    return Exchange("penstock", vary(draw.rng, question), concept.answer, concept.check, concept.more)


def more(draw: Draw) -> Exchange:
    last = draw.past[-1]
    check = next(c.check for c in concepts.CONCEPTS if c.more == last.follow_up)
    return Exchange("penstock", vary(draw.rng, draw.wording(MORE)), last.follow_up, check)


def _canned(draw: Draw, groups: Sequence[smalltalk.Canned]) -> Exchange:
    group = draw.rng.choices(groups, weights=[g.weight for g in groups])[0]
    question = draw.wording(group.questions)
    # Single words and greetings keep their shape: no "Hello, hello" and no "Tell me, thanks".
    full = group.topic in ("identity", "abilities")
    question = vary(draw.rng, question) if full else _light(draw, question)
    return Exchange(group.topic, question, draw.pick(group.answers), group.check)


def _light(draw: Draw, text: str) -> str:
    text = text if draw.chance(0.35) else text[:1].upper() + text[1:]
    if text[-1].isalnum() and draw.chance(0.5):
        text += draw.pick((".", "!", "?", "!!") if " " in text else (".", "!"))
    return text


def identity(draw: Draw) -> Exchange:
    return _canned(draw, smalltalk.IDENTITY)


def small_talk(draw: Draw) -> Exchange:
    return _canned(draw, smalltalk.SMALLTALK)


# --------------------------------------------------------------------------------- elsewhere


def unknown(draw: Draw) -> Exchange:
    kind = draw.rng.random()
    if kind < 0.04:
        question = draw.wording(elsewhere.OTHER_LANGUAGES)
        return Exchange("elsewhere", question, elsewhere.LANGUAGE_ANSWER, r"only speak English")
    if kind < 0.14:
        question = elsewhere.gibberish(draw.rng)
    elif kind < 0.17:
        question = elsewhere.long_text(draw.rng)
    elif kind < 0.37:
        country = draw.pick(facts.FAMILIAR if draw.chance(0.5) else tuple(facts.CAPITALS))
        question = vary(draw.rng, draw.wording(elsewhere.ABOUT_COUNTRIES).format(x=country))
    elif kind < 0.65:
        question = vary(draw.rng, draw.wording(elsewhere.QUESTIONS))
    else:
        first, second = draw.wording(elsewhere.THINGS), draw.wording(elsewhere.THINGS)
        question = vary(draw.rng, draw.wording(elsewhere.ABOUT_THINGS).format(x=first, y=second))
    return Exchange("elsewhere", question, draw.pick(elsewhere.DECLINES), elsewhere.DECLINE_CHECK)


Topic = Callable[[Draw], Exchange]

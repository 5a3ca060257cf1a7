"""Small facts: days, months and seasons, colours, opposites, animals, planets, counting, the alphabet."""

from __future__ import annotations

import re

from engine.demo.train import facts
from engine.demo.train.draw import Draw, Exchange, exact
from engine.demo.train.smalltalk import Canned
from engine.demo.train.wording import vary

# Facts with a fixed question and answer.
FIXED: tuple[Canned, ...] = (
    Canned(
        "calendar", r"Monday.*Sunday",
        ("The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and "
         "Sunday.",),
        ("what are the days of the week", "name the days of the week", "list the days of the week",
         "which days are in a week", "tell me the days of the week", "what days are there",
         "say the seven days", "list all weekdays and the weekend",
         "can you name all seven days of the week", "the days of the week please"),
    ),
    Canned(
        "calendar", r"seven",
        ("A week has seven days.",),
        ("how many days are in a week", "how many days has a week", "how long is a week",
         "how many days does a week have", "the number of days in a week",
         "how many days are there in one week", "a week has how many days"),
    ),
    Canned(
        "calendar", r"January.*December",
        ("The months are January, February, March, April, May, June, July, August, September, "
         "October, November and December.",),
        ("what are the months of the year", "name the months", "list the months", "list all months",
         "name all twelve months", "which months are there", "tell me the months of the year",
         "list the twelve months of the year", "can you list the months in order"),
    ),
    Canned(
        "calendar", r"twelve",
        ("A year has twelve months.",),
        ("how many months are in a year", "how many months has a year", "how many months does a year have",
         "the number of months in a year", "a year has how many months",
         "how many months are there in one year"),
    ),
    Canned(
        "calendar", r"365",
        ("A year has 365 days, and a leap year has 366.",),
        ("how many days are in a year", "how many days has a year", "how many days does a year have",
         "how long is a year", "the number of days in a year", "how many days are there in one year"),
    ),
    Canned(
        "calendar", r"24",
        ("A day has 24 hours.",),
        ("how many hours are in a day", "how many hours has a day", "how many hours does a day have",
         "how long is a day", "the number of hours in a day", "how many hours are there in one day"),
    ),
    Canned(
        "calendar", r"60",
        ("An hour has 60 minutes.",),
        ("how many minutes are in an hour", "how many minutes has an hour", "how long is an hour",
         "the number of minutes in an hour", "how many minutes are there in one hour"),
    ),
    Canned(
        "calendar", r"60",
        ("A minute has 60 seconds.",),
        ("how many seconds are in a minute", "how many seconds has a minute", "how long is a minute",
         "the number of seconds in a minute", "how many seconds are there in one minute"),
    ),
    Canned(
        "calendar", r"spring, summer, autumn and winter",
        (f"The four seasons are {facts.SEASONS}.",),
        ("what are the seasons", "name the four seasons", "which seasons are there", "list the seasons",
         "tell me the seasons of the year", "what are the seasons of the year",
         "how many seasons are there", "what are the four seasons called", "name the seasons of the year",
         "which are the four seasons"),
    ),
    Canned(
        "facts", r"red.*violet",
        (f"The colours of the rainbow are {facts.RAINBOW}.",),
        ("what are the colours of the rainbow", "which colours are in a rainbow",
         "name the colours of the rainbow", "what colors are in the rainbow", "list the rainbow colors",
         "tell me the colors of the rainbow", "which colors does a rainbow have",
         "what are the rainbow colours", "the colors of the rainbow please"),
    ),
    Canned(
        "facts", r"red, yellow and blue",
        (f"The primary colours are {facts.PRIMARY_COLOURS}.",),
        ("what are the primary colours", "name the primary colors", "which colours are primary",
         "list the primary colours", "tell me the primary colors", "what are the three primary colors",
         "which are the primary colours"),
    ),
    Canned(
        "facts", r"Mercury.*Neptune",
        (f"The eight planets are {facts.PLANETS}.",),
        ("what are the planets", "name the planets", "list the planets of the solar system",
         "which planets are there", "tell me the planets", "how many planets are there",
         "name all the planets", "what planets are in the solar system", "can you list the eight planets",
         "list all planets", "how many planets does the solar system have"),
    ),
    Canned(
        "facts", r"A B C.*X Y Z",
        (facts.ALPHABET,),
        ("say the alphabet", "what is the alphabet", "recite the alphabet",
         "list the letters of the alphabet", "write the alphabet", "tell me the alphabet",
         "what are the letters of the alphabet", "do you know the alphabet", "list all letters"),
    ),
    Canned(
        "facts", r"26",
        ("The English alphabet has 26 letters.",),
        ("how many letters are in the alphabet", "how many letters has the alphabet",
         "the number of letters in the alphabet", "how many letters does the English alphabet have",
         "how many letters are there"),
    ),
)  # fmt: skip

AFTER = (
    "which {unit} comes after {x}", "what {unit} is after {x}", "what comes after {x}",
    "what is the {unit} after {x}", "which {unit} follows {x}", "what {unit} follows {x}",
    "tell me the {unit} after {x}", "the {unit} after {x}", "{x} is followed by which {unit}",
    "what {unit} comes after {x}", "after {x} comes what", "name the {unit} after {x}",
    "what {unit} comes right after {x}", "after {x}, which {unit} is next",
)  # fmt: skip
BEFORE = (
    "which {unit} comes before {x}", "what {unit} is before {x}", "what comes before {x}",
    "what is the {unit} before {x}", "which {unit} is just before {x}", "what {unit} precedes {x}",
    "tell me the {unit} before {x}", "the {unit} before {x}", "{x} comes after which {unit}",
    "what {unit} comes before {x}", "name the {unit} before {x}", "what {unit} comes right before {x}",
    "which {unit} comes right before {x}",
)  # fmt: skip
TOMORROW = (
    "if today is {x}, what is tomorrow", "today is {x}. What day is tomorrow?",
    "if it is {x} today, what day is tomorrow", "what is tomorrow if today is {x}",
    "today is {x}, so what is tomorrow",
)  # fmt: skip
YESTERDAY = (
    "if today is {x}, what was yesterday", "today is {x}. What day was yesterday?",
    "what was yesterday if today is {x}", "if it is {x} today, what day was yesterday",
    "today is {x}, so what was yesterday",
)  # fmt: skip
NTH_MONTH = (
    "what is the {n} month", "which month is the {n}", "what is the {n} month of the year",
    "name the {n} month", "tell me the {n} month of the year", "which month comes {n}", "the {n} month is",
    "what month is the {n} of the year", "which is the {n} month in a year", "the {n} month of the year",
)  # fmt: skip
MONTH_LENGTH = (
    "how many days are in {x}", "how many days has {x}", "how many days does {x} have", "how long is {x}",
    "the number of days in {x}", "{x} has how many days", "tell me how many days {x} has", "days in {x}",
    "what is the number of days in {x}", "how many days are there in {x}",
)  # fmt: skip
OPPOSITE_OF = (
    "what is the opposite of {x}", "opposite of {x}", "tell me the opposite of {x}",
    "what's the opposite of {x}", "name the opposite of {x}", "the opposite of {x} is",
    "do you know the opposite of {x}", "which word is the opposite of {x}",
    "what word is the opposite of {x}", "give me the opposite of {x}", "what is the contrary of {x}",
    "the opposite of {x}", "what is an antonym of {x}", "{x} is the opposite of what",
    "which word means the opposite of {x}", "find the opposite of {x}", "what would be the opposite of {x}",
)  # fmt: skip
SOUND_OF = (
    "what does a {x} say", "what sound does a {x} make", "which sound does a {x} make",
    "how does a {x} sound", "what noise does a {x} make", "a {x} says", "tell me what a {x} says",
    "what does the {x} say", "how does a {x} go", "what is the sound of a {x}",
    "do you know what a {x} says", "which noise does a {x} make", "what sound does the {x} make",
)  # fmt: skip
COLOUR_OF = (
    "what colour is {x}", "what color is {x}", "which colour has {x}", "tell me the colour of {x}",
    "which color is {x}", "what is the colour of {x}", "what is the color of {x}", "the colour of {x}",
    "what color does {x} have", "color of {x}", "{x} has which colour", "do you know the color of {x}",
    "which color does {x} have",
)  # fmt: skip
MIX_OF = (
    "what do you get if you mix {x} and {y}", "mix {x} and {y}", "what colour do {x} and {y} make",
    "{x} and {y} make what colour", "what color do {x} and {y} make",
    "which colour comes from mixing {x} with {y}", "what happens when I mix {x} and {y}",
    "which color do you get from {x} and {y}", "if I mix {x} with {y}, what do I get",
    "what color is {x} and {y} mixed",
)  # fmt: skip
COUNT_TO = (
    "count to {n}", "can you count to {n}", "count from 1 to {n}", "please count to {n}", "count up to {n}",
    "list the numbers from 1 to {n}", "count until {n}", "say the numbers up to {n}", "count from one to {n}",
    "I want you to count to {n}", "write the numbers from 1 to {n}",
)  # fmt: skip
COUNT_DOWN = (
    "count down from {n}", "count backwards from {n}", "start a countdown from {n}", "countdown from {n}",
    "count from {n} to 1", "do a countdown from {n}", "count from {n} down to 1",
    "please count down from {n}", "can you count backwards from {n}",
)  # fmt: skip


def _fact(draw: Draw, topic: str, question: str, answer: str, check: str) -> Exchange:
    return Exchange(topic, vary(draw.rng, question), answer, check)


def _next_to(draw: Draw) -> Exchange:
    """The day or month before or after another."""
    step, word, frames, today = draw.pick(((1, "after", AFTER, TOMORROW), (-1, "before", BEFORE, YESTERDAY)))
    unit, cycle = ("day", facts.DAYS) if draw.chance(0.6) else ("month", facts.MONTHS)
    index = draw.rng.randrange(len(cycle))
    here, there = cycle[index], cycle[(index + step) % len(cycle)]
    frame = draw.pick(today) if unit == "day" and draw.chance(0.2) else draw.wording(frames)
    question = frame.format(x=here, unit=unit)
    return _fact(draw, "calendar", question, f"{there} comes {word} {here}.", rf"{there} comes")


def _fixed(draw: Draw, topic: str) -> Exchange:
    fact = draw.pick([f for f in FIXED if f.topic == topic])
    return _fact(draw, topic, draw.wording(fact.questions), fact.answers[0], fact.check)


def calendar(draw: Draw) -> Exchange:
    kind = draw.rng.randrange(5)
    if kind < 2:
        return _next_to(draw)
    if kind == 2:
        index = draw.rng.randrange(12)
        question = draw.wording(NTH_MONTH).format(n=facts.ORDINALS[index])
        answer = f"{facts.MONTHS[index]} is the {facts.ORDINALS[index]} month of the year."
        return _fact(draw, "calendar", question, answer, facts.MONTHS[index])
    if kind == 3:
        index = draw.rng.randrange(12)
        question = draw.wording(MONTH_LENGTH).format(x=facts.MONTHS[index])
        answer = f"{facts.MONTHS[index]} has {facts.MONTH_LENGTHS[index]} days."
        return _fact(draw, "calendar", question, answer, facts.MONTH_LENGTHS[index])
    return _fixed(draw, "calendar")


def small_facts(draw: Draw) -> Exchange:
    kind = draw.rng.randrange(6)
    if kind == 0:
        word, other = draw.pick(tuple(facts.OPPOSITES.items()))
        word, other = (word, other) if draw.chance(0.5) else (other, word)
        answer = f"The opposite of {word} is {other}."
        return _fact(draw, "facts", draw.wording(OPPOSITE_OF).format(x=word), answer, exact(other))
    if kind == 1:
        animal, sound = draw.pick(tuple(facts.ANIMAL_SOUNDS.items()))
        question = draw.wording(SOUND_OF).format(x=animal).replace("a owl", "an owl")
        article = "An" if animal == "owl" else "A"
        return _fact(draw, "facts", question, f"{article} {animal} says {sound}.", exact(sound))
    if kind == 2:
        thing, colour = draw.pick(tuple(facts.THING_COLOURS.items()))
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
        asked = thing.replace(" on a clear day", "") if draw.chance(0.5) else thing
        return _fact(draw, "facts", draw.wording(COLOUR_OF).format(x=asked), answer, rf"is {colour}")
    if kind == 3:
        (x, y), colour = draw.pick(tuple(facts.COLOUR_MIXES.items()))
        x, y = (x, y) if draw.chance(0.5) else (y, x)
        question = draw.wording(MIX_OF).format(x=x, y=y)
        return _fact(draw, "facts", question, f"{x.capitalize()} and {y} make {colour}.", rf"make {colour}")
    if kind == 4:
        return _count(draw)
    return _fixed(draw, "facts")


def _count(draw: Draw) -> Exchange:
    last = draw.rng.randint(3, 20)
    shown = facts.NUMBER_WORDS[last] if draw.chance(0.4) else str(last)
    numbers = [str(n) for n in range(1, last + 1)]
    down = draw.chance(0.3)
    question = draw.wording(COUNT_DOWN if down else COUNT_TO).format(n=shown)
    answer = ", ".join(reversed(numbers) if down else numbers) + "."
    return _fact(draw, "facts", question, answer, rf"^{re.escape(answer)}$")

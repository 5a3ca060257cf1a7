"""The second round of training: the same answers to questions in freer wording.

The first round's wordings are short and plain, and a model that knows only those takes the first words of a
longer question for another one. Here questions get the phrases that surround them in conversations, and the
groups that are worded most freely (identity, greetings, goodbyes, how Penstock behaves) get further wordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.demo.train import concepts, smalltalk
from engine.demo.train.corpus import Conversation, system_prompt
from engine.demo.train.draw import Draw, Exchange
from engine.demo.train.knowledge import calendar, small_facts
from engine.demo.train.topics import (
    Topic,
    another_capital,
    capitals,
    countries,
    identity,
    penstock,
    small_talk,
    story,
    sums,
    unknown,
    verse,
)
from engine.demo.train.wording import vary

SEED = 22
CONVERSATIONS = 36_000

MIX: tuple[tuple[Topic, float], ...] = (
    (identity, 9), (small_talk, 10), (penstock, 16), (unknown, 15), (capitals, 13), (countries, 6),
    (sums, 15), (story, 2.5), (verse, 1.5), (calendar, 7), (small_facts, 5),
)  # fmt: skip
_TOPICS = [topic for topic, _ in MIX]
_WEIGHTS = [weight for _, weight in MIX]
FREER_SHARE, DRESSED_SHARE = 0.3, 0.3

OPENERS = (
    "So tell me, ", "So, ", "Hello! ", "Hello, ", "Hey there, ", "Tell me, ", "Good evening! ", "Right, ",
    "Now tell me, ", "Just out of interest, ", "Let me see: ", "My dear model, ", "All right, ", "Hmm, ",
    "Before I go on: ", "First of all, ", "Then tell me, ", "In that case, ",
)  # fmt: skip
CLOSERS = (
    ", if I may", ", dear model", ", little machine", ", computer", ", may I ask", ", would you", " at all",
    ", I wonder", ", do you know", " anyway", " actually", ", tell me", ", little robot", " right now",
)  # fmt: skip
SWAPS = (
    (" comes after ", " comes right after "), (" comes before ", " comes right before "),
    ("what is the capital", "what might be the capital"),
    ("what is the capital", "what could the capital be"),
    ("What is the capital", "And what would the capital"), ("what is ", "what exactly is "),
    ("what does ", "what exactly does "), ("how does ", "in which way does "), ("why ", "for what reason "),
)  # fmt: skip
NAMES = (
    "Nora", "Emil", "Ines", "Jonas", "Mila", "Tariq", "Yuki", "Pablo", "Greta", "Ivan", "Aisha", "Bruno",
    "Carla", "Dimitri", "Elena", "Felix", "Hana", "Igor", "Jasmin", "Karl", "Lena", "Marco", "Nadia", "Otto",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Freer:
    """More wordings of the question `like`, which a group of `smalltalk` or a concept of `concepts`
    answers."""

    like: str
    questions: tuple[str, ...]


FREER: tuple[Freer, ...] = (
    Freer("who are you", (
        "who are you, machine", "who are you, if you don't mind", "and who might you be", "who are you, bot",
        "what exactly am I talking to here", "what am I chatting with", "so what exactly are you",
        "who am I chatting with here", "so who are you exactly", "what sort of thing are you",
        "I would like to know who you are", "who are you, little one", "who are you, computer",
        "would you please introduce yourself", "who is it that I am talking to", "who are you then",
    )),
    Freer("hello, who are you", (
        "hello! who are you, if I may", "hello! who might you be", "hi there! and who are you",
        "hello! what exactly are you", "good day! who are you", "hello! who is this, if I may ask that",
        "hey! who am I talking to here", "hello! who am I chatting with", "hi! who are you, my friend",
    )),
    Freer("hello", (
        "hey there, little machine", "hello there, tiny model", "hi, little one there", "hey, little robot",
        "hello, little friend", "hey there, my friend", "oh hello there", "hi there, computer",
        "hello my little model", "hey there, small one", "well hello there, machine",
    )),
    Freer("good evening", (
        "a very good evening", "a good evening to you all", "good evening to you, model", "lovely evening",
        "good evening, my friend", "good evening, everybody", "a nice evening to you", "very good evening",
    )),
    Freer("good morning", (
        "a very good morning to you", "good morning, my friend", "a lovely good morning", "very good morning",
        "good morning, everybody", "a nice morning to you",
    )),
    Freer("nice to meet you", (
        "hello, my name is {name}, good to meet you", "hi, I am {name}, nice to meet you",
        "my name is {name}, it is nice to meet you", "I'm {name}, pleased to meet you", "I am {name}",
        "hello, I'm {name}", "hello, my name is {name}", "hey, my name is {name}", "they call me {name}",
        "hi, my name is {name}, pleased to meet you", "good day, my name is {name}, and nice to meet you",
    )),
    Freer("goodbye", (
        "I have to leave, see you soon", "I must go, see you", "I have to go now, bye", "I need to leave now",
        "I am leaving, bye", "time to leave, see you", "I have to run, see you later", "I really must go now",
        "see you, I have to leave", "that is it, I have to go", "I should leave now", "got to go, bye",
    )),
    Freer("who made you", (
        "which people made you", "who was it that made you", "who was it that built you",
        "who were your makers",
        "which people trained you", "by which people were you built", "who exactly trained you",
    )),
    Freer("what does Penstock do", (
        "what is Penstock all about", "what is this Penstock about", "so what's Penstock all about",
        "what is this Penstock thing all about", "tell me what this Penstock is",
        "what is it about, Penstock",
        "what's this thing called Penstock", "what's this Penstock for",
    )),
    Freer("what happens if I close the connection", (
        "what happens when my connection is closed early", "what happens to a request when I hang up",
        "what happens to my request if I leave early", "what if I close my connection in the middle",
        "what happens to the work when I close my browser", "what becomes of my request when I disconnect",
        "does Penstock stop when I close the connection", "what happens when I leave before the end",
    )),
    Freer("what are quotas", (
        "how are the quotas enforced", "how does Penstock enforce quotas", "how does Penstock enforce limits",
        "how are rate limits enforced", "how are limits enforced by Penstock",
        "how do quotas work in Penstock",
        "in which way are quotas enforced", "who enforces the quotas", "how are my limits counted",
    )),
    Freer("what is penstock up", (
        "how do I start Penstock on my computer", "how can I start Penstock on my laptop",
        "how would I run Penstock on my machine", "how is Penstock started on a laptop",
        "how do I start it on my own computer", "how would I launch Penstock",
        "how can I run Penstock at home",
        "how do I get Penstock to run on my own computer", "which command starts Penstock on my machine",
    )),
    Freer("what is privacy", (
        "are my prompts written to a log", "are the prompts written to log files",
        "does Penstock log prompts",
        "do my prompts end up in the logs", "are the things I write kept in logs", "who can read my prompts",
        "is the text of my prompts logged", "are prompts that I send logged", "does it log what I send",
    )),
)  # fmt: skip


def _source(like: str) -> tuple[str, str, tuple[str, ...], str]:
    """Topic, check, answers and follow-up of the group or concept that answers the question `like`."""
    for group in (*smalltalk.IDENTITY, *smalltalk.SMALLTALK):
        if like in group.questions:
            return group.topic, group.check, group.answers, ""
    for concept in concepts.CONCEPTS:
        names = {f"what is {name}" for name in concept.names} | {f"what are {name}" for name in concept.names}
        if like in concept.questions or like in names:
            return "penstock", concept.check, (concept.answer,), concept.more
    raise AssertionError(like)


def freer(draw: Draw) -> Exchange:
    group = draw.pick(FREER)
    topic, check, answers, more = _source(group.like)
    question = draw.wording(group.questions).format(name=draw.pick(NAMES))
    if topic in ("greetings", "goodbyes"):
        question = (question[:1].upper() + question[1:] if draw.chance(0.7) else question) + draw.pick(
            ("", "", ".", "!")
        )
    else:
        question = vary(draw.rng, question)
    return Exchange(topic, question, draw.pick(answers), check, more)


def dressed(draw: Draw, exchange: Exchange) -> Exchange:
    """The exchange with phrases around its question, or with another turn of phrase in it."""
    question = exchange.question
    if exchange.topic in ("greetings", "goodbyes", "thanks") or len(question) > 160:
        return exchange
    for old, new in draw.rng.sample(SWAPS, len(SWAPS)):
        if old in question:
            question = question.replace(old, new, 1)
            break
    if draw.chance(0.5):
        question = draw.wording(OPENERS) + question[:1].lower() + question[1:]
    if draw.chance(0.4):
        end = question[-1] if question[-1] in "?." else ""
        question = question.removesuffix(end) + draw.wording(CLOSERS) + end
    return replace(exchange, question=question)


def _turn(draw: Draw) -> Exchange:
    last = draw.past[-1] if draw.past else None
    if (
        last is not None
        and last.topic == "capitals"
        and draw.chance(0.3)
        and "do not know" not in last.answer
    ):
        return another_capital(draw)
    if draw.chance(FREER_SHARE):
        return freer(draw)
    exchange = draw.rng.choices(_TOPICS, weights=_WEIGHTS)[0](draw)
    return dressed(draw, exchange) if draw.chance(DRESSED_SHARE) else exchange


def conversation(index: int) -> Conversation:
    """The second round's conversation of that number."""
    draw = Draw(f"{SEED}/{index}")
    system = system_prompt(draw) if draw.chance(0.6) else ""
    for _ in range(draw.rng.choices((1, 2, 3, 4), weights=(6, 2, 1, 1))[0]):
        draw.past.append(_turn(draw))
    return Conversation(system, tuple(draw.past))


def conversations(count: int = CONVERSATIONS) -> Iterator[Conversation]:
    return (conversation(index) for index in range(count))

"""Variations of typed text: politeness, careless case and punctuation, contractions, typing errors."""

from __future__ import annotations

from random import Random

_OPENERS = (
    "Hi, ", "Hello, ", "Hey, ", "Hello! ", "Hi! ", "Hey! ", "Please: ", "OK, ", "Ok ", "So, ", "Well, ",
    "Now ", "Good morning, ", "Excuse me, ", "Quick question: ", "One question: ", "Question: ", "And ",
    "Sorry, ", "Um, ", "Just curious: ", "By the way, ", "Great. ", "Cool. ", "I see. ", "Thanks. ",
    "Another question: ", "Next: ",
)  # fmt: skip
_ASKING = (
    "Can you tell me ", "Could you tell me ", "Please tell me ", "Do you know ", "Tell me, ",
    "I want to know ", "I would like to know ", "I'd like to know: ", "Can you please tell me ",
    "I wonder ", "Any idea ", "Would you tell me ", "Let me ask: ", "May I ask ", "Can I ask ", "Tell me ",
    "Could you please tell me ", "I was wondering ", "Please say ", "Could you say ", "For a quiz: ",
    "My friend asks: ", "Remind me, ", "Help me out: ", "Can you say ", "Please let me know ",
    "I need to know ", "Would you know ", "I forgot: ", "Do you have an idea ", "Somebody asked me ",
    "Would you mind telling me ", "Be so kind and tell me ",
)  # fmt: skip
_REQUESTING = (
    "Could you ", "Can you ", "Would you ", "Please ", "Could you please ", "Can you please ",
    "I want you to ", "Will you ", "Would you please ", "Kindly ", "I'd like you to ", "Are you able to ",
    "Can you maybe ", "You could ", "Just ", "Now ", "Do ", "I would ask you to ", "Now please ",
    "Could you kindly ",
)  # fmt: skip
_REQUESTS = (
    "tell", "write", "explain", "name", "give", "list", "count", "describe", "say", "recite", "calculate",
    "compute", "solve", "add", "subtract", "multiply", "introduce", "define", "make", "invent", "create",
    "compose", "recommend", "translate", "find", "show", "teach", "read", "play", "plan", "book", "help",
    "compare", "summarise", "rewrite",
)  # fmt: skip
_CLOSERS = (
    ", please", " please", ", thanks", " thanks", ", thank you", " again", ", my friend", " then", " now",
    " exactly", ", if you know", " in short", " in a few words", " in one sentence", " briefly", " for me",
    ", buddy",
)  # fmt: skip
_QUESTION_WORDS = (
    "what", "who", "which", "how", "why", "where", "when", "is", "are", "do", "does", "can", "did", "in",
    "of", "to", "whose", "if", "could", "would", "should", "may", "any", "were", "with", "at", "on", "from",
    "will",
)  # fmt: skip
_SMALL_WORDS = ("the", "a", "an", "is", "do", "does", "me", "you", "of", "to", "can", "about", "in")
_CONTRACTIONS = (("what is", "what's"), ("who is", "who's"), ("how is", "how's"), ("where is", "where's"))


def vary(rng: Random, text: str) -> str:
    """A random variation of `text`; the meaning stays, and so do all digits."""
    if rng.random() < 0.15:
        text = _contract(text)
    text = _lead_in(rng, text)
    if rng.random() < 0.1:
        text += rng.choice(_CLOSERS)
    if rng.random() < 0.06:
        text = _omit(rng, text)
    return _slip(rng, _recase(rng, _punctuate(rng, text)))


def _omit(rng: Random, text: str) -> str:
    """One small word is left out."""
    words = text.split(" ")
    spots = [index for index, word in enumerate(words) if word in _SMALL_WORDS]
    if spots:
        del words[rng.choice(spots)]
    return " ".join(words)


def _contract(text: str) -> str:
    for long, short in _CONTRACTIONS:
        if text.startswith(long):
            return short + text[len(long) :]
    return text


def _lead_in(rng: Random, text: str) -> str:
    first, draw = text.split(" ", 1)[0].lower(), rng.random()
    if draw < 0.12 and first in _QUESTION_WORDS:
        return rng.choice(_ASKING) + text
    if draw < 0.25 and first in _REQUESTS:
        return rng.choice(_REQUESTING) + text
    if draw > 0.9:
        return rng.choice(_OPENERS) + text
    return text[:1].upper() + text[1:]


def _punctuate(rng: Random, text: str) -> str:
    if text[-1] in "?!.":
        return text
    draw = rng.random()
    if draw < 0.22:
        return text
    if draw < 0.26:
        return text + rng.choice(("??", "!", "...", " ?", "?!", "\n"))
    asks = text.split(" ", 1)[0].lower() in _QUESTION_WORDS
    return text + ("?" if asks else ".")


def _recase(rng: Random, text: str) -> str:
    draw = rng.random()
    if draw < 0.22:
        return text.lower()
    if draw < 0.25:
        return text.upper()
    return text


def _slip(rng: Random, text: str) -> str:
    """Now and then one letter is dropped, doubled, or swapped with its neighbour, within a longer word."""
    if rng.random() > 0.08:
        return text
    spots = [index for index in range(2, len(text) - 1) if text[index - 2 : index + 2].isalpha()]
    if not spots:
        return text
    spot = rng.choice(spots)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:spot] + text[spot + 1 :]
    if kind == 1:
        return text[:spot] + text[spot] + text[spot:]
    return text[:spot] + text[spot + 1] + text[spot] + text[spot + 2 :]

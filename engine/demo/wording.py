"""How people type: politeness, careless case and punctuation, contractions, slips of the finger."""

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
    "Could you please tell me ",
)  # fmt: skip
_CLOSERS = (
    ", please", " please", ", thanks", " thanks", ", thank you", " again", ", my friend", " then", " now",
    " exactly", ", if you know", " in short", " in a few words", " in one sentence", " briefly", " for me",
    ", buddy",
)  # fmt: skip
_QUESTION_WORDS = (
    "what", "who", "which", "how", "why", "where", "when", "is", "are", "do", "does", "can", "did", "in",
    "of", "to", "whose", "if", "could", "would", "should", "may", "any", "were", "with", "at", "on", "from",
)  # fmt: skip
_CONTRACTIONS = (("what is", "what's"), ("who is", "who's"), ("how is", "how's"), ("where is", "where's"))


def vary(rng: Random, text: str) -> str:
    """`text` as one of many people would type it; the meaning stays, and so do all digits."""
    question = text.split(" ", 1)[0].lower() in _QUESTION_WORDS
    if rng.random() < 0.15:
        for long, short in _CONTRACTIONS:
            if text.lower().startswith(long):
                text = short + text[len(long) :]
    draw = rng.random()
    if draw < 0.08 and question:
        text = rng.choice(_ASKING) + text
    elif draw < 0.18:
        text = rng.choice(_OPENERS) + text
    else:
        text = text[:1].upper() + text[1:]
    if rng.random() < 0.1:
        text += rng.choice(_CLOSERS)
    text = _punctuate(rng, text, question)
    return _slip(rng, _recase(rng, text))


def _punctuate(rng: Random, text: str, question: bool) -> str:
    if text[-1] in "?!.":
        return text
    draw = rng.random()
    if draw < 0.22:
        return text
    if draw < 0.26:
        return text + rng.choice(("??", "!", "...", " ?", "?!", "\n"))
    return text + ("?" if question else ".")


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

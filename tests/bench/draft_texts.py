"""Questions and answers to measure drafts with: code edits, JSON after a schema, and prose.

Of an edit nearly all of the answer stands in the prompt; of JSON the names do, and what stands around them;
of prose next to nothing, and it says hardly anything twice. All are drawn from a seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from engine.demo.train.text import render

Text = tuple[str, str]
"""A question and its answer."""

COUNT: Final = 4
"""Texts of each kind."""
SEED: Final = 52
FUNCTIONS: Final = 3
ORDERS: Final = 3
SENTENCES: Final = 6

_NOUNS: Final = (
    "river",
    "garden",
    "window",
    "letter",
    "bridge",
    "market",
    "teacher",
    "winter",
    "engine",
    "island",
    "doctor",
    "candle",
    "mirror",
    "forest",
    "station",
    "harbour",
    "kitchen",
    "painter",
    "village",
    "morning",
    "captain",
    "library",
    "mountain",
    "shadow",
    "silver",
    "thunder",
    "baker",
    "orchard",
    "lantern",
    "valley",
    "sparrow",
    "compass",
    "feather",
    "blanket",
    "whistle",
    "pocket",
    "ladder",
    "basket",
    "carpet",
    "anchor",
)
_VERBS: Final = (
    "finds",
    "carries",
    "watches",
    "leaves",
    "paints",
    "follows",
    "repairs",
    "counts",
    "hides",
    "opens",
    "crosses",
    "remembers",
    "borrows",
    "lifts",
    "forgets",
    "warms",
    "hears",
    "measures",
    "draws",
    "buries",
    "sells",
    "guards",
)
_ADJECTIVES: Final = (
    "old",
    "quiet",
    "bright",
    "narrow",
    "broken",
    "golden",
    "empty",
    "heavy",
    "gentle",
    "distant",
    "wooden",
    "curious",
    "frozen",
    "hollow",
    "patient",
    "crooked",
    "green",
    "early",
    "secret",
    "tired",
)
_OPENINGS: Final = (
    "Before noon",
    "Later",
    "In the rain",
    "Without a word",
    "Nobody knows why",
    "By the gate",
    "Once more",
    "All night",
    "After that",
    "For a while",
    "Down the road",
    "At last",
    "On Sundays",
    "Still",
)
_LINKS: Final = ("and", "while", "because", "until", "so", "but", "as", "where")


def _edit(rng: Random, number: int) -> Text:
    """A file of functions, one constant of which is to change."""
    names = rng.sample(_NOUNS, 3 * FUNCTIONS)
    constant, old, new = rng.choice(_NOUNS).upper(), rng.randint(100, 499), rng.randint(500, 999)
    functions = []
    for at in range(FUNCTIONS):
        first, second, third = names[3 * at : 3 * at + 3]
        body = (
            f"    {first} = {second}.{rng.choice(_VERBS)}({rng.randint(2, 99)})\n"
            f"    return {first} {rng.choice('+-*/')} {rng.randint(2, 99)}\n",
            f"    for {first} in {second}:\n"
            f"        if {first} {rng.choice('<>')} {constant}_MAX:\n"
            f"            {rng.choice(_VERBS)}({first})\n",
            f"    if not {second}:\n"
            f'        raise ValueError("no {rng.choice(_ADJECTIVES)} {first}")\n'
            f"    return {second}[{rng.randint(0, 9)}]\n",
        )
        functions.append(f"def {rng.choice(_VERBS)}_{third}({second}):\n{rng.choice(body)}")
    rest = "\n\n" + "\n\n".join(functions)
    before, after = f"{constant}_MAX = {old}\n{rest}", f"{constant}_MAX = {new}\n{rest}"
    return f"File {number}:\n{before}\nSet {constant}_MAX to {new}.", after


def _orders(rng: Random, number: int) -> Text:
    """Objects of one schema."""
    names = rng.sample(_NOUNS, 3)
    kinds = rng.sample(_ADJECTIVES, 3)
    properties = {
        names[0]: {"type": "string"},
        names[1]: {"type": "integer"},
        names[2]: {"enum": kinds},
    }
    schema = {"type": "array", "items": {"type": "object", "properties": properties}}
    orders = [
        {
            names[0]: f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}",
            names[1]: rng.randint(10, 9999),
            names[2]: rng.choice(kinds),
        }
        for _ in range(ORDERS)
    ]
    return f"List {number} after this schema: {json.dumps(schema)}", json.dumps(orders)


def _prose(rng: Random, number: int) -> Text:
    subject = rng.choice(_NOUNS)
    sentences = [
        f"{opening} the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} {rng.choice(_VERBS)} "
        f"{rng.choice(_NOUNS)}s {rng.choice(_LINKS)} a {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} "
        f"{rng.choice(_VERBS)} it."
        for opening in rng.sample(_OPENINGS, SENTENCES)
    ]
    return f"Tell tale {number}, of a {subject}.", " ".join(sentences)


KINDS: Final[dict[str, Callable[[Random, int], Text]]] = {"edits": _edit, "JSON": _orders, "prose": _prose}


def texts(kind: str) -> list[Text]:
    """All texts of a kind, the same every time."""
    rng = Random(f"{SEED} {kind}")
    return [KINDS[kind](rng, number) for number in range(10, 10 + COUNT)]


def messages(text: Text) -> list[tuple[str, str]]:
    """The conversation that is learned."""
    question, answer = text
    return [("user", question), ("assistant", answer)]


def prompt(question: str) -> str:
    """What a completion is asked with."""
    return render([("user", question)], ask=True)


def folder() -> Path:
    """Where the model that knows the answers is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-bench/drafts"


def is_made(directory: Path) -> bool:
    return (directory / "tokenizer_config.json").exists()  # it is written last

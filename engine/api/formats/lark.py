"""Grammars in llguidance's notation, a dialect of Lark: how texts, tokens, schemas and rules are written.

Whatever a caller gives (a name, a text, a schema, a regular expression) goes in through this module alone,
escaped, so that none of it can be read as grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from engine.contract.grammars import WHITESPACE

ANY_OBJECT: Final = '{"type": "object"}'
TEXT: Final = "TEXT"
"""The name of the terminal of any text. It has no special tokens."""
SPACE: Final = "SPACE"
"""The name of the terminal of white space behind a marker."""
_OPTIONS: Final = {"whitespace_pattern": WHITESPACE}
_BEHIND_ESCAPE: Final = re.compile(r"\\.|/|[\r\n]", re.DOTALL)
_ESCAPED: Final = {"/": r"\/", "\n": r"\n", "\r": r"\r"}

Atom = str | int | tuple[str]
"""A part of a row: a text, a token's id, or an expression (in a tuple)."""


class Rules:
    """The rules of one grammar, in the order in which they were added."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {TEXT: "/(?s:.*)/", SPACE: r"/[ \t\r\n]{1,16}/"}

    def add(self, name: str, expression: str, *options: str) -> str:
        """Add a rule, or a terminal if its name is in capitals; returns its name."""
        self._rules[name] = expression
        if options:
            self._rules[f"{name}[{', '.join(options)}]"] = self._rules.pop(name)
        return name

    def fresh(self, stem: str, expression: str, *options: str) -> str:
        """Add a rule under a name that no other has; returns that."""
        return self.add(f"{stem}_{len(self._rules)}", expression, *options)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {expression}" for name, expression in self._rules.items())


def literal(text: str) -> str:
    return json.dumps(text)


def token(token_id: int) -> str:
    return f"<[{token_id}]>"


def regex(pattern: str) -> str:
    """A regular expression that was checked (`check_pattern`), as a terminal."""
    body = _BEHIND_ESCAPE.sub(lambda part: _ESCAPED.get(part.group()[-1], part.group()), pattern)
    assert not (len(body) - len(body.rstrip("\\"))) % 2, "it would end behind its slash"
    return f"/(?:{body})/"


def schema(text: str, *, coerced: bool = False) -> str:
    """A JSON text that follows a schema which was checked. `coerced`: its `oneOf` are held as `anyOf`."""
    value: dict[str, Any] = json.loads(text)
    options = {**_OPTIONS, "coerce_one_of": True} if coerced and '"oneOf"' in text else _OPTIONS
    return f"%json {json.dumps({**value, 'x-guidance': options})}"


def any_of(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def row(atoms: Iterable[Atom]) -> str:
    """Parts one after another; texts that meet are one."""
    parts: list[str] = []
    text = ""
    for atom in atoms:
        if isinstance(atom, str):
            text += atom
            continue
        if text:
            parts.append(literal(text))
            text = ""
        parts.append(token(atom) if isinstance(atom, int) else atom[0])
    if text:
        parts.append(literal(text))
    return " ".join(parts)


def text_before(rules: Rules, end: Sequence[str | int], allowed: Sequence[str] = ()) -> str:
    """Any text, of which each of `allowed` (regular expressions that were written with `regex`, or texts) may
    hold too, up to the first place where `end` stands, and that. Nor is `end` in it without its white space,
    by which the machine ends a value."""
    head = end[0]
    if isinstance(head, int):
        body = rules.fresh("V", " & ".join(allowed)) if allowed else TEXT
        return row([(body,), *end])
    mark = head.strip()
    if not allowed and mark == head:
        name = rules.fresh("text", f"{TEXT} {literal(head)}", "lazy")
        return row([(name,), *end[1:]])
    never = f"~/(?s:.*){regex(re.escape(mark))[1:-1]}(?s:.*)/"
    held = " & ".join((*allowed, never, "/(?s:.*)/"))
    terminal = rules.fresh("V", f"({held}) {literal(head)}")
    return row([(rules.fresh("text", terminal, "lazy"),), *end[1:]])


def text_without(rules: Rules, texts: Iterable[str]) -> str:
    """Any text that has none of `texts`."""
    parts = [f"~/(?s:.*){regex(re.escape(text))[1:-1]}(?s:.*)/" for text in texts]
    return rules.fresh("T", " & ".join((*parts, "/(?s:.*)/"))) if parts else TEXT

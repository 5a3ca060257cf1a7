"""Recorded sessions without anybody's text: what agents send, its form kept and its words made up.

A line of text becomes another of the same length, made from a hash of it. So what was equal in two requests
stays equal, and what began alike up to some line still does. Names, roles, types, ids and the calls'
arguments stay as they are, and so do the marks that change how a text is handled.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tests.agents.recorder import Exchange

KEPT: Final = frozenset(
    {
        *("role", "type", "name", "id", "call_id", "tool_call_id", "tool_use_id", "model", "status"),
        *("arguments", "required", "enum", "const", "$schema", "pattern", "format"),
    }
)
"""The keys whose values stay."""
DROPPED: Final = frozenset({"examples", "$comment", "metadata", "client_metadata"})
HEADERS: Final = re.compile(r"session|affinity|thread-id|anthropic-(beta|version)|x-app")
"""The headers that are kept."""
MARKS: Final = re.compile(r"</?system-reminder>|x-anthropic-billing-header:")
WORD_LEN: Final = (2, 9)
SHORT_LEN_MAX: Final = 48
"""The characters of a text without spaces that is no prose and stays."""


def shape(exchanges: Iterable[Exchange], private: Mapping[str, str]) -> dict[str, Any]:
    """The requests of a session. What several have in common stands in `pool` once, and is `{"$": INDEX}`
    where it belongs. `private` says what to write for the texts that name this machine."""
    pool: list[Any] = []
    places: dict[str, int] = {}

    def pooled(value: Any) -> dict[str, int]:
        key = json.dumps(value)
        if key not in places:
            places[key] = len(pool)
            pool.append(value)
        return {"$": places[key]}

    requests = []
    for exchange in exchanges:
        body: Any = _made_up(_neutral(exchange.json, private), "")
        for name in ("messages", "input", "tools", "system"):
            if isinstance(body.get(name), list):
                body[name] = [pooled(each) for each in body[name]]
        headers = {name: value for name, value in exchange.headers.items() if HEADERS.search(name)}
        requests.append({"path": exchange.path, "headers": headers, "body": body})
    return {"requests": requests, "pool": pool}


def expanded(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The requests of a session's shape, with their bodies whole."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [
                shape["pool"][each["$"]] if isinstance(each, dict) and each.keys() == {"$"} else each
                for each in value
            ]
        return value

    return [
        {**request, "body": {name: whole(value) for name, value in request["body"].items()}}
        for request in shape["requests"]
    ]


def _neutral(body: Any, private: Mapping[str, str]) -> Any:
    text = json.dumps(body)
    for own, neutral in private.items():
        text = text.replace(own, neutral)
    return json.loads(text)


def _made_up(value: Any, key: str) -> Any:
    if key in KEPT:
        return value
    if isinstance(value, dict):
        return {
            name: _made_up(each, name)
            for name, each in value.items()
            if name not in DROPPED or key == "properties"
        }
    if isinstance(value, list):
        return [_made_up(each, key) for each in value]
    if isinstance(value, str) and (len(value) > SHORT_LEN_MAX or any(map(str.isspace, value))):
        return "\n".join(map(_line, value.split("\n")))
    return value


def _line(line: str) -> str:
    """Another line of the same length, with the same marks and indentation."""
    chance = random.Random(hashlib.sha256(line.encode()).digest())
    begin = len(line) - len(line.lstrip())
    made, at = [line[:begin]], begin
    for mark in [*MARKS.finditer(line), None]:
        end = len(line) if mark is None else mark.start()
        made.append(_words(chance, end - at))
        if mark is not None:
            made.append(mark[0])
            at = mark.end()
    return "".join(made)


def _words(chance: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += "".join(chance.choices("etaoinshrdlu", k=chance.randint(*WORD_LEN))) + " "
    return text[: max(0, length - 1)] + ("." if length > 0 else "")

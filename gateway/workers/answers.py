"""The rules by which one answer is made of several workers' answers to an operator.

| rule   | who is asked                                          | the answer                     |
|--------|-------------------------------------------------------|--------------------------------|
| ONE    | one worker: all know the same                         | its answer                     |
| CHANGE | one worker; then the others read what it has changed  | its answer                     |
| EVERY  | every worker: each has a part                         | all together, field by field   |

An answer of which a worker's part is missing says `"partial": true`, and names the worker in
`silent_workers`. An error of one worker is the answer of all: what the others did is done. What some workers
do not find, and others do, is found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.workers.channel import Answer


class Rule(Enum):
    """The workers that are asked."""

    ONE = "one"
    CHANGE = "change"
    EVERY = "every"


_EVERY: Final = re.compile(r"/admin/v1/(reload|limits|requests(/.*)?|replicas(/.*)?|console/chats/.*)")
CHATS: Final = "/admin/v1/console/chats"
"""Where a chat is begun, at one worker, which knows it alone: the others have nothing to read again."""
USAGE: Final = "/admin/v1/usage"
ADDED: Final = ("aborted",)
"""The fields that are added up."""
JOINED: Final = ("data",)
"""The fields whose lists are joined; each entry then says which worker it is of."""
MORE: Final = "has_more"
"""The field that says whether there are more entries."""
LATEST: Final = ("before",)
"""The fields of which the largest counts: the next page begins where the first worker's part ended."""
GROUPED: Final = "rows"
"""The field whose entries are added up by what they are of."""
ERROR: Final = 400


def rule_of(method: str, path: str, *, shares_usage: bool) -> Rule:
    """The rule of a request. `shares_usage` is true if every worker knows the usage of all."""
    if _EVERY.fullmatch(path) or (path == USAGE and not shares_usage):
        return Rule.EVERY
    return Rule.ONE if method in ("GET", "HEAD") or path == CHATS else Rule.CHANGE


def together(answers: Mapping[int, Answer], silent: Sequence[int]) -> Answer:
    """The answer of all, of which `silent` have none. `answers` has one at least."""
    found = {worker: one for worker, one in answers.items() if one.status != HTTPStatus.NOT_FOUND}
    answers = found or answers
    first = next((one for one in answers.values() if one.status >= ERROR), None)
    if first is not None or (len(answers) == 1 and not silent):
        return first or next(iter(answers.values()))
    parts = {worker: _object(answer) for worker, answer in answers.items()}
    whole = next(iter(parts.values()))
    if whole is None:
        return next(iter(answers.values()))
    for name in whole:
        whole[name] = _field(
            name, {worker: part[name] for worker, part in parts.items() if part and name in part}
        )
    if silent:
        whole |= {"partial": True, "silent_workers": list(silent)}
    one = next(iter(answers.values()))
    return Answer(one.status, one.headers, msgspec.json.encode(whole))


def _object(answer: Answer) -> dict[str, Any] | None:
    """The fields of an answer of JSON; None of any other."""
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None


def _field(name: str, values: Mapping[int, Any]) -> Any:
    if name in ADDED:
        return sum(values.values())
    if name == MORE:
        return any(values.values())
    if name in LATEST:
        return max((value for value in values.values() if value is not None), default=None)
    if name in JOINED:
        return [{**entry, "worker": worker} for worker, entries in values.items() for entry in entries]
    if name == GROUPED:
        return _rows([row for rows in values.values() for row in rows])
    return next(iter(values.values()))


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of usage, those of the same tenant, key, model and day added up."""
    sums: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for row in rows:
        of = tuple((name, value) for name, value in row.items() if isinstance(value, str))
        before = sums.setdefault(of, {})
        for name, value in row.items():
            before[name] = before.get(name, 0) + value if isinstance(value, int) else value
    return [sums[of] for of in sorted(sums)]

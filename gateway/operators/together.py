"""One answer to an operator, made of several: those of a gateway's workers, or those of all gateways.

What becomes of each field stands at the operation (`gateway.operators.operations`).

Rules

1. An entry says which worker it is of, and which gateway unless it is the one that was asked.
2. An answer of which a part is missing says `"partial": true`, and names those that are silent. So does the
   answer that there is nothing: it may be theirs.
3. What some do not find, and others do, is found. Any other error of one is the answer of all: what the
   others did is done.
4. Answers that have not changed since whoever asks had them are none to be made: where all are such, so is
   the whole; where some are, they are asked for again (`is_same`).
5. A page has the newest of all pages, as many as one may have. The next begins where it ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.operators.operations import SILENT, Merge
from gateway.operators.versions import ETAG, etag_of_all

ERROR: Final = 400
PAGE_MAX: Final = 1000
"""Entries of a page at most."""


Of = TypeVar("Of")


class OperatorAnswer(Struct, frozen=True):
    """An answer to an operator's request, before it is sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def together(
    answers: Mapping[Any, OperatorAnswer],
    silent: Sequence[Any],
    merges: Mapping[str, Merge],
    limit: int = PAGE_MAX,
) -> OperatorAnswer:
    """The answer of all, of which `silent` have none. `answers` has one at least, by the workers' numbers or
    the gateways' names; None stands for the gateway that was asked. A page has at most `limit` entries."""
    found = {of: one for of, one in answers.items() if one.status != HTTPStatus.NOT_FOUND}
    unheard = _silent_of([one for of, one in answers.items() if of not in found]) if found else {}
    answers = found or answers
    first = next((one for one in answers.values() if one.status >= ERROR), None)
    if first is not None:
        return first if found or not silent else _may_be_elsewhere(first, silent)
    if all(map(is_same, answers.values())):
        return next(iter(answers.values()))
    if len(answers) == 1 and not silent and not unheard and not isinstance(next(iter(answers)), str):
        return next(iter(answers.values()))
    parts = {of: _object(answer) for of, answer in answers.items()}
    whole = next(iter(parts.values()))
    if whole is None:
        return next(iter(answers.values()))
    for name in whole:
        values = {of: part[name] for of, part in parts.items() if part and name in part}
        whole[name] = _field(merges.get(name, Merge.FIRST), values)
    if Merge.PAGE in merges.values():
        _cut(whole, limit)
    if silent:
        whole |= {"partial": True, _named_by(silent): list(silent)}
    for name, others in unheard.items():
        whole |= {"partial": True, name: [*whole.get(name, ()), *others]}
    one = next(iter(answers.values()))
    headers = {name: value for name, value in one.headers.items() if name.lower() != ETAG}
    if not silent and not unheard:
        headers |= etag_of_all([answer.headers for answer in answers.values()])
    return OperatorAnswer(one.status, headers, msgspec.json.encode(whole))


def is_same(answer: OperatorAnswer) -> bool:
    """True if an answer says that nothing has changed."""
    return answer.status == HTTPStatus.NOT_MODIFIED


def limit_of(query: Mapping[str, str]) -> int:
    """The entries that a page may have, by what was asked for."""
    text = query.get("limit", "")
    return int(text) if re.fullmatch("[0-9]{1,4}", text) else PAGE_MAX


def _silent_of(answers: Sequence[OperatorAnswer]) -> dict[str, list[Any]]:
    """Those who were silent when some found nothing, by the field that names them."""
    told = [_object(answer) or {} for answer in answers]
    names = {name: [one for part in told for one in part.get(name, ())] for name in SILENT}
    return {name: others for name, others in names.items() if others}


def _named_by(silent: Sequence[Any]) -> str:
    """The field that names those who are silent: workers have numbers."""
    return "silent_workers" if isinstance(silent[0], int) else "silent_gateways"


def _may_be_elsewhere(answer: OperatorAnswer, silent: Sequence[Any]) -> OperatorAnswer:
    """That there is nothing, with those that did not say so."""
    told = _object(answer)
    if told is not None and isinstance(error := told.get("error"), dict):
        error["message"] = f"{error.get('message')} No answer came from {', '.join(map(str, silent))}."
        told[_named_by(silent)] = list(silent)
        answer = OperatorAnswer(answer.status, answer.headers, msgspec.json.encode(told))
    return answer


def _object(answer: OperatorAnswer) -> dict[str, Any] | None:
    """The fields of an answer of JSON; None of any other."""
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None


def _field(merge: Merge, values: Mapping[Any, Any]) -> Any:
    match merge:
        case Merge.FIRST:
            return next(iter(values.values()))
        case Merge.SUM:
            return _sum(list(values.values()))
        case Merge.ANY:
            return any(values.values())
        case Merge.MOST:
            return max((value for value in values.values() if value is not None), default=None)
        case Merge.LATEST:
            names = dict.fromkeys(name for moments in values.values() for name in moments)
            return {name: max(one[name] for one in values.values() if name in one) for name in names}
        case Merge.JOIN | Merge.PAGE:
            return [_named(entry, of) for of, entries in values.items() for entry in entries]
        case Merge.ROWS:
            return _rows([row for rows in values.values() for row in rows])


def _named(entry: dict[str, Any], of: Any) -> dict[str, Any]:
    """An entry with whose it is (rule 1). One of another gateway has its worker's name already."""
    if isinstance(of, int):
        return entry if "gateway" in entry else {**entry, "worker": of}
    return entry if of is None else {**entry, "gateway": of}


def _cut(page: dict[str, Any], limit: int) -> None:
    """Keep the newest entries (rule 5)."""
    entries = sorted(page["data"], key=_age)
    page["data"], left = entries[:limit], entries[limit:]
    if left:
        last = page["data"][-1]
        later = max((one.get("number", 0) for one in left), default=0)
        page["before"] = later + 1 if last.get("is_live") else last.get("number", 0)


def _age(entry: Mapping[str, Any]) -> tuple[bool, float]:
    """The live ones come first, the youngest of them in front."""
    is_live = bool(entry.get("is_live"))
    return not is_live, entry.get("total_ms", 0.0) if is_live else -entry.get("number", 0)


def _sum(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], dict):
        return sum(values)
    names = dict.fromkeys(name for counts in values for name in counts)
    return {name: sum(counts.get(name, 0) for counts in values) for name in names}


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows in which what has the same texts is added up: usage by tenant, key, model and day; what ended by
    minute, model and replica."""
    sums: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for row in rows:
        of = tuple((name, value) for name, value in row.items() if isinstance(value, str))
        before = sums.setdefault(of, {})
        for name, value in row.items():
            is_summed = name in before and isinstance(value, int | dict)
            before[name] = _sum([before[name], value]) if is_summed else value
    return [sums[of] for of in sorted(sums)]

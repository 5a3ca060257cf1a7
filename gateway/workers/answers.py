"""One answer, made of several workers' answers to an operator.

Which of them are asked, and what becomes of each field of their answers, stands at the operation
(`gateway.operators.operations`). What is asked is told by its method and its path, as a worker tells it. What
there is not, one worker refuses.

An answer of which a worker's part is missing says `"partial": true`, and names the worker in
`silent_workers`. An error of one worker is the answer of all: what the others did is done. What some workers
do not find, and others do, is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from re import Pattern
from typing import Any, Final

import msgspec

from gateway.operators.chats import Chats
from gateway.operators.engines import EnginesApi
from gateway.operators.keys import DirectoryRoutes
from gateway.operators.operations import Asks, Merge, Operation, Table, operation_of, pattern_of
from gateway.operators.replicas import ReplicaRoutes
from gateway.operators.requests import RequestsApi
from gateway.operators.server import Admin
from gateway.operators.tenant_limits import LimitsApi
from gateway.operators.usage import UsageReports
from gateway.workers.channel import WorkerAnswer

HANDLERS: Final = (
    Admin, DirectoryRoutes, UsageReports, LimitsApi, ReplicaRoutes, RequestsApi, EnginesApi, Chats
)  # fmt: skip
"""Those whose tables a worker has."""
ERROR: Final = 400


def operation_at(method: str, path: str) -> Operation | None:
    """The operation that is asked for. None where there is none."""
    for pattern, methods in operations():
        if method in methods and pattern.fullmatch(path) is not None:
            return methods[method]
    return None


@cache
def operations() -> Sequence[tuple[Pattern[str], Mapping[str, Operation]]]:
    """All, by the patterns of their paths and by their methods. A table only names methods of its class, and
    so is read of the class."""
    tables: list[Table] = [vars(kind)["table"].fget(kind) for kind in HANDLERS]
    return [
        (pattern_of(path), {method: operation_of(handler) for method, handler in methods.items()})
        for table in tables
        for path, methods in table.items()
    ]


def asks_of(operation: Operation | None, *, shares_usage: bool) -> Asks:
    """The workers that are asked. `shares_usage` is true if every worker knows the usage of all."""
    asks = Asks.ONE if operation is None else operation.asks
    if asks is Asks.UNSHARED:
        return Asks.ONE if shares_usage else Asks.EVERY
    return asks


def together(
    answers: Mapping[int, WorkerAnswer], silent: Sequence[int], merges: Mapping[str, Merge]
) -> WorkerAnswer:
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
        values = {worker: part[name] for worker, part in parts.items() if part and name in part}
        whole[name] = _field(merges.get(name, Merge.FIRST), values)
    if silent:
        whole |= {"partial": True, "silent_workers": list(silent)}
    one = next(iter(answers.values()))
    return WorkerAnswer(one.status, one.headers, msgspec.json.encode(whole))


def _object(answer: WorkerAnswer) -> dict[str, Any] | None:
    """The fields of an answer of JSON; None of any other."""
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None


def _field(merge: Merge, values: Mapping[int, Any]) -> Any:
    match merge:
        case Merge.FIRST:
            return next(iter(values.values()))
        case Merge.SUM:
            return _sum(list(values.values()))
        case Merge.ANY:
            return any(values.values())
        case Merge.MOST:
            return max((value for value in values.values() if value is not None), default=None)
        case Merge.JOIN:
            return [{**entry, "worker": worker} for worker, entries in values.items() for entry in entries]
        case Merge.ROWS:
            return _rows([row for rows in values.values() for row in rows])


def _sum(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], dict):
        return sum(values)
    names = dict.fromkeys(name for counts in values for name in counts)
    return {name: sum(counts.get(name, 0) for counts in values) for name in names}


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of usage, those of the same tenant, key, model and day added up."""
    sums: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for row in rows:
        of = tuple((name, value) for name, value in row.items() if isinstance(value, str))
        before = sums.setdefault(of, {})
        for name, value in row.items():
            before[name] = before.get(name, 0) + value if isinstance(value, int) else value
    return [sums[of] for of in sorted(sums)]

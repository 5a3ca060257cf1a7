"""The workers that are asked what an operator asks, which stands at the operation
(`gateway.operators.operations`). What is asked is told by its method and its path, as a worker tells it. What
there is not, one worker refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from re import Pattern
from typing import Final

from gateway.operators.chats import Chats
from gateway.operators.engines import EnginesApi
from gateway.operators.key_uses import KeyUsesApi
from gateway.operators.keys import DirectoryRoutes
from gateway.operators.operations import Asks, Operation, Table, operation_of, pattern_of
from gateway.operators.overview import OverviewApi
from gateway.operators.replicas import ReplicaRoutes
from gateway.operators.requests import RequestsApi
from gateway.operators.server import Admin
from gateway.operators.stored import StoredApi
from gateway.operators.tenant_limits import LimitsApi
from gateway.operators.usage import UsageReports

HANDLERS: Final = (
    Admin, DirectoryRoutes, UsageReports, LimitsApi, ReplicaRoutes, RequestsApi, EnginesApi, Chats,
    OverviewApi, KeyUsesApi, StoredApi,
)  # fmt: skip
"""Those whose tables a worker has."""


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

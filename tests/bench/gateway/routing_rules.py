"""The rules that `python -m tests.bench routing` compares: the product's own, what others do, and an exact
index.

*home by name*: one home for all conversations of the session that a caller names, where ours has one for each
conversation of it. *index*: an exact index with perfect knowledge, which no deployment has: each request goes
where it is served first. *last report*: the least of what was reported last, without what a worker has sent
since: the herd that the others avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from msgspec.structs import replace

from gateway.routing import policy
from gateway.routing.policy import ReplicaChoice, RouteReason
from tests.bench.gateway.routing_world import TOKEN_MS, Fleet, Rule, Turn


def affinity(owners: int | None = None, *, by_name: bool = False) -> Rule:
    """The product's own rule. `by_name`: with one home for all conversations of a session."""

    def choose(turn: Turn, fleet: Fleet, worker: int) -> ReplicaChoice:
        request = replace(turn.affinity, session=turn.named_key) if by_name else turn.affinity
        choice = policy.choose(fleet.table, fleet.loads(worker), request, owners, fleet.usable)
        assert choice is not None
        return choice

    return choose


def round_robin() -> Rule:
    turns = count()
    return lambda turn, fleet, _: ReplicaChoice(
        next(turns) % len(fleet.free_ms), RouteReason.LOAD, turn.prompt
    )


def least_load() -> Rule:
    def choose(turn: Turn, fleet: Fleet, worker: int) -> ReplicaChoice:
        return ReplicaChoice(_least(fleet, fleet.loads(worker)), RouteReason.LOAD, turn.prompt)

    return choose


def last_report() -> Rule:
    def choose(turn: Turn, fleet: Fleet, _: int) -> ReplicaChoice:
        return ReplicaChoice(_least(fleet, fleet.told), RouteReason.LOAD, turn.prompt)

    return choose


def random_of_two() -> Rule:
    def choose(turn: Turn, fleet: Fleet, worker: int) -> ReplicaChoice:
        loads = fleet.loads(worker)
        replica = min(fleet.random.sample(range(len(loads)), 2), key=loads.__getitem__)
        return ReplicaChoice(replica, RouteReason.LOAD, turn.prompt)

    return choose


def exact_index() -> Rule:
    """Where the first token comes first: the best of those that hold the conversation, of those that hold
    the prefix, and of all."""

    def choose(turn: Turn, fleet: Fleet, _: int) -> ReplicaChoice:
        free_ms, now_ms = fleet.free_ms, fleet.now_ms
        prefix, session = turn.cached_as
        best = free_ms.index(min(free_ms))
        candidates = {best, *fleet.holders.get(session, ())}
        if holders := fleet.holders.get(prefix):
            candidates.add(min(holders, key=free_ms.__getitem__))

        def first_token_ms(replica: int) -> float:
            return max(free_ms[replica], now_ms) + TOKEN_MS * (turn.prompt - fleet.hit(replica, turn))

        return ReplicaChoice(min(candidates, key=first_token_ms), RouteReason.AFFINITY, turn.prompt)

    return choose


def _least(fleet: Fleet, loads: Sequence[int]) -> int:
    least = min(loads)
    return fleet.random.choice([i for i, load in enumerate(loads) if load == least])


RULES: Final[dict[str, Callable[[], Rule]]] = {
    "own": affinity,
    "index": exact_index,
    "round robin": round_robin,
    "least load": least_load,
    "random of two": random_of_two,
    "last report": last_report,
    "two owners": lambda: affinity(2),
    "home by name": lambda: affinity(by_name=True),
}
BLIND: Final = frozenset({"index", "round robin"})
"""Those that do not look at reports."""

"""What came of an agent's session: its turns, as both services logged them, and whether they kept the prefix.

A turn is a request with tools that has the order in it; all others are from beside the session, such as
titles. The prefix is kept where a turn found in the cache all of the prompt of the turn before, but what
begins its answer, as far as it fills pages: `cached >= before - opening - page`. The first turn of an order
is not held to it: the agent is another process then, which may tell its model other things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tests.agents.recorder import Exchange
from tests.agents.stage import PAGE_SIZE, Guest, Run, Stage
from tests.agents.task import FILE
from tests.services import Line, until

SAID_LEN_MAX: Final = 300
"""Characters of an error that are told."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a session, by the engine's line."""

    request_id: str
    order: int
    messages: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_ms: float
    keeps: bool | None
    """Whether it kept the prefix; None for the first of an order."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a session."""

    scene: str
    agent: str
    version: str
    api: str
    template: str
    done: list[bool]
    """Of each order: whether the file was changed, it was run, and its sum printed."""
    seconds: list[float]
    turns: list[Turn]
    beside: int
    """Requests from beside the session."""
    faults: list[str]
    """Everything that is not as it should be, one line each."""
    chats: int = 0
    """The chats of another tenant that ended meanwhile."""
    chat_gap_p99_ms: float | None = None


def outcome(scene: str, stage: Stage, guest: Guest, runs: Sequence[tuple[Run, bool]]) -> Outcome:
    """Of a session that has ended."""
    asked = guest.recorder.exchanges
    lines = engine_lines(stage, asked)
    turns = list[Turn]()
    for exchange in filter(is_turn, asked):
        order = sum(made.began_s <= exchange.at_s for made, _ in runs) - 1
        before = turns[-1] if turns and turns[-1].order == order else None
        turns.append(_turn(exchange, lines[exchange.request_id], order, before, stage.opening_len))
    return Outcome(
        scene=scene,
        agent=guest.agent.name,
        version=guest.agent.version,
        api=guest.agent.api,
        template=stage.template,
        done=[is_done for _, is_done in runs],
        seconds=[round(made.seconds, 1) for made, _ in runs],
        turns=turns,
        beside=len(asked) - len(turns),
        faults=[
            *(fault for each in asked for fault in _faults(each, lines.get(each.request_id))),
            *mischarged(stage),
            *(f"order {number}: not done" for number, (_, is_done) in enumerate(runs) if not is_done),
            *(f"turn {number}: not kept" for number, turn in enumerate(turns) if turn.keeps is False),
        ],
    )


def is_turn(exchange: Exchange) -> bool:
    return exchange.status == 200 and bool(exchange.json.get("tools")) and FILE in exchange.body.decode()


def engine_lines(stage: Stage, asked: Iterable[Exchange]) -> Mapping[str, Line]:
    """The engine's completed lines by request, once both services have written those of all answers."""
    wanted = {each.request_id for each in asked if each.status == 200 and each.method == "POST"}
    for log in (stage.engine, stage.gateway):
        until(lambda log=log: wanted <= {line["request_id"] for line in log.completed})  # type: ignore[misc]
    return {line["request_id"]: line for line in stage.engine.completed}


def mischarged(stage: Stage) -> list[str]:
    """The requests so far that were charged anything but what the engine began and answered."""
    settled = {line["request_id"]: line["settled_tokens"] for line in stage.gateway.completed}
    return [
        f"{line['endpoint']}: charged {settled[line['request_id']]}, computed {computed}"
        for line in stage.engine.completed
        if line["request_id"] in settled
        if (computed := line.get("prompt_tokens", 0) + line.get("completion_tokens", 0))
        != settled[line["request_id"]]
    ]


def _turn(exchange: Exchange, line: Line, order: int, before: Turn | None, opening_len: int) -> Turn:
    body, cached = exchange.json, line["cached_tokens"]
    return Turn(
        request_id=exchange.request_id,
        order=order,
        messages=len(body.get("messages") or body.get("input") or []),
        prompt_tokens=line["prompt_tokens"],
        cached_tokens=cached,
        completion_tokens=line["completion_tokens"],
        total_ms=line["total_ms"],
        keeps=None if before is None else cached >= before.prompt_tokens - opening_len - PAGE_SIZE,
    )


def _faults(exchange: Exchange, line: Line | None) -> list[str]:
    where = f"{exchange.method} {exchange.path.partition('?')[0]}"
    if exchange.status != 200:
        return [f"{where}: {exchange.status} {exchange.answer[:SAID_LEN_MAX].decode(errors='replace')}"]
    if not exchange.is_whole or (line is not None and line["end_reason"] != "ok"):
        return [f"{where}: cut off, {'' if line is None else line['end_reason']}"]
    return []

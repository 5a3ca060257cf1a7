"""The tokens charged are those computed, in whatever way a request ends: random histories.

Every run draws 400 of them, a sixth of a batch that meets every end which `MET` lists; `DRAWN=whole` draws
10,000 (`tests.effort`), two minutes more.

A world that breaks a law is replayed, with all that was logged of the request, by

    python -m tests.histories SEED [REQUEST]
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.effort import drawn
from tests.engine.api.tiny import write_model_dir
from tests.histories.draw import End, Trouble, draw_setting
from tests.histories.laws import check
from tests.histories.world import Line, Remains, run_world

BATCHES: Final = drawn(1, whole=4)
WORLDS: Final = drawn(4, whole=25)
"""Worlds of a batch."""
REQUESTS: Final = 100
"""Requests of a world."""
assert drawn(400, whole=10_000) <= BATCHES * WORLDS * REQUESTS

MET: Final = {
    "cost: learnt": 1_000,
    "cost: reserved": 30,
    "cost: nothing": 400,
    "preemption": 100,
    "prefix hit": 1_000,
    "uncharged: late": 100,
    "uncharged: preempted": 1_000,
    "uncharged: choice": 100,
    "uncharged: draft": 100,
    **{f"drafted beside {name}": 10 for name in ("stop", "n", "echo", "logprobs", "prediction", "stream")},
    "embeddings: ok": 50,
    "embeddings: client_cancel": 1,
    "decisions: ok": 30,
    "decisions: client_cancel": 1,
    "predicted": 100,
    "mispredicted": 100,
    "asked again elsewhere": 10,
    "ended in connect": 1,
    "ended by drain": 1,
    "gateway: ok in relay, stream": 300,
    "gateway: ok in relay, unary": 300,
    "gateway: client_cancel in body, unary": 30,
    "gateway: client_cancel in tokenize, stream": 2,
    "gateway: client_cancel in wait, stream": 30,
    "gateway: client_cancel in wait, unary": 30,
    "gateway: client_cancel in relay, stream": 50,
    "gateway: aborted in wait, stream": 5,
    "gateway: aborted in wait, unary": 5,
    "gateway: aborted in relay, stream": 3,
    "gateway: key_revoked in wait, stream": 3,
    "gateway: key_revoked in wait, unary": 5,
    "gateway: key_revoked in relay, stream": 2,
    "gateway: first_token_timeout in wait, stream": 5,
    "gateway: inter_token_timeout in relay, stream": 1,
    "gateway: total_timeout in wait, unary": 2,
    "gateway: slow_client in relay, stream": 5,
    "gateway: queue_timeout in wait, stream": 2,
    "gateway: queue_timeout in wait, unary": 2,
    "gateway: request_timeout in wait, stream": 2,
    "gateway: request_timeout in wait, unary": 3,
    "gateway: engine_failed in wait, stream": 5,
    "gateway: engine_failed in wait, unary": 5,
    "gateway: engine_failed in relay, stream": 5,
    "ended by upstream_failed": 5,
    "gateway: refused in seat, unary": 2,
    "gateway: refused in body, unary": 3,
    "gateway: refused in validate, unary": 3,
    "gateway: refused in tenant, stream": 2,
    "gateway: refused in tokenize, unary": 2,
    "gateway: refused in route, stream": 5,
    "gateway: refused in route, unary": 5,
    "engine: aborted": 5,
    "engine: client_cancel in queue": 30,
    "engine: client_cancel in prefill": 2,
    "engine: client_cancel in decode": 50,
    "engine: slow_client": 2,
    "engine: queue_timeout": 5,
    "engine: request_timeout": 5,
    "engine: engine_failed": 20,
    "engine: refused": 20,
    "engine: drain": 1,
    **{f"drawn: {end}": 10 for end in End},
    **{str(trouble): 1 for trouble in Trouble},
}
"""The least number of each in a batch: a law that holds where nothing happens proves nothing."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_tokens_charged_are_those_computed_and_no_object_is_leaked(batch: int, model_dir: Path) -> None:
    met = Counter[str]()
    for seed in range(batch * WORLDS, (batch + 1) * WORLDS):
        remains = run_world(draw_setting(seed, REQUESTS), model_dir)
        try:
            met += check(remains)
        except AssertionError as error:
            raise AssertionError(f"python -m tests.histories {seed}: {error}") from error
    rare = {name: met[name] for name, least in MET.items() if met[name] < least // drawn(16, whole=1)}
    assert not rare, f"met too rarely: {rare}"


def test_a_seed_replays_its_world(remains: Remains, model_dir: Path) -> None:
    def told(remains: Remains) -> Counter[tuple[object, ...]]:
        names = (
            "request_id",
            "end_reason",
            "stage",
            "events",
            "reserved_tokens",
            "settled_tokens",
            "total_ms",
        )
        return Counter(tuple(line.get(name) for name in names) for line in remains.gateway_lines)

    assert told(run_world(draw_setting(1, REQUESTS), model_dir)) == told(remains)


@pytest.fixture(scope="module")
def remains(model_dir: Path) -> Remains:
    return run_world(draw_setting(1, REQUESTS), model_dir)


@pytest.mark.parametrize("error", [-1, 1])
def test_a_charge_that_is_off_by_one_token_is_found(remains: Remains, error: int) -> None:
    line = next(line for line in remains.gateway_lines if line["settled_tokens"] > 1)
    line["settled_tokens"] += error
    try:
        with pytest.raises(AssertionError, match="charged is neither"):
            check(remains)
    finally:
        line["settled_tokens"] -= error
    check(remains)


@pytest.mark.parametrize("error", [-1, 1])
def test_a_late_token_that_is_not_named_is_found(remains: Remains, error: int) -> None:
    remains.uncharged["late"] += error
    try:
        with pytest.raises(AssertionError, match="neither charged nor named"):
            check(remains)
    finally:
        remains.uncharged["late"] -= error


def test_a_token_that_is_under_way_and_not_told_is_found(remains: Remains) -> None:
    line = next(
        line for line in remains.engine_lines if line["end_reason"] == "client_cancel" and charged(line)
    )
    told = [line, *(one for one in remains.gateway_lines if one["request_id"] == line["request_id"])]
    for one in told:
        one["completion_tokens"] -= 1
    told[1]["settled_tokens"] -= 1
    with pytest.raises(AssertionError, match="what is told is not what was computed"):
        check(remains)
    for one in told:
        one["completion_tokens"] += 1
    told[1]["settled_tokens"] += 1


def charged(line: Line) -> int:
    """The generated tokens that a line tells of."""
    return int(line.get("completion_tokens", 0))


def test_a_log_line_that_is_missing_or_written_twice_is_found(remains: Remains) -> None:
    line = next(line for line in remains.gateway_lines if line["settled_tokens"] > 1)
    remains.gateway_lines.remove(line)
    with pytest.raises(AssertionError, match=line["request_id"]):
        check(remains)
    remains.gateway_lines += [line, line]
    with pytest.raises((AssertionError, ValueError)):
        check(remains)
    remains.gateway_lines.remove(line)
    check(remains)

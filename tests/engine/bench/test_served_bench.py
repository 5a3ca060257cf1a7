"""The judging of a long prompt beside streams, and of one with a deadline."""

from __future__ import annotations

import random

import pytest

from engine.config import EngineConfig
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.engine import interference, served
from tests.bench.engine.interference import REFUSED_AT_ONCE_S, Beside, Ending, ending
from tests.bench.engine.load import BenchFailed, Server
from tests.bench.figures import Figure


def judged(figures: list[Figure]) -> list[bool | None]:
    return [figure.ok for figure in figures if figure.target is not None]


@pytest.mark.parametrize(
    ("seen", "oks"),
    [
        # gaps of 10 ms leave the prompt nine tenths of a gap target of 100 ms
        (Beside(4000, 10.0, 12.0, 99.0, 1172.0, 900.0), [True, True]),
        (Beside(4000, 10.0, 12.0, 101.0, 1174.0, 900.0), [False, False]),
        # with gaps of 80 ms it has half of the time
        (Beside(4000, 80.0, 85.0, 169.0, 20_000.0, 10_000.0), [True, True]),
        (Beside(4000, 80.0, 85.0, 171.0, 23_300.0, 10_000.0), [False, False]),
    ],
)
def test_a_prompt_beside_streams_is_judged_by_the_part_of_the_time_that_it_has(
    seen: Beside, oks: list[bool]
) -> None:
    assert judged(served.beside_figures("", seen, judged=True)) == oks
    assert judged(served.beside_figures("against, ", seen, judged=False)) == []


@pytest.mark.parametrize(
    ("takes_s", "streams_end_at", "done"), [(0.3, 9, 4), (2.0, 9, 1), (0.3, 2, 1), (0.3, 3, 2), (0.3, 1, 1)]
)
async def test_short_prompts_are_repeated_while_all_streams_run(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, streams_end_at: int, done: int
) -> None:
    stream, sent = TimedRequest(0.0), 0

    async def prompt(server: Server, rng: random.Random, prompt_len: int) -> TimedRequest:
        nonlocal sent
        sent += 1
        if sent == streams_end_at:
            stream.ended_at = 1.0
        return TimedRequest(5.0, event_times=[5.0 + takes_s])

    monkeypatch.setattr(interference, "_prompt", prompt)
    monkeypatch.setattr(interference, "PAUSE_S", 0.0)
    found = await interference._prompts(
        Server("", ApiServer("http://none"), "m"), random.Random(1), 9, [stream]
    )
    assert len(found) == done
    assert interference._first_ms(found) == pytest.approx(1e3 * takes_s)


def test_a_prompt_with_a_deadline_is_answered_in_time_or_refused_at_once() -> None:
    endings = [
        Ending(10.0, 0.9 * REFUSED_AT_ONCE_S, is_refused=True),
        Ending(16.0, 10.0, is_refused=True),
        Ending(26.0, 25.0, is_refused=False),
    ]
    figures = served.deadline_figures(endings)
    assert judged(figures) == [True, False, True]
    assert [figure.name for figure in figures if "refused" in figure.name] == [
        "8 streams: a prompt with 0.5 of its time, refused after",
        "8 streams: a prompt with 0.8 of its time, refused after",
    ]


def test_a_refusal_for_the_deadline_is_told_from_a_failure() -> None:
    in_time = TimedRequest(5.0, event_times=[7.5], ended_at=8.0)
    assert ending(in_time, 3.0) == Ending(3.0, 2.5, is_refused=False)
    told = b'{"error":{"code":"first_token_deadline"}}'
    for late in (
        TimedRequest(5.0, ended_at=5.25, body=told, error="HTTP 503"),
        TimedRequest(5.0, event_times=[5.2], ended_at=5.25, last_event=b"data: " + told, error="no [DONE]"),
    ):
        assert ending(late, 3.0) == Ending(3.0, 0.25, is_refused=True)
    with pytest.raises(BenchFailed, match="connection lost"):
        ending(TimedRequest(5.0, ended_at=6.0, error="connection lost"), 3.0)


def test_the_bench_knows_the_defaults_of_the_engine() -> None:
    engine = EngineConfig("model")
    assert (engine.gap_target_ms, engine.prompt_share) == (served.GAP_TARGET_MS, served.PROMPT_SHARE)

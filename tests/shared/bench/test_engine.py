"""What the bench of engines makes of the times that it took, and the figures of all benches."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys

import pytest

from tests.bench.client import ApiServer, TimedRequest
from tests.bench.engine import served as engine
from tests.bench.engine.load import BenchFailed, Load, Sample, Server, alone, token_times
from tests.bench.engine.served import TOKENS_TARGET
from tests.bench.engine.turns import ASKED_LEN, TURNS, Conversation, turns
from tests.bench.figures import Target, at_least, at_most, exit_code, figure, quantile

USAGE = b'data: {"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}}'


def exchange(*times: float, tokens: int) -> TimedRequest:
    return TimedRequest(sent_at=1.0, event_times=list(times), last_event=USAGE % tokens)


def test_events_that_bring_no_token_are_no_gaps() -> None:
    assert token_times(exchange(1.5, 1.6, 1.8, 1.8, 1.8, tokens=3)) == [1.5, 1.6, 1.8]


def test_events_that_bring_several_tokens_are_all_counted() -> None:
    assert token_times(exchange(1.5, 1.6, tokens=8)) == [1.5, 1.6]


def test_a_sample_grows_by_pieces() -> None:
    sample = Sample()
    sample.add([exchange(1.5, 1.6, 1.6, tokens=2)], elapsed_s=1.0)
    sample.add([exchange(1.25, 1.75, 1.75, tokens=2)], elapsed_s=3.0)
    assert sample.tokens_per_s == 1.0
    assert sample.first_ms == pytest.approx([500, 250])
    assert sample.gaps_ms == pytest.approx([100, 500])


def test_no_prompt_comes_twice_and_a_seed_makes_the_same() -> None:
    load = Load(streams=4, rounds=3, prompt_len=20, output_len=1)
    prompts = load.prompts(random.Random(5))
    assert len({tuple(prompt) for stream in prompts for prompt in stream}) == 12
    assert prompts == load.prompts(random.Random(5))


async def test_servers_take_turns_and_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    async def measure(server: Server, load: Load, rng: random.Random, into: Sample) -> None:
        measured.append(server.name)
        into.add([exchange(1.1, 1.2, tokens=2)], elapsed_s=1.0 if server.name == "" else 2.0)

    monkeypatch.setattr(engine, "measure", measure)
    servers = [Server(name, ApiServer("http://h"), "m") for name in ("", "against, ")]
    figures = await engine._in_turns(servers, Load(1, 1, 1, 2), 3, random.Random(0))
    assert measured == ["", "against, "] * 3
    [ratio] = [figure for figure in figures if figure.name == "1 stream: output, ratio"]
    assert (ratio.value, ratio.target, ratio.ok) == (2.0, str(TOKENS_TARGET), True)
    assert len(figures) == 15


async def test_conversations_go_on_with_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def go_on(self: Conversation, server: Server, asked: list[int]) -> None:
        self.tokens += [*asked, 7]
        seen.append(len(self.tokens))
        self.first_ms.append(2.0 if server.name == "" else 1.0)
        self.computed_len.append(len(asked))

    monkeypatch.setattr(Conversation, "go_on", go_on)
    servers = [Server(name, ApiServer("http://h"), "m") for name in ("", "against, ")]
    figures = await turns(servers, random.Random(0))
    assert seen == [turn * (ASKED_LEN + 1) for turn in range(1, TURNS + 1) for _ in servers]
    assert (figures[-1].value, figures[-1].ok) == (2.0, False)


def test_servers_are_stopped_while_it_is_not_their_turn() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        measured, other = (
            Server(name, ApiServer("http://h"), "m", pids) for name, pids in (("", ()), ("b", (waiting.pid,)))
        )
        with contextlib.suppress(BenchFailed), alone(measured, [measured, other]):
            assert os.WIFSTOPPED(os.waitpid(waiting.pid, os.WUNTRACED)[1])
            raise BenchFailed
        assert os.WIFCONTINUED(os.waitpid(waiting.pid, os.WCONTINUED)[1])
        waiting.communicate(b"\n")


@pytest.mark.parametrize(
    ("target", "value", "ok"),
    [
        (at_most(15), 15, True),
        (at_most(15), 15.01, False),
        (at_least(2), 2, True),
        (at_least(2), 1.99, False),
    ],
)
def test_a_target_is_met_at_its_bound(target: Target, value: float, ok: bool) -> None:
    assert figure("f", value, "us", target).ok is ok


def test_only_a_figure_that_falls_short_fails_the_check() -> None:
    good, told, short = (
        figure("a", 1, "ms", at_most(2)),
        figure("b", 9, "ms"),
        figure("c", 3, "ms", at_most(2)),
    )
    assert exit_code([good, told], check=True) == 0
    assert exit_code([good, short], check=False) == 0
    assert exit_code([good, short], check=True) == 1


def test_nan_meets_no_target() -> None:
    assert figure("f", math.nan, "ms", at_most(1)).ok is False


def test_quantile_by_nearest_rank() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(100), 0.99) == 99
    assert math.isnan(quantile([], 0.5))

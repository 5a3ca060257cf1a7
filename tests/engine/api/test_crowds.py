"""Requests of a crowd: those that are refused cost little, and those that end together end in turns."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from engine.api.ask import asking
from engine.api.ask.admission import Choice, plan_choices
from engine.api.ask.engine_state import IN_ONE_TURN
from engine.api.http import generate
from engine.api.http.generate import Generation
from tests.engine.api.conftest import Serve, Served, until

CROWD = 24


def ask(served: Served, tenant: str, *, stream: bool = False) -> asyncio.Task[httpx.Response]:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "stream": stream}
    headers = {"x-penstock-tenant": tenant}
    return asyncio.create_task(served.http.post("/v1/completions", json=body, headers=headers))


class Turns:
    """Counts the turns of the loop, and notes in which of them a tenant's answer ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = 0
        self.ended: list[tuple[int, str]] = []
        settle = Generation._settle

        def noted(generation: Generation) -> None:
            self.ended.append((self.turn, generation._exchange.tenant))
            settle(generation)

        monkeypatch.setattr(Generation, "_settle", noted)

    def count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_end_together_end_in_turns_of_their_tenants(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    turns = Turns(monkeypatch)
    async with serve(max_queue_len=100, max_num_seqs=100) as served:
        served.core.is_held = True
        served.says("x")
        crowd = [ask(served, "crowd", stream=stream) for _ in range(CROWD)]
        await until(lambda: served.engine.state.core.live == CROWD)
        victim = ask(served, "victim", stream=stream)
        await until(lambda: served.engine.state.core.live == CROWD + 1)
        turns.count()
        served.core.release()
        answers = await asyncio.gather(victim, *crowd)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text.count("[DONE]") for answer in answers}) == 1
        served.assert_nothing_leaks()
    assert max(Counter(turn for turn, _ in turns.ended).values()) == IN_ONE_TURN
    order = [tenant for _, tenant in turns.ended]
    assert len(order) == CROWD + 1
    assert order.index("victim") <= 2


async def test_nothing_is_made_for_requests_that_find_the_queue_full(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Generation]()

    def make(*arguments: object) -> Generation:
        made.append(Generation(*arguments))  # type: ignore[arg-type]
        return made[-1]

    planned = list[object]()

    def plan(*arguments: object) -> list[Choice]:
        planned.append(arguments)
        return plan_choices(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(generate, "Generation", make)
    monkeypatch.setattr(asking, "plan_choices", plan)
    async with serve(max_queue_len=8) as served:
        served.core.admits = False
        served.says("x")
        crowd = [ask(served, "crowd") for _ in range(CROWD)]
        await until(lambda: sum(task.done() for task in crowd) == CROWD - 6)
        assert len(made) == len(planned) == 6
        served.core.admits = True
        served.core.release()
        statuses = Counter([(await task).status_code for task in crowd])
        assert statuses == {200: 6, 503: CROWD - 6}
        served.assert_nothing_leaks()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"340": 1}}, "logit_bias"),
        ({"stop_token_ids": [340]}, "stop_token_ids"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
    ],
)
async def test_what_is_wrong_whatever_the_prompt_is_refused_before_it_is_tokenized(
    served: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], param: str
) -> None:
    monkeypatch.delattr(asking, "pieces_of")
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "Once", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

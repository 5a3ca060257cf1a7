"""Requests of a crowd: those that are refused cost little, and those that end together end in turns."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from engine.api.answer.exchange import EngineExchange
from engine.api.answer.outputs import RequestOutput
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


async def test_others_run_between_the_steps_of_a_request_of_many_inputs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two of what goes through all of its inputs are done in one turn of the loop, and each piece of its
    answer is written in a turn of its own."""
    turns = Turns(monkeypatch)
    done = list[tuple[str, int]]()

    def note(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def noted(*given: object) -> object:
            done.append((name, turns.turn))
            return original(*given)

        monkeypatch.setattr(owner, name, noted)

    note(asking, "plan_vectors")
    for name in ("_make_encoder", "_submit", "_settle"):
        note(Generation, name)
    note(RequestOutput, "finish_one")
    note(EngineExchange, "write")
    given = [[at % 300] for at in range(generate.CROWD + 1)]
    async with serve(core={"vector_len": 128}, embeddings="mean") as served:
        turns.count()
        answer = await served.http.post("/v1/embeddings", json={"model": "tiny", "input": given})
        assert len(answer.json()["data"]) == len(given)
        served.assert_nothing_leaks()
    ended = max(turn for name, turn in done if name == "finish_one")  # then the deltas are taken
    steps = [turn for name, turn in done if name != "finish_one"]
    assert len(set(steps)) == len(steps) >= 7, done
    assert steps[3] > ended + 1, "they are taken and settled in one turn"


async def test_a_request_of_many_inputs_that_is_aborted_before_the_core_has_it_costs_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_run = Generation._let_others_run

    async def aborted(generation: Generation) -> None:
        generation.abort()
        await others_run(generation)

    monkeypatch.setattr(Generation, "_let_others_run", aborted)
    async with serve(core={"vector_len": 4}, embeddings="mean") as served:
        given = [[7]] * (generate.CROWD + 1)
        answer = await served.http.post("/v1/embeddings", json={"model": "tiny", "input": given})
        assert answer.json()["error"]["code"] == "request_aborted"
        assert not served.core.asked
        served.assert_nothing_leaks()


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

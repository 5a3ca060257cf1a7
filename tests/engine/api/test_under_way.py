"""What the core has under way for a request when it ends: charged where the caller ended it, else named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import engine.api.http.generate
from engine.contract.messages import FinishReason, StepOutput
from tests.engine.api import apis
from tests.engine.api.apis import Api, each_api
from tests.engine.api.conftest import MODEL, PATIENCE_S, Served, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def uncharged(served: Served, reason: str) -> float:
    return served.engine.state.metrics.uncharged_tokens.value(reason)


def late_tokens(served: Served) -> float:
    return uncharged(served, "late")


@asynccontextmanager
async def left(served: Served, *, steps: int, api: Api = apis.CHAT, **fields: Any) -> AsyncIterator[None]:
    """A context in which a client has left after so many steps, and the core has only heard of it."""
    core = served.core
    served.says("the quick brown fox", ends=False)
    core.is_held, core.heeds_aborts = True, False
    task = asyncio.create_task(served.http.post(api.path, json={**api.asked, **fields}))
    await until(lambda: bool(core.added))
    for _ in range(steps):
        core.step()
    await until(core._messages.empty)
    task.cancel()
    await until(lambda: len(core.aborted) == len(core.added))
    yield
    await until(lambda: not served.engine.state._working)
    served.assert_nothing_leaks()


@pytest.mark.parametrize("streams", [True, False])
@each_api
async def test_a_client_that_leaves_is_charged_for_what_the_core_had_under_way(
    served: Served, lines: list[dict[str, Any]], api: Api, streams: bool
) -> None:
    async with left(served, steps=2, api=api, stream=streams, **api.choices):
        served.core.step()
        assert lines == [], "the core has not said the last of it"
        served.core.finish(1, FinishReason.ABORTED, late_tokens=1)
        if api.count > 1:
            served.core.finish(2, FinishReason.ABORTED)
    [line] = lines
    assert (line["end_reason"], line["completion_tokens"]) == ("client_cancel", api.count * 3 + 1)
    assert late_tokens(served) == 0


async def test_a_client_that_leaves_a_request_that_has_failed_changes_no_charge(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    core = served.core
    served.says("the quick", ends=False)
    core.is_held, core.heeds_aborts = True, False
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json={**CHAT, "n": 2}))
    await until(lambda: len(core.added) == 2)
    core.step()
    core.finish(1, FinishReason.NUMERIC)
    await until(lambda: core.aborted == [2])
    task.cancel()
    await until(lambda: task.done())
    await until(lambda: bool(lines) or any(one.cancelling() for one in asyncio.all_tasks()))
    core.step()
    core.finish(2, FinishReason.ABORTED)
    await until(lambda: bool(lines))
    assert lines[0]["completion_tokens"] == 3


@each_api
@pytest.mark.parametrize("streams", [True, False])
async def test_a_prompt_that_began_unheard_is_charged(
    served: Served, lines: list[dict[str, Any]], api: Api, streams: bool
) -> None:
    async with left(served, steps=0, api=api, stream=streams, **{api.maximum: 9}):
        served.core.step()
        served.core.finish(1, FinishReason.ABORTED)
    [line] = lines
    assert line["prompt_tokens"] == len(served.core.added[0].prompt_ids)
    assert line["completion_tokens"] == 1


@each_api
async def test_a_sequence_that_ends_by_itself_meanwhile_is_charged_to_its_end(
    served: Served, lines: list[dict[str, Any]], api: Api
) -> None:
    async with left(served, steps=1, api=api, **{api.maximum: 3}):
        served.core.step()
        served.core.step()
    [line] = lines
    assert (line["end_reason"], line["completion_tokens"]) == ("client_cancel", 3)


async def test_a_request_without_an_answer_is_charged_for_none(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    core = served.core
    core.script = lambda _: []
    core.heeds_aborts = False
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 0, "echo": True}
    task = asyncio.create_task(served.http.post("/v1/completions", json=fields))
    await until(lambda: bool(core.running))
    task.cancel()
    await until(lambda: core.aborted == [1])
    core.finish(1, FinishReason.ABORTED)
    await until(lambda: bool(lines))
    assert (lines[0]["prompt_tokens"] > 0, lines[0]["completion_tokens"]) == (True, 0)


async def test_a_core_that_does_not_say_is_waited_for_no_longer_than_a_gateway_waits(
    served: Served, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.api.http.generate, "UNDER_WAY_S", 0.0)
    async with left(served, steps=2):
        await until(lambda: bool(lines))
    assert lines[0]["completion_tokens"] == 2
    served.core.step()
    served.core.finish(1, FinishReason.ABORTED, late_tokens=1)
    await until(lambda: late_tokens(served) == 2)


async def test_an_error_of_the_core_ends_the_wait(served: Served, lines: list[dict[str, Any]]) -> None:
    async with left(served, steps=2):
        served.core.die()
    assert (lines[0]["end_reason"], lines[0]["completion_tokens"]) == ("client_cancel", 2)


@pytest.mark.parametrize("reason", [FinishReason.STALLED, FinishReason.NUMERIC])
async def test_a_token_is_charged_where_the_caller_ended_the_sequence(
    served: Served, lines: list[dict[str, Any]], reason: FinishReason
) -> None:
    served.says("the", ends=False)
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT))
    await until(lambda: any(row.sent for row in served.core.running.values()))
    served.core.finish(1, reason, late_tokens=1)
    await asyncio.wait_for(task, PATIENCE_S)
    charged = reason.is_callers
    assert charged == (reason is FinishReason.STALLED)
    assert (lines[0]["completion_tokens"], late_tokens(served)) == (1 + charged, 1 - charged)


async def test_tokens_behind_a_stop_string_are_named(served: Served, lines: list[dict[str, Any]]) -> None:
    core = served.core
    served.says("the quick brown fox", ends=False)
    core.is_held, core.heeds_aborts = True, False
    body = {**CHAT, "stop": "the"}
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
    await until(lambda: bool(core.added))
    core.step()
    answer = (await asyncio.wait_for(task, PATIENCE_S)).json()
    core.step()
    core.finish(1, FinishReason.ABORTED, late_tokens=1)
    await until(lambda: late_tokens(served) == 2)
    assert answer["usage"]["completion_tokens"] == lines[0]["completion_tokens"] == 1


async def test_tokens_of_one_step_behind_a_stop_string_are_named(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    """A step that verified drafts brings several tokens of a sequence; none behind the stop string is
    charged."""
    core = served.core
    served.says("the quick brown fox", ends=False)
    core.is_held, core.heeds_aborts = True, False
    body = {**CHAT, "stop": " quick"}
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
    await until(lambda: bool(core.added))
    core.step()
    rest = core.running[1].script[1:]
    core.say(StepOutput(1, [1] * len(rest), rest, [], [], [], [], core._stats()))
    answer = (await asyncio.wait_for(task, PATIENCE_S)).json()
    assert answer["choices"][0]["message"]["content"] == "the"
    charged = answer["usage"]["completion_tokens"]
    assert lines[0]["completion_tokens"] == charged
    assert late_tokens(served) == 1 + len(rest) - charged > 0

"""Scenes of requests that take long: the first line of `why` names the cause, whichever service has it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from gateway.routing.health import SAMPLES_MIN, SILENT_MIN
from tests.histories.world import until
from tests.scenes.stage import Setting, SlowPool, Stage, Told, play
from tests.scenes.test_scenes import causes, gateway_line, model_dir, says, until_any_runs

__all__ = ["model_dir"]

ENGINE = r"127\.0\.0\.1:\d+"


def first(told: Told, request_id: str) -> str:
    return told.why(request_id)[0].text


def named(told: Told, pattern: str, request_id: str = "asked") -> None:
    texts = [one.text for one in told.why(request_id)]
    assert texts, "no reason is told"
    assert re.match(pattern, texts[0]), "\n".join(texts)
    assert re.search(rf"^  why      {pattern}", told.trace(request_id), re.MULTILINE)


def test_a_client_that_does_not_read_is_told_from_a_slow_engine(model_dir: Path) -> None:
    """The engine is done long before: what it computed is no reason."""

    async def scene(stage: Stage) -> None:
        slow = await stage.ask("asked", max_tokens=600)
        await slow.until_event(2)
        slow.transport.pause_reading()
        await stage.wait(12.0)
        slow.transport.resume_reading()
        await slow.until_over()

    told = play(scene, Setting(), model_dir)
    named(
        told, r"(9|1[012])(\.\d)? s: the client did not read its answer \(the gateway's buffers were full\)"
    )
    assert not [one for one in told.why("asked") if "stalled" in one.text], "it is told once"
    says(causes(told, "asked"), r"stalled (9|1[012])(\.\d)? s: this client did not read")
    [row] = [row.split() for row in told.trace("asked").splitlines() if row.startswith("  client")]
    assert row[1] == "blocked"
    assert float(row[3]) == gateway_line(told, "asked").blocked_ms
    assert float(row[2]) + float(row[3]) == pytest.approx(12_000.0, abs=500.0), (
        "it ends as the client reads on"
    )


def test_a_replica_that_does_not_accept_a_connection(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.part(0)
        stage.part(1)
        asked = await stage.ask("asked", max_tokens=2)
        await stage.wait(1.0)
        stage.heal(1)
        stage.heal(0)
        await asked.until_over()

    told = play(scene, Setting(engines=2, timeouts={"connect_s": 5.0}), model_dir)
    line = gateway_line(told, "asked")
    assert (line.status, line.attempts) == (200, 2)
    named(told, rf"5 s: {ENGINE} did not accept a connection")
    [failed] = line.failed_attempts or ()
    assert (failed.takes_ms, failed.connect_ms) == (5000.0, None)
    rows = [row.split() for row in told.trace("asked").splitlines() if row.startswith("  gateway  connect")]
    assert [row[3] for row in rows] == ["5000.000", rows[1][3]], "each has a bar"
    assert float(rows[0][2]) < 100.0
    assert float(rows[1][2]) >= 5000.0


def test_a_replica_that_breaks_off(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        for core in stage.cores:
            core.hangs_s = 3.0
        asked = await stage.ask("asked", max_tokens=2)
        await until_any_runs(stage)
        await stage.wait(2.0)
        index = next(at for at, core in enumerate(stage.cores) if core.scheduler._allocator.running)
        stage.cores[1 - index].hangs_s = 0.0
        stage.kill(index)
        await asked.until_over()

    told = play(scene, Setting(engines=2), model_dir)
    named(told, rf"2 s: {ENGINE} (broke off|failed while it worked on this).*, and another was asked")
    [failed] = gateway_line(told, "asked").failed_attempts or ()
    waits = [row.split() for row in told.trace("asked").splitlines() if row.startswith("  gateway  wait")]
    assert float(waits[0][3]) == pytest.approx(failed.takes_ms, abs=100.0)
    assert float(waits[1][2]) > 2000.0


def test_a_core_that_hangs_so_that_another_replica_is_asked(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        for core in stage.cores:
            core.hangs_s = 100.0
        busy = [await stage.ask(f"busy-{number}", tenant="other") for number in range(2)]
        await until_any_runs(stage)
        await stage.wait(0.5)
        asked = await stage.ask("asked", max_tokens=2)
        await stage.wait(1.0)
        await asked.until_over()
        for one in busy:
            await one.leave()

    told = play(scene, Setting(engines=2), model_dir)
    named(told, rf"30\.\d s: {ENGINE} hung before it began this: its core does not answer, and another was")
    assert "was not ready" not in told.trace("asked")


def test_a_core_that_hangs_for_a_while(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        stream = await stage.ask("stream", max_tokens=20)
        await stream.until_event(5)
        stage.cores[0].hangs_s = 4.2
        await stage.wait(0.2)
        asked = await stage.ask("asked", max_tokens=2)
        await asked.until_over()
        await stream.until_over()

    told = play(scene, Setting(), model_dir)
    named(told, r"gap of 4.2 s: .*; the core process did not answer for \d(\.\d)? s of it", "stream")
    named(told, r"4 s: between the engine's API process and its core; the core process did not answer for ")
    [row] = [row.split() for row in told.trace("asked").splitlines() if row.startswith("  engine   handover")]
    [queue] = [
        row.split() for row in told.trace("asked").splitlines() if row.startswith("  engine   prefill")
    ]
    assert float(queue[2]) >= float(row[2]) + float(row[3]), "the bar stands where the wait was"


def test_a_queue(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        running = await stage.ask("running", max_tokens=200, tenant="other")
        await stage.until_running(1)
        asked = await stage.ask("asked", max_tokens=2)
        await asked.until_over()
        await running.until_over()

    told = play(scene, Setting(slots=1), model_dir)
    named(told, r"queued 1 s: no slot \(1 sequence runs\)")


def test_a_long_prompt(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        await (await stage.ask("asked", prompt_len=900, max_tokens=2)).until_over()

    named(play(scene, Setting(pages=1000), model_dir), r"prefill of \d+ ms: 900 prompt tokens of its own")


def test_a_long_answer(model_dir: Path) -> None:
    """Nothing held it up, so the largest part of its time is named."""

    async def scene(stage: Stage) -> None:
        await (await stage.ask("asked", max_tokens=400)).until_over()

    told = play(scene, Setting(), model_dir)
    named(told, r"2(\.\d)? s: computing an answer of 400 tokens")


@pytest.mark.parametrize(
    ("slow", "pattern"),
    [
        ("identify", r"2 s: finding out who asks"),
        ("enter", r"2 s: taking a seat: the store of quotas \(Redis, where one is set\) answered late"),
        ("reserve", r"2 s: reserving tokens: the store of quotas \(Redis, where one is set\) answered late"),
        ("settle", r"2 s: charging it: the store of quotas"),
    ],
)
def test_a_service_that_answers_the_gateway_late(model_dir: Path, slow: str, pattern: str) -> None:
    async def scene(stage: Stage) -> None:
        await (await stage.ask("asked", max_tokens=2)).until_over()

    limits = {"requests_per_min": 100, "tokens_per_min": 10_000}
    named(play(scene, Setting(slow=frozenset({slow}), tenant={"limits": limits}), model_dir), pattern)


def test_a_body_that_comes_slowly(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": true}'
        asked = await stage.send("asked", body[:9], length=len(body))
        await stage.wait(3.0)
        asked.transport.write(body[9:])
        await asked.until_over()

    named(play(scene, Setting(), model_dir), r"3 s: the client sent its body")


def test_a_slow_tokenizer(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        await (await stage.ask("asked", prompt="many words " * 2000, max_tokens=2)).until_over()

    named(play(scene, Setting(pool=SlowPool, pages=4000), model_dir), r"tokenizing took \d+(\.\d)? s")


def test_a_replica_that_drains_and_does_not_wait(model_dir: Path) -> None:
    """It held a long answer, behind which the request was queued."""

    async def scene(stage: Stage) -> None:
        busy = [await stage.ask(f"busy-{number}", max_tokens=1900, tenant="other") for number in range(2)]
        for number in range(2):
            await stage.until_running(1, number)
        asked = await stage.ask("asked", max_tokens=2)
        await until(lambda: any(engine.state.core.live == 2 for engine in stage.engines))
        index = next(at for at, engine in enumerate(stage.engines) if engine.state.core.live == 2)
        hurry = asyncio.Event()
        drain = asyncio.create_task(stage.engines[index].drain(hurry))
        await stage.wait(3.0)
        hurry.set()
        await drain
        await busy[0].leave()
        await busy[1].leave()
        await asked.until_over()

    told = play(scene, Setting(engines=2, slots=1, pages=2000), model_dir)
    named(told, rf"3 s: {ENGINE} shut down, and could not wait for this answer, and another was asked")


@pytest.mark.parametrize("drains", [True, False])
def test_a_home_that_drains_and_had_the_conversation(model_dir: Path, drains: bool) -> None:
    """Where it does not, the next turn finds its prompt in the cache there."""

    async def scene(stage: Stage) -> None:
        await (await stage.say("first", ["many words " * 30])).until_over()
        [home] = [at for at, core in enumerate(stage.cores) if core.scheduler.newest]
        if drains:
            await stage.engines[home].drain()
            await stage.wait(1.0)
        await (await stage.say("asked", ["many words " * 30, "So it is.", "Go on."])).until_over()

    told = play(scene, Setting(engines=2, pages=1000), model_dir)
    line = gateway_line(told, "asked")
    if drains:
        home = gateway_line(told, "first").replica
        assert line.lost_home == home != line.replica
        at_home = rf"\d+ tokens of it were at {home}, which takes no more requests"
        named(told, rf"prefill of \d+ ms: \d+ prompt tokens of its own in \d steps?; {at_home}")
    else:
        assert (line.lost_home, line.lost_reason, line.lost_tokens) == (None, None, None)


def test_a_replica_that_answers_nothing_while_others_do(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        for number in range(2 * SAMPLES_MIN):
            await (await stage.ask(f"before-{number}", max_tokens=1)).until_over()
        stage.cores[0].hangs_s = 100.0
        clients = [await stage.ask(f"asked-{number}", max_tokens=3) for number in range(2 * SILENT_MIN)]
        for _ in range(20):
            await (await stage.ask("beside", max_tokens=1, tenant="other")).until_over()
            await stage.wait(0.25)
        for client in clients:
            await client.until_over()

    told = play(scene, Setting(engines=2), model_dir)
    late = [n for n in range(2 * SILENT_MIN) if gateway_line(told, f"asked-{n}").attempts == 2]
    assert late
    named(told, rf"\d(\.\d)? s: {ENGINE} answered nothing, while others did, and another", f"asked-{late[0]}")

"""Scenes: each stages one trouble for real, and ends in the sentence that an operator should read of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from shared.trace.sentences import sentence
from shared.wire.completed_line import EngineLine, GatewayLine
from tests.effort import some
from tests.engine.api.tiny import write_model_dir
from tests.histories.world import until
from tests.scenes.stage import Setting, SlowPool, Stage, Told, play


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


def causes(told: Told, request_id: str) -> str:
    """The causes of a request in words; both services tell the same."""
    engine, gateway = told.line(request_id, "engine"), told.line(request_id, "gateway")
    assert engine.causes == gateway.causes
    return "\n".join(sentence(cause) for cause in engine.causes or ())


def gateway_line(told: Told, request_id: str) -> GatewayLine:
    line = told.line(request_id, "gateway")
    assert isinstance(line, GatewayLine)
    return line


def says(text: str, pattern: str) -> None:
    assert re.search(pattern, text, re.MULTILINE), text


def test_a_full_queue(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        clients = [await stage.ask("first", max_tokens=40)]
        await stage.until_running(1)
        clients += [await stage.ask(name) for name in ("second", "third")]
        for client in clients:
            await client.until_over()

    told = play(scene, Setting(slots=1, max_queue_len=1), model_dir)
    trace = told.trace("third")
    says(trace, r"gateway  503 refused in route")
    says(trace, r"error queue_full")
    says(causes(told, "second"), r"^queued \d+ ms: no slot \(1 sequence runs\)")


def test_no_pages(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        first = await stage.ask("first", prompt_len=90, max_tokens=30)
        await stage.until_running(1)
        second = await stage.ask("second", prompt_len=40, max_tokens=2, tenant="other")
        await first.until_over()
        await second.until_over()

    told = play(scene, Setting(pages=30), model_dir)
    says(causes(told, "second"), r"^queued \d+ ms: no pages \(1 sequence holds \d+ %\)$")
    assert "first" not in causes(told, "second"), "of others only their number is told"
    says(told.trace("second"), r"why +queued \d+ ms: no pages")


def test_a_long_prompt_beside_a_stream(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        stream = await stage.ask("stream", max_tokens=40)
        await stream.until_event(5)
        long = await stage.ask("long", prompt_len=300, max_tokens=2, tenant="other")
        await long.until_over()
        await stream.until_over()

    told = play(scene, Setting(), model_dir)
    says(causes(told, "stream"), r"gap of 305 ms: 300 prompt tokens of another request")
    says(causes(told, "long"), r"prefill of 305 ms: 300 prompt tokens of its own in 1 step, beside 1 stream")


GAP_TARGET_S = 0.05


@pytest.mark.parametrize(("inputs", "length"), some([(300, 40), (20, 1000), (2048, 5)], usual=2))
def test_a_flood_of_vectors_beside_a_stream(model_dir: Path, inputs: int, length: int) -> None:
    """The stream's gaps keep to their target, and its tenant's next requests begin soon, while another tenant
    has four requests for vectors: all slots, and a queue that is never empty."""
    gaps_s: list[float] = []
    begun_s: list[float] = []

    async def scene(stage: Stage) -> None:
        clock = asyncio.get_running_loop().time
        stream = await stage.ask("stream", max_tokens=150)
        await stream.until_event(10)
        floods = [await stage.embed(f"flood{at}", inputs, length, tenant="other") for at in range(4)]
        await stage.until_running(4)
        steps = stage.engines[0].state.core.steps
        first = steps.last
        await stream.until_over()
        assert first is not None
        assert steps.last is not None
        beside = [*steps.between(first.number, steps.last.number)]
        gaps_s.extend(step.interval_s for step in beside if sum(step.decodes))
        assert all(step.prompts for step in beside)
        for at in range(3):
            asked_at = clock()
            await (await stage.ask(f"next{at}", prompt_len=30, max_tokens=1)).until_over()
            begun_s.append(clock() - asked_at)
        assert not all(flood.caller.is_over for flood in floods), "the flood was over before"
        for flood in floods:
            await flood.leave()

    told = play(scene, Setting(gap_target_s=GAP_TARGET_S, pages=4000), model_dir)
    assert len(gaps_s) > 50
    assert max(gaps_s) < 1.2 * GAP_TARGET_S
    assert max(begun_s) < 1.0, "short inputs pass a longer prompt, until their tenant is well ahead"
    charged = [told.line(f"flood{at}", "gateway") for at in range(4)]
    assert [line.status for line in charged].count(499) >= 1
    for line in charged:
        if line.status != 503:
            computed = told.line(line.request_id, "engine").prompt_tokens or 0
            assert isinstance(line, GatewayLine)
            assert line.settled_tokens == computed < inputs * length or line.status == 200


def test_vectors_are_computed_until_their_caller_leaves_and_not_on(model_dir: Path) -> None:
    """What had begun is charged, and the rest never begins."""
    computed: list[int] = []

    async def scene(stage: Stage) -> None:
        left = await stage.embed("left", 400, 50)
        await stage.until_running(4)
        await stage.wait(0.5)
        await left.leave()
        await until(lambda: not stage.engines[0].state.core.live)
        pages = stage.cores[0].scheduler._allocator.pages
        assert (pages.owned, pages.cached) == (0, 0)
        computed.append(sum(stage.cores[0].computed["left"].rows_len.values()))

    told = play(scene, Setting(pages=4000), model_dir)
    line = gateway_line(told, "left")
    assert (line.status, line.end_reason) == (499, "client_cancel")
    assert line.settled_tokens == told.line("left", "engine").prompt_tokens
    assert line.settled_tokens is not None
    assert 0 < computed[0] <= line.settled_tokens <= computed[0] + 4 * 50 < 400 * 50


def test_what_a_trace_tells_of_a_request_for_vectors(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        await (await stage.embed("vectors", 40, 50)).until_over()

    told = play(scene, Setting(pages=4000), model_dir)
    engine, gateway = told.line("vectors", "engine"), gateway_line(told, "vectors")
    for line in (engine, gateway):
        assert (line.endpoint, line.status) == ("/v1/embeddings", 200)
        assert (line.prompt_tokens, line.completion_tokens, line.cached_tokens) == (2000, 0, 0)
    assert (gateway.reserved_tokens, gateway.settled_tokens) == (2000, 2000)
    says(told.trace("vectors"), r"POST /v1/embeddings")
    says(told.trace("vectors"), r"40 sequences")
    says(
        causes(told, "vectors"),
        r"^queued 1\.9 s: no slot \(4 sequences run\), 36 others were taken before it",
    )


def test_a_cached_prompt_is_no_stream_beside_itself(model_dir: Path) -> None:
    """It computes one token of its own, as a stream does."""

    async def scene(stage: Stage) -> None:
        prompt = [5] * 300
        for name in ("first", "alone"):
            client = await stage.ask(name, max_tokens=2, prompt=prompt)
            await client.until_over()
        running = await stage.ask("running", max_tokens=40)
        await running.until_event(1)
        beside = await stage.ask("beside", max_tokens=2, prompt=prompt)
        await beside.until_over()
        await running.until_over()

    told = play(scene, Setting(), model_dir)
    own = r"1 prompt token of its own \(299 more were cached\) in 1 step"
    says(causes(told, "alone"), rf"^prefill of 5.2 ms: {own}$")
    says(causes(told, "beside"), rf"^prefill of 5.4 ms: {own}, beside 1 stream$")


@pytest.mark.parametrize(
    ("host_pages", "ends"), [(0, r"took its place$"), (400, r"its pages were kept in host memory$")]
)
def test_preempted_by_a_higher_class(model_dir: Path, host_pages: int, ends: str) -> None:
    async def scene(stage: Stage) -> None:
        flex = await stage.ask("flex", prompt_len=300, max_tokens=40, service_tier="flex")
        await flex.until_event(5)
        high = await stage.ask("high", prompt_len=60, max_tokens=20, service_tier="priority")
        await high.until_over()
        await flex.until_over()

    told = play(scene, Setting(slots=1, pages=90, host_pages=host_pages), model_dir)
    found = causes(told, "flex")
    says(found, r"preempted for \d+ ms: a request of a higher class took its place")
    assert any(re.search(ends, line) for line in found.splitlines()), found
    engine, swaps = told.line("flex", "engine"), 1 if host_pages else 0
    assert isinstance(engine, EngineLine)
    assert (engine.preemptions, engine.swaps) == (1, swaps)
    assert gateway_line(told, "flex").engine_swaps == swaps
    assert [gateway_line(told, name).service_tier for name in ("flex", "high")] == ["flex", None]
    kept = r" \(1 of them with its pages kept in host memory\)" if swaps else ""
    says(told.trace("flex"), rf"preempted 1 time{kept}; ")


def test_a_request_waits_for_those_of_a_higher_class(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        running = await stage.ask("running", max_tokens=20, service_tier="priority")
        await running.until_event(2)
        clients = [await stage.ask("flex", service_tier="flex")]
        clients += [await stage.ask(f"high-{number}", service_tier="priority") for number in range(3)]
        for client in (running, *clients):
            await client.until_over()

    told = play(scene, Setting(slots=1), model_dir)
    says(causes(told, "flex"), r"^queued \d+ ms: no slot \(1 sequence runs\), 3 of a higher class went first")


def test_a_replica_that_dies_before_the_first_byte(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        asked = await stage.ask("asked", prompt_len=300)
        await until_any_runs(stage)
        stage.kill(next(i for i, core in enumerate(stage.cores) if core.computed))
        await asked.until_over()

    told = play(scene, Setting(engines=2), model_dir)
    line = told.line("asked", "gateway")
    assert (line.status, line.end_reason) == (200, "ok")
    trace = told.trace("asked")
    says(trace, r"asked 2 engines, last .*: the one before it had failed$")
    says(trace, r"failed before")


async def until_any_runs(stage: Stage) -> None:
    await until(lambda: any(core.scheduler._allocator.running for core in stage.cores))


def test_a_first_token_that_would_come_too_late(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        for number in range(20):
            await (await stage.ask(f"before-{number}", prompt_len=100 + 10 * number)).until_over()
        late = await stage.ask("late", prompt_len=1500)
        await late.until_over()

    told = play(scene, Setting(pages=1000, timeouts={"first_token_s": 1.0}), model_dir)
    line = gateway_line(told, "late")
    assert (line.status, line.error_code) == (503, "first_token_deadline")
    assert line.total_ms < 100.0, "it is refused at once"
    trace = told.trace("late")
    says(trace, r"gateway  503 refused")
    says(trace, r"error first_token_deadline: expected in 1\.\d s$")


def test_a_queue_in_which_the_time_runs_out(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        other = await stage.ask("other", max_tokens=900, tenant="other")
        await stage.until_running(1)
        waits = await stage.ask("waits")
        await waits.until_over()
        await other.leave()

    told = play(scene, Setting(slots=1, tenant={"queue_timeout_s": 2.0}), model_dir)
    says(causes(told, "waits"), r"^queued 2 s: no slot \(1 sequence runs\)")
    trace = told.trace("waits")
    says(trace, r"error queue_timeout")


def test_a_quota_that_refuses(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        for name in ("first", "second"):
            client = await stage.ask(name)
            await client.until_over()

    told = play(scene, Setting(tenant={"limits": {"requests_per_min": 1}}), model_dir)
    trace = told.trace("second")
    says(trace, r"gateway  429 refused in seat")
    says(trace, r"refused by the tenant's quota of requests")
    assert "engine   " not in trace


@pytest.mark.parametrize("stage_left", ["body", "queue", "prefill", "decode", "stalled"])
def test_a_client_that_leaves(model_dir: Path, stage_left: str) -> None:
    async def scene(stage: Stage) -> None:
        if stage_left == "body":
            left = await stage.send("left", b'{"model"', length=100)
            await stage.wait(1.0)
            await left.leave()
            return
        if stage_left == "queue":
            other = await stage.ask("other", max_tokens=400, tenant="other")
            await stage.until_running(1)
            left = await stage.ask("left")
            await stage.wait(1.0)
            await left.leave()
            await other.leave()
            return
        left = await stage.ask("left", prompt_len=600, max_tokens=900)
        await until_any_runs(stage)
        if stage_left == "prefill":
            await stage.wait(0.2)
        else:
            await left.until_event(60)
        if stage_left == "stalled":
            left.transport.pause_reading()
            await stage.wait(9.0)
        await left.leave()

    told = play(scene, Setting(slots=1, step_tokens_max=128, pages=1000), model_dir)
    gateway = told.line("left", "gateway")
    assert (gateway.status, gateway.end_reason) == (499, "client_cancel")
    if stage_left == "body":
        assert gateway.stage == "body"
        says(told.trace("left"), r"body +\d\.\d+ +\d+\.\d+ .*ended here")
        return
    engine = told.line("left", "engine")
    assert (engine.stage, engine.end_reason) == (stage_left, "client_cancel")
    expected = {
        "queue": r"^queued (9\d\d ms|1 s): no slot \(1 sequence runs\)",
        "prefill": r"^prefill of \d+ ms: 600 prompt tokens of its own in \d+ step",
        "decode": r"^prefill of \d+ ms: 600 prompt tokens of its own in 5 steps",
        "stalled": r"stalled [789](\.\d)? s: this client did not read",
    }
    says(causes(told, "left"), expected[stage_left])


def test_a_client_that_leaves_while_its_text_is_tokenized(model_dir: Path) -> None:
    async def scene(stage: Stage) -> None:
        left = await stage.ask("left", prompt="many words " * 2000, max_tokens=2)
        await stage.wait(1.0)
        await left.leave()

    told = play(scene, Setting(pool=SlowPool, pages=4000), model_dir)
    gateway = told.line("left", "gateway")
    assert (gateway.status, gateway.end_reason, gateway.stage) == (499, "client_cancel", "tokenize")
    says(told.trace("left"), r"tokenize +\d+\.\d+ +\d+\.\d+ .*ended here")
    says(told.trace("left"), r"no engine was asked")


@pytest.mark.parametrize(
    ("stage_left", "slow"),
    [("auth", "identify"), ("seat", "enter"), ("quota", "reserve"), ("connect", ""), ("settle", "settle")],
)
def test_a_client_that_leaves_while_the_gateway_waits_for_another_service(
    model_dir: Path, stage_left: str, slow: str
) -> None:
    """`validate`, `tenant` and `route` wait for nobody, so that nobody can leave in them. `body`, `tokenize`,
    and `wait` and `relay`, in which the engine has the request, are in the scenes before this."""

    async def scene(stage: Stage) -> None:
        if stage_left == "connect":
            stage.part(0)
        left = await stage.ask("left", max_tokens=2)
        await stage.wait(1.5)
        await left.leave()

    limits = {"requests_per_min": 100, "tokens_per_min": 10_000}
    setting = Setting(slow=frozenset({slow} - {""}), tenant={"limits": limits})
    told = play(scene, setting, model_dir)
    gateway = gateway_line(told, "left")
    trace = told.trace("left")
    if stage_left == "settle":  # the client had its whole answer before it left, and is charged for it
        assert (gateway.status, gateway.end_reason, gateway.stage) == (200, "ok", "relay")
        assert gateway.settled_tokens == 10
        says(trace, r"^  gateway  settle +\d+\.\d{3} +2000\.\d{3} +=+$")
        return
    assert (gateway.status, gateway.end_reason, gateway.stage) == (499, "client_cancel", stage_left)
    assert gateway.settled_tokens == 0
    says(trace, rf"^  gateway  {stage_left} +\d+\.\d{{3}} +[12]\d{{3}}\.\d{{3}} .*ended here$")
    says(trace, "no engine was asked" if stage_left != "connect" else "asked 1 engine")

"""Several workers behind one port, as processes: shared, replaced, drained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.__main__ import main
from shared import cli
from shared.process.exit_codes import ExitCode
from shared.process.lifecycle import ORPHANED
from tests.bench.services import free_port
from tests.gateway.conftest import CHAT, KEY
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.redis_server import redis_server
from tests.gateway.workers.test_process import ROOT, toml
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

STREAMS = 24
"""So many that some are at either worker."""
HEADERS = {"authorization": f"Bearer {KEY}"}


class Workers:
    """A gateway with two workers, and the lines that all of it logs."""

    def __init__(self, process: asyncio.subprocess.Process, client: aiohttp.ClientSession) -> None:
        self.process = process
        self.client = client
        self.lines: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while raw := await self.process.stderr.readline():
            async with self._changed:
                self.lines.append(msgspec.json.decode(raw))
                self._changed.notify_all()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    async def until_logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.logged(event)) >= count)
        return self.logged(event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.logged('gateway.listening')[0]['port']}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.logged('gateway.listening')[0]['admin_port']}"

    async def chat(self) -> aiohttp.ClientResponse:
        return await self.client.post(
            f"{self.url}/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADERS
        )

    async def numbers(self) -> dict[str, float]:
        async with self.client.get(f"{self.admin}/metrics") as answer:
            text = await answer.text()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            status = await self.process.wait()
            await self._reading
        return status


@asynccontextmanager
async def workers(directory: Path, text: str, admin_port: int = 0) -> AsyncIterator[Workers]:
    operator, file = operator_keys()["keys"][0], directory / "gateway.toml"
    admin = f'[admin]\nport = {admin_port}\nkeys = [{{ id = "ops", hash = "{operator["hash"]}" }}]\n'
    file.write_text(f"{text}\n{admin}")
    argv = (sys.executable, "-m", "gateway", "--config", str(file), "--parent-pid", str(os.getpid()))
    process = await asyncio.create_subprocess_exec(*argv, "--workers", "2", cwd=ROOT, stderr=subprocess.PIPE)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        found = Workers(process, client)
        try:
            await found.until_logged("gateway.listening")
            yield found
        finally:
            if process.returncode is None:
                process.kill()  # the kernel tells the workers
            await found.end()


async def test_workers_whose_supervisor_was_killed_drain(tmp_path: Path) -> None:
    """The kernel may tell them once for each of its threads, which hurries nobody."""
    go_on = asyncio.Event()
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(chunk("a"), go_on, chunk("b"))
        async with workers(tmp_path, toml(engine.url)) as gateway, asyncio.timeout(PATIENCE_S):
            answers = [await gateway.chat() for _ in range(STREAMS)]
            for answer in answers:
                assert await answer.content.readuntil(b"\n\n") == chunk("a")
            gateway.process.kill()
            await gateway.until_logged("gateway.draining", 2)
            for line in gateway.logged("worker.started"):
                os.kill(line["pid"], ORPHANED)
            go_on.set()
            ends = await asyncio.gather(*map(read_to_the_end, answers))
            assert set(ends) == {chunk("b") + b"data: [DONE]\n\n"}
            drained = await gateway.until_logged("gateway.drained", 2)
            assert all(line["clean"] for line in drained)


async def test_a_request_is_found_at_any_worker_of_any_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their admin API, which the console asks, and by the command; one that was killed is named."""
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the operator's")
    async with (
        FakeEngine(bundle=byte_bundle()) as engine,
        AsyncExitStack() as stack,
        asyncio.timeout(2 * PATIENCE_S),
    ):
        engine.script = stream(chunk("a"))
        redis, gateways = stack.enter_context(redis_server()), list[Workers]()
        shared = f'{toml(engine.url)}\n[redis]\nurl = "{redis.url}"\n'
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            one = await stack.enter_async_context(workers(tmp_path / name, shared, free_port()))
            gateways.append(one)
        answers = await asyncio.gather(*(read_whole(one) for one in gateways for _ in range(STREAMS)))
        ids = [answer.headers["x-request-id"] for answer in answers]
        key = "penstock:{~gateways}:gateways"

        async def is_known() -> bool:
            return redis.admin.zcard(key) == 2 and all([await found(one) == {*ids} for one in gateways])

        while not await is_known():  # noqa: ASYNC110 -- other processes set no event
            await asyncio.sleep(0.1)
        for asked in gateways:
            pages = [await requests_of(asked, f"?limit=7{before}") for before in ("", "&before=9")]
            assert (len(pages[0]["data"]), len(pages[1]["data"])) == (7, 0)
            for id_ in ids[:2] + ids[-2:]:
                [record] = (await requests_of(asked, f"/{id_}"))["data"]
                assert record["summary"]["request_id"] == id_
                assert await asyncio.to_thread(cli.main, ["trace", id_, "--admin-url", asked.admin]) == 0
        whole = await requests_of(gateways[0], "?limit=1000")
        served = {(one.get("gateway"), one["worker"]) for one in whole["data"]}
        assert len(served) == 4, "each worker of each gateway"
        capsys.readouterr()
        gateways[1].process.kill()
        await gateways[1].end()
        began_s = time.monotonic()
        for id_ in ids[:STREAMS:5]:  # at either worker
            assert await asyncio.to_thread(cli.main, ["trace", id_, "--admin-url", gateways[0].admin]) == 0
            assert "no answer from" in capsys.readouterr().err
        assert time.monotonic() - began_s < PATIENCE_S


async def read_whole(gateway: Workers) -> aiohttp.ClientResponse:
    answer = await gateway.chat()
    await answer.read()
    return answer


async def requests_of(gateway: Workers, asked: str) -> Any:
    async with gateway.client.get(f"{gateway.admin}/admin/v1/requests{asked}", headers=OPERATOR) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def found(gateway: Workers) -> set[str]:
    page = await requests_of(gateway, "?state=done&limit=1000")
    return {one["request_id"] for one in page["data"]}


async def read_to_the_end(answer: aiohttp.ClientResponse) -> bytes | None:
    """What came of a stream; None where its connection broke."""
    try:
        return await answer.read()
    except aiohttp.ClientError:
        return None


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "killed"),
        pytest.param(signal.SIGSTOP, "hung", marks=pytest.mark.nightly),  # its heartbeats are waited for
    ],
)
async def test_a_killed_worker_takes_its_own_streams_alone_and_is_replaced(
    tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    """One that hangs is killed, and its streams end as those of one that died: not in silence."""
    go_on = asyncio.Event()
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(chunk("a"), go_on, chunk("b"))
        async with (
            workers(tmp_path, toml(engine.url)) as gateway,
            asyncio.timeout(PATIENCE_S),
        ):
            answers = [await gateway.chat() for _ in range(STREAMS)]
            assert {answer.status for answer in answers} == {200}
            for answer in answers:
                assert await answer.content.readuntil(b"\n\n") == chunk("a")
            assert (await gateway.numbers())["penstock_gateway_requests_in_flight"] == STREAMS
            first = gateway.logged("worker.started")[0]
            os.kill(first["pid"], number)
            await gateway.until_logged("worker.serving", 3)
            [death] = gateway.logged("worker.died")
            assert (death["worker"], death["reason"]) == (first["worker"], reason)
            go_on.set()
            ends = await asyncio.gather(*map(read_to_the_end, answers))
            lost = ends.count(None)
            assert 0 < lost < STREAMS, "both workers had some"
            assert ends.count(chunk("b") + b"data: [DONE]\n\n") == STREAMS - lost

            async with await gateway.chat() as again:
                assert (await again.read()).endswith(b"data: [DONE]\n\n")
            await gateway.until_logged("request.completed", STREAMS - lost + 1)
            now = await gateway.numbers()
            assert now["penstock_gateway_requests_total"] == STREAMS - lost + 1
            assert now["penstock_gateway_requests_in_flight"] == 0
            assert now["penstock_gateway_worker_deaths_total"] == 1

            async with gateway.client.post(f"{gateway.admin}/admin/v1/reload", headers=OPERATOR) as reload:
                assert reload.status == 200
            await gateway.until_logged("config.reloaded", 2)
            for url, status in ((gateway.admin, 200), (gateway.url, 200), (f"{gateway.admin}/worker", 404)):
                async with gateway.client.get(f"{url}/readyz") as probe:
                    assert probe.status == status
            gateway.process.send_signal(signal.SIGTERM)
            assert await gateway.end() == ExitCode.CLEAN


@pytest.mark.nightly
async def test_a_drain_that_is_hurried_ends_the_streams_of_all_workers_and_says_so(tmp_path: Path) -> None:
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = stream(chunk("a"), asyncio.Event())
        async with (
            workers(tmp_path, toml(engine.url)) as gateway,
            asyncio.timeout(PATIENCE_S),
        ):
            answers = [await gateway.chat() for _ in range(STREAMS)]
            for answer in answers:
                await answer.content.readuntil(b"\n\n")
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.until_logged("gateway.draining", 2)
            gateway.process.send_signal(signal.SIGTERM)
            for answer in answers:
                assert b"gateway_stopped" in await answer.read()
            assert await gateway.end() == ExitCode.DRAIN_CUT
            assert {line["end_reason"] for line in gateway.logged("request.completed")} == {"drain"}


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ("limits = { concurrent = 3 }", "keys.k1.limits: 2 workers cannot count it together in memory"),
        ("[directory]\nstore = 'redis'\n[redis]\nurl = 'redis://localhost'", "directory.store: "),
    ],
)
def test_workers_that_would_count_apart_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, problem: str
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(toml("http://127.0.0.1:1", extra))
    assert main(["--config", str(config), "--workers", "2"]) == ExitCode.UNUSABLE_CONFIG
    told = capsys.readouterr().err
    assert problem in told
    assert 'set store = "redis" in [quotas]' in told


def test_gateways_that_would_count_apart_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(toml("http://127.0.0.1:1", "limits = { concurrent = 3 }\n[quotas]\ngateways = 3"))
    assert main(["--check", str(config)]) == ExitCode.UNUSABLE_CONFIG
    assert "keys.k1.limits: 3 gateways cannot count it together in memory" in capsys.readouterr().err

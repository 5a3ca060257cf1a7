"""Replicas that appear and vanish again and again: nobody's request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from gateway.app import Gateway
from gateway.config.whole import load
from tests.gateway.conftest import CHAT, KEY, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream, unary
from tests.gateway.routing.test_members import write

CHANGES = 12


async def test_replicas_that_come_and_go_lose_no_request(tmp_path: Path) -> None:
    """A stream at the replica that comes and goes, and one at the other, end whole; four callers ask all the
    time, and each is answered."""
    file, finish = tmp_path / "gateway.toml", asyncio.Event()
    stays, comes = FakeEngine(bundle=byte_bundle()), FakeEngine(bundle=byte_bundle())
    async with stays, comes:
        write(file, stays, comes)
        stays.script = comes.script = stream(chunk("a"), finish, chunk("b"))
        async with Gateway(load(file, {}), path=file) as gateway, aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
            headers = {"authorization": f"Bearer {KEY}"}
            streams = [
                await client.post(url, json={**CHAT, "stream": True, "user": str(number)}, headers=headers)
                for number in range(8)
            ]
            assert stays.seen
            assert comes.seen
            stays.script = comes.script = unary()
            statuses: list[int] = []
            over = asyncio.Event()

            async def keep_asking() -> None:
                while not over.is_set():
                    async with client.post(url, json=CHAT, headers=headers) as answer:
                        statuses.append(answer.status)

            async def until_answered(more: int) -> None:
                before = len(statuses)
                await until(lambda: len(statuses) >= before + more)

            async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
                for _ in range(4):
                    asking.create_task(keep_asking())
                for number in range(CHANGES):
                    await until_answered(4)
                    write(file, *([stays, comes] if number % 2 else [stays]))
                    assert await gateway.reload() == []
                over.set()
            assert set(statuses) == {200}
            finish.set()
            for one in streams:
                assert one.status == 200
                assert (await one.content.read()).endswith(b"data: [DONE]\n\n")
                one.release()

"""Several gateway processes on one Redis: limits are exact over all of them, also when one is killed or
drained."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from gateway.billing.lines import BillingLine
from gateway.identity.keys import hash_key
from gateway.operators import peers
from shared import cli
from shared.process.exit_codes import ExitCode
from tests.bench.services import free_port
from tests.effort import drawn
from tests.gateway.conftest import CHAT, KEY, PROMPT, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, closing, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.redis_server import PATIENT_S, RedisServer
from tests.gateway.workers.test_process import HEADERS, ROOT, Process, started, toml
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

GATEWAYS: Final = 3
CALLERS: Final = drawn(300, whole=1_000)
LIMIT: Final = 100
SEATED: Final = 30
TTL_MS: Final = 2_000
CHILD: Final = f"""
import sys
from gateway import app
from gateway.billing import unsettled
from gateway.__main__ import main
from gateway.admission.redis_store import open_store
open_store.__kwdefaults__["lease_ttl_ms"] = {TTL_MS}  # a minute is long for a test
app.RENEW_S = {TTL_MS} / 4000
unsettled.TURN_S = app.RENEW_S
sys.exit(main(sys.argv[1:]))
"""
MAX_TOKENS: Final = 20
RESERVED: Final = len(PROMPT) + MAX_TOKENS
"""What is reserved for each request."""
FEW: Final = 10
FEW_OF: Final = {
    "requests": f"requests_per_min = {FEW}",
    "tokens": f"tokens_per_min = {FEW * RESERVED}",
    "day": f"tokens_per_day = {FEW * RESERVED}",
    "budget": f"token_budget = {FEW * RESERVED}",
}
"""Tenants, each with its own key, whose limit lets so few requests in."""
FEWS_CALLERS: Final = 90
FREE: Final = "free"
"""A tenant without limits, and its key."""


class Fleet:
    """Gateways, the engine behind them, and the Redis that they share."""

    def __init__(self, redis: RedisServer, engine: FakeEngine, prefix: str) -> None:
        self.redis = redis
        self.engine = engine
        self.prefix = prefix
        self.gateways: list[Process] = []
        self.admin_ports: dict[Process, int] = {}
        self.readers: list[asyncio.Task[bytes]] = []
        self.go_on = asyncio.Event()
        engine.script = stream(chunk("a"), self.go_on, chunk("b"), end=closing(10, 2))

    async def start(self, config: Path) -> None:
        argv = (sys.executable, "-c", CHILD, "--config", str(config), "--parent-pid", str(os.getpid()))
        process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stderr=subprocess.PIPE)
        gateway = Process(process)
        self.gateways.append(gateway)
        # With a tokenizer prompts are counted, and not guessed.
        listening = await gateway.until_logged("gateway.listening", "tokenizer.loaded")
        gateway.port = listening["port"]
        self.admin_ports[gateway] = listening["admin_port"]
        assert process.stderr is not None
        self.readers.append(asyncio.create_task(process.stderr.read()))  # a full pipe would hold it up

    async def ask(
        self, client: aiohttp.ClientSession, gateway: Process, key: str = KEY
    ) -> aiohttp.ClientResponse:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        body = {**CHAT, "stream": True, "max_tokens": MAX_TOKENS}
        return await client.post(url, json=body, headers={"authorization": f"Bearer {key}"})

    def now_ms(self) -> float:
        """By the server's clock, which counts."""
        seconds, microseconds = self.redis.admin.time()
        now_ms: float = seconds * 1000 + microseconds / 1000
        return now_ms

    async def crowd(self, client: aiohttp.ClientSession) -> dict[Process, list[aiohttp.ClientResponse]]:
        """The streams that began, by gateway, of `CALLERS`: a few at each gateway, and then all others at
        once."""
        askers = [self.gateways[i % GATEWAYS] for i in range(CALLERS)]
        few = [await self.ask(client, gateway) for gateway in askers[:SEATED]]
        answers = few + await asyncio.gather(*(self.ask(client, gateway) for gateway in askers[SEATED:]))
        assert Counter(answer.status for answer in answers) == {200: LIMIT, 429: CALLERS - LIMIT}
        began: dict[Process, list[aiohttp.ClientResponse]] = {gateway: [] for gateway in self.gateways}
        for gateway, answer in zip(askers, answers, strict=True):
            if answer.status == 200:
                began[gateway].append(answer)
            else:
                answer.release()
        return began

    async def usage(self, client: aiohttp.ClientSession, gateway: int) -> Counter[str]:
        """Of all tenants together."""
        url = f"http://127.0.0.1:{self.admin_ports[self.gateways[gateway]]}/admin/v1/usage"
        async with client.get(url, headers=OPERATOR) as answer:
            found: Counter[str] = Counter()
            for row in (await answer.json())["rows"]:
                found.update({name: number for name, number in row.items() if isinstance(number, int)})
            return found

    async def until_refused(self, client: aiohttp.ClientSession, gateway: Process) -> None:
        """Until it drains."""
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                async with client.get(f"http://127.0.0.1:{gateway.port}/readyz"):
                    pass

    @property
    def leases(self) -> int:
        held: int = self.redis.admin.zcard(f"{self.prefix}:leases")
        return held

    @property
    def last_end_ms(self) -> float:
        """When the last of the leases ends, unless it is renewed."""
        leases: list[Any] = self.redis.admin.zrange(f"{self.prefix}:leases", -1, -1, withscores=True)
        return float(leases[0][1])

    async def until_leases(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.leases != count:  # noqa: ASYNC110 -- Redis sets no event
                await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(redis: RedisServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_of(redis, tmp_path, [""] * GATEWAYS) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def fleet_of(redis: RedisServer, directory: Path, sections: Sequence[str]) -> AsyncIterator[Fleet]:
    """A gateway for each of the sections, which its file has besides what all have."""
    prefix = f"test-{uuid.uuid4().hex}"
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
        found = Fleet(redis, engine, prefix)
        operator = operator_keys()["keys"][0]
        limits = f'id = "acme"\nlimits = {{ concurrent = {LIMIT} }}\n'
        few = "".join(
            f'[[tenants]]\nid = "{id_}"\nlimits = {{ {limit} }}\n'
            f'[[keys]]\nid = "{id_}"\nhash = "{hash_key(id_)}"\ntenant = "{id_}"\n'
            for id_, limit in {**FEW_OF, FREE: ""}.items()
        )
        text = toml(engine.url, few).replace('id = "acme"\n', limits, 1)
        configs = [directory / f"gateway-{number}.toml" for number in range(len(sections))]
        text = (
            f'{text}\n[admin]\nport = 0\nkeys = [{{ id = "ops", hash = "{operator["hash"]}" }}]\n'
            f'[redis]\nurl = "{redis.url}"\nkey_prefix = "{prefix}"\ntimeout_s = {PATIENT_S}\n'
            '[quotas]\nstore = "redis"\n'
        )
        for config, section in zip(configs, sections, strict=True):
            config.write_text(text + section)
        try:
            await asyncio.gather(*map(found.start, configs))
            yield found
        finally:
            found.go_on.set()
            for gateway in found.gateways:
                if gateway.process.returncode is None:
                    gateway.process.kill()
                await gateway.process.wait()
            await asyncio.gather(*found.readers)


async def test_a_thousand_callers_of_three_gateways_share_a_limit_and_a_killed_one_leaves_nothing(
    fleet: Fleet,
) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession(connector=connector) as client:
        began = await fleet.crowd(client)
        assert fleet.leases == LIMIT
        cut_off = began.pop(fleet.gateways[0])
        killed, living = len(cut_off), LIMIT - len(cut_off)
        fleet.gateways[0].process.send_signal(signal.SIGKILL)
        assert await fleet.gateways[0].process.wait() == -signal.SIGKILL
        assert fleet.last_end_ms <= fleet.now_ms() + TTL_MS, "nobody renews those of the killed one any more"
        await fleet.until_leases(living)
        again = [await fleet.ask(client, fleet.gateways[1 + i % 2]) for i in range(killed + 1)]
        assert [answer.status for answer in again] == [200] * killed + [429]
        usage = await fleet.usage(client, 1)
        assert (usage["requests"], usage["estimated_requests"]) == (killed, killed), "the others still run"
        fleet.go_on.set()
        for answer in (*cut_off, again[-1]):
            answer.close()
        for answer in (*itertools.chain(*began.values()), *again[:-1]):
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await fleet.until_leases(0)
        usage = await fleet.usage(client, 2)
    assert (usage["requests"], usage["estimated_requests"]) == (LIMIT + killed, killed)
    assert usage["prompt_tokens"] + usage["completion_tokens"] == LIMIT * 12


async def test_two_gateways_of_two_workers_are_one_for_operators(
    redis: RedisServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that any served is found from any, by command and in the console, and so is a try before it.
    One that is killed is named as silent, in time."""
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the operator's")
    operator = operator_keys()["keys"][0]["hash"]
    sections = (
        f'[admin]\nport = {{port}}\nkeys = [{{ id = "ops", hash = "{operator}" }}]\n'
        f'[redis]\nurl = "{redis.url}"\nkey_prefix = "test-{uuid.uuid4().hex}"\ntimeout_s = {PATIENT_S}\n'
    )
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        engine.script = unary()
        gateways = []
        for number in range(2):
            config = tmp_path / f"gateway-{number}.toml"
            config.write_text(
                f"workers = 2\n{toml(engine.url, sections.replace('{port}', str(free_port())))}"
            )
            gateways.append(await stack.enter_async_context(started(config)))
        both = Both(client, gateways)
        ids = [await both.served(number % 2, f"req-{number}") for number in range(24)]
        await both.until_told(ids)
        for asked, found in itertools.product(gateways, ids[:4]):
            [record] = (await both.ask(asked, f"/requests/{found}"))[1]["data"]
            assert record["summary"]["request_id"] == found
            assert await asyncio.to_thread(cli.main, ["trace", found, "--admin-url", both.url(asked)]) == 0
            assert f"request {found}" in capsys.readouterr().out
            assert (await both.console(asked, f"/requests/{found}"))["data"][0]["line"] == record["line"]
        await both.served(0, "try", temperature=9)  # which is refused
        for _ in range(4):  # at one worker and another
            own = await both.served(1, "own", {"x-stainless-retry-count": "1"})
            for asked in gateways:
                for record in (await both.ask(asked, f"/requests/{own}"))[1]["data"]:
                    assert "its first try, try, was refused" in record["causes"][0]
        gateways[1].process.send_signal(signal.SIGKILL)
        await gateways[1].process.wait()
        began_s = time.monotonic()
        status, told = await both.ask(gateways[0], "/requests/nobodys")
        assert status == 404
        assert time.monotonic() - began_s < 2 * peers.ANSWER_S
        assert f":{gateways[1].admin_port}" in told["error"]["message"]
        assert (await both.ask(gateways[0], f"/requests/{ids[0]}"))[1]["partial"] is True


class Both:
    """Gateways, each of several workers, and the operator who asks them."""

    def __init__(self, client: aiohttp.ClientSession, gateways: Sequence[Process]) -> None:
        self._client, self._gateways = client, gateways

    def url(self, gateway: Process) -> str:
        return f"http://127.0.0.1:{gateway.admin_port}"

    async def served(
        self, number: int, request_id: str, headers: Mapping[str, str] = MappingProxyType({}), **fields: Any
    ) -> str:
        """Ask over a connection of its own, which the kernel gives to any worker."""
        url = f"http://127.0.0.1:{self._gateways[number].port}/v1/chat/completions"
        async with (
            aiohttp.ClientSession(headers={**HEADERS, **headers, "x-request-id": request_id}) as caller,
            caller.post(url, json={**CHAT, **fields}) as answer,
        ):
            await answer.read()
        return request_id

    async def ask(self, gateway: Process, path: str) -> tuple[int, Any]:
        async with self._client.get(f"{self.url(gateway)}/admin/v1{path}", headers=OPERATOR) as answer:
            return answer.status, await answer.json()

    async def until_told(self, ids: Sequence[str]) -> None:
        """Until each gateway knows the other, and all four workers have been heard."""
        for gateway in self._gateways:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    page = (await self.ask(gateway, "/requests?state=done"))[1]
                    if {one["request_id"] for one in page["data"]} >= {*ids}:
                        break
                    await asyncio.sleep(0.05)
            assert len({(one.get("gateway"), one["worker"]) for one in page["data"]}) == 4
            assert (page["silent_gateways"], page["silent_workers"]) == ([], [])

    async def console(self, gateway: Process, path: str) -> Any:
        """What the console is told, which has logged in."""
        origin, session = {"origin": self.url(gateway)}, f"{self.url(gateway)}/admin/v1/console/session"
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.post(session, json={"key": "the operator's"}, headers=origin) as answer:
                assert answer.status == 200
            async with browser.get(f"{self.url(gateway)}/admin/v1{path}") as answer:
                return await answer.json()


async def test_what_a_killed_gateway_left_has_its_lines_from_another(
    redis: RedisServer, tmp_path: Path
) -> None:
    """Those of its ended requests are in its file, which the next process goes on with; those in progress are
    charged as an estimate, and a living gateway writes their lines."""
    files = [tmp_path / f"settled-{number}.jsonl" for number in range(2)]
    async with (
        fleet_of(redis, tmp_path, [f'[accounting]\nfile = "{file}"\n' for file in files]) as fleet,
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession() as client,
    ):
        killed, other = fleet.gateways
        fleet.go_on.set()
        for _ in range(FEW):
            await (await fleet.ask(client, killed)).read()
        await until(lambda: files[0].read_bytes().count(b"\n") == FEW)
        written = files[0].read_bytes()
        fleet.go_on.clear()
        running = [await fleet.ask(client, killed, key) for key in (KEY, KEY, FREE)]
        beside = await fleet.ask(client, other)
        killed.process.send_signal(signal.SIGKILL)
        assert await killed.process.wait() == -signal.SIGKILL
        assert files[0].read_bytes() == written, "no line is in part, or of a request that runs"
        await until(lambda: files[1].read_bytes().count(b"\n") == 3)
        assert fleet.leases == 1
        usage = await fleet.usage(client, 1)
        left = lines_of(files[1])
        assert {(line.request_id, line.estimated_tokens) for line in left} == {(None, RESERVED)}
        whose = Counter((line.tenant, line.key_id, line.model) for line in left)
        assert whose == {("acme", "k1", "tiny"): 2, (FREE, FREE, "tiny"): 1}
        lines = lines_of(files[0]) + left
        assert (usage["requests"], usage["estimated_requests"]) == (len(lines), 3)
        assert (usage["total_tokens"], usage["estimated_tokens"]) == (tokens_of(lines), 3 * RESERVED)
        await fleet.start(tmp_path / "gateway-0.toml")
        fleet.go_on.set()
        await (await fleet.ask(client, fleet.gateways[-1])).read()
        await beside.read()
        await until(lambda: files[0].read_bytes().count(b"\n") == FEW + 1)
        await until(lambda: files[1].read_bytes().count(b"\n") == 4)
        assert files[0].read_bytes().startswith(written)
        assert len({line.id for line in lines_of(files[0]) + lines_of(files[1])}) == FEW + 5
        for answer in running:
            answer.close()


def lines_of(file: Path) -> list[BillingLine]:
    return [msgspec.json.decode(line, type=BillingLine) for line in file.read_bytes().splitlines()]


def tokens_of(lines: Sequence[BillingLine]) -> int:
    return sum(line.prompt_tokens + line.completion_tokens + line.estimated_tokens for line in lines)


@pytest.mark.nightly
async def test_rates_and_budgets_are_shared_exactly_by_the_callers_of_three_gateways(fleet: Fleet) -> None:
    """No request ends meanwhile, so that none gives back what it has reserved. A rate lets in as many again
    in each minute, which Redis counts."""
    connector = aiohttp.TCPConnector(limit=0)
    askers = [(key, fleet.gateways[i % GATEWAYS]) for i in range(FEWS_CALLERS) for key in FEW_OF]
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession(connector=connector) as client:
        began_ms = fleet.now_ms()
        answers = await asyncio.gather(*(fleet.ask(client, gateway, key) for key, gateway in askers))
        more = int(FEW * (fleet.now_ms() - began_ms) / 60_000)
        admitted = Counter(key for (key, _), one in zip(askers, answers, strict=True) if one.status == 200)
        assert {one.status for one in answers} == {200, 429}
        assert (admitted["day"], admitted["budget"]) == (FEW, FEW)
        for rate in ("requests", "tokens"):
            assert FEW <= admitted[rate] <= FEW + more, rate
        assert fleet.leases == admitted.total()
        fleet.go_on.set()
        await asyncio.gather(*(one.read() for one in answers))


@pytest.mark.nightly
async def test_a_drained_gateway_settles_what_it_cuts_off(fleet: Fleet) -> None:
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as client:
        answers = [await fleet.ask(client, gateway) for gateway in fleet.gateways]
        drained = fleet.gateways[0]
        drained.process.send_signal(signal.SIGTERM)
        await fleet.until_refused(client, drained)
        drained.process.send_signal(signal.SIGTERM)  # the second ends the drain
        assert await drained.process.wait() == ExitCode.DRAIN_CUT
        assert fleet.leases == 2
        assert b"gateway_stopped" in await answers[0].read()
        usage = await fleet.usage(client, 1)
        assert usage["requests"] == 1
        assert usage["total_tokens"] > 0
        for answer in answers:
            answer.close()

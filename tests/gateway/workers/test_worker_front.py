"""The admin listener of several workers: two gateways of this process behind one port."""

from __future__ import annotations

import asyncio
import io
import itertools
import signal
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.whole import GatewayConfig, load
from gateway.identity.keys import hash_key
from gateway.operators.listener import listen_for_operators
from gateway.operators.together import OperatorAnswer
from gateway.workers import front as fronts
from gateway.workers.accepted import Accepted
from gateway.workers.channel import WorkerClient, WorkerSilent, WorkerStart
from gateway.workers.front import Front
from gateway.workers.process import Worker
from gateway.workers.supervisor import Supervisor, hold_port
from shared.process.exit_codes import ExitCode
from shared.process.lifecycle import Phase
from shared.wire.errors import Unauthenticated
from tests.gateway.conftest import CHAT, KEY, PATIENCE_S, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.workers.test_process import toml

HEADERS = {"authorization": f"Bearer {KEY}"}
OTHER = f'id = "k2"\nhash = "{hash_key("another")}"\ntenant = "acme"\n'
GONE = 'id = "k1"\ndisabled = true'


class Client(WorkerClient):
    """A channel that can be made to hang."""

    is_silent = False
    on_ask: Callable[[], None] = staticmethod(lambda: None)

    async def ask(self, *asked: Any) -> OperatorAnswer:
        self.on_ask()
        if self.is_silent:
            raise WorkerSilent("it hangs")
        return await super().ask(*asked)


class InProcess:
    """A worker that is a gateway of this process."""

    pid = 0

    def __init__(self, index: int, gateway: Gateway, client: Client) -> None:
        self.index = index
        self.gateway = gateway
        self.client = client
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        self._ending = self._ending or asyncio.create_task(self._end())

    async def _end(self) -> None:
        is_clean = await self.gateway.drain()
        await self.gateway.__aexit__()
        self._ended.set_result(ExitCode.CLEAN if is_clean else ExitCode.DRAIN_CUT)

    async def aclose(self) -> None:
        await self.client.aclose()


class House:
    """Two workers, what is in front of them, and an engine behind."""

    def __init__(
        self, engine: FakeEngine, client: aiohttp.ClientSession, file: Path, log: io.StringIO
    ) -> None:
        self.engine = engine
        self.client = client
        self.file = file
        self.log = log
        self.workers: list[InProcess] = []
        self.port = self.admin_port = 0

    async def open(self, stack: AsyncExitStack, config: GatewayConfig) -> None:
        held = hold_port("127.0.0.1", 0)
        stack.callback(held.close)
        self.port = held.getsockname()[1]
        count = itertools.count()

        async def launch(index: int, drained: Sequence[str]) -> Worker:
            socket = str(self.file.parent / f"{next(count)}.sock")
            text = await self.accepted.text()
            start = WorkerStart(text, index, self.port, socket, drained)
            newest = load(tomllib.loads(text), {})
            gateway = await Gateway(newest, path=self.file, worker=start).__aenter__()
            self.workers.append(InProcess(index, gateway, Client(socket)))
            return self.workers[-1]

        self.supervisor = Supervisor(2, launch, 10.0)
        stack.push_async_callback(self.supervisor.drain, asyncio.Event())
        self.accepted = Accepted(config, self.file)
        front = Front(self.supervisor, self.accepted.reload, shares_usage=False)
        operators = replace(config, admin=replace(config.admin, port=0))
        port = await listen_for_operators(stack, front.handle, operators, None)
        assert port is not None
        self.admin_port = port
        await self.supervisor.start(asyncio.Event())
        self.workers.sort(key=lambda worker: worker.index)  # they start side by side
        for worker in self.workers:
            engines = worker.gateway.engines
            await until(lambda: engines.of(config.models[0]).profile is not None)  # noqa: B023

    def admin(self, path: str, method: str = "GET", **options: Any) -> aiohttp.client._RequestContextManager:
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        return self.client.request(method, url, **{"headers": OPERATOR, **options})

    def chat(self, **headers: str) -> aiohttp.client._RequestContextManager:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return self.client.post(url, json={**CHAT, "stream": True}, headers=HEADERS | headers)


@asynccontextmanager
async def opened(tmp_path: Path, log: io.StringIO) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        house = House(engine, client, tmp_path / "gateway.toml", log)
        operator = operator_keys()["keys"][0]
        text = (
            f'{toml(engine.url)}\n[admin]\nport = 0\nkeys = [{{ id = "ops", hash = "{operator["hash"]}" }}]\n'
        )
        house.file.write_text(text)
        await house.open(stack, load(house.file, {}, {"workers": "2"}))
        yield house


@pytest.fixture
async def house(short_tmp: Path, log: io.StringIO) -> AsyncIterator[House]:
    async with asyncio.timeout(6 * PATIENCE_S), opened(short_tmp, log) as found:
        yield found


async def streams(house: House, count: int) -> tuple[list[str], list[aiohttp.ClientResponse]]:
    """The ids and answers of so many streams, which have begun and wait."""
    house.engine.script = stream(chunk("a"), asyncio.Event())
    ids = [f"req-{i}" for i in range(count)]
    answers = [await house.chat(**{"x-request-id": id_}) for id_ in ids]
    for answer in answers:
        await answer.content.readuntil(b"\n\n")
    return ids, answers


async def test_a_request_is_ended_whichever_worker_has_it(house: House) -> None:
    ids, answers = await streams(house, 8)
    async with house.admin("/admin/v1/requests?state=live") as live:
        told = await live.json()
    assert {one["request_id"] for one in told["data"]} == set(ids)
    assert {one["worker"] for one in told["data"]} <= {0, 1}
    for id_, answer in zip(ids, answers, strict=True):
        async with house.admin(f"/admin/v1/requests/{id_}", "DELETE") as ended:
            assert await ended.json() == {"id": id_, "aborted": 1}
        assert b"request_aborted" in await answer.read()


async def test_a_caller_ends_its_request_whichever_worker_has_it(house: House) -> None:
    """Also beside the socket of one that has died."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(house.file.parent / "dead.sock"))
    ids, answers = await streams(house, 16)
    assert {len(worker.gateway.live) > 0 for worker in house.workers} == {True}
    urls = [f"http://127.0.0.1:{house.port}/v1/requests/{id_}" for id_ in ids]
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS) as client:
        asked = await asyncio.gather(*map(client.delete, urls))
        told = [await answer.json() for answer in asked]
    assert told == [{"id": id_, "aborted": 1} for id_ in ids]
    for answer in answers:
        assert b"request_aborted" in await answer.read()


async def test_long_ids_that_nothing_has_keep_no_caller_from_ending_its_request(house: House) -> None:
    """All that is asked of another worker at a time goes there together, and has an end."""
    ids, answers = await streams(house, 4)
    asked = [f"{i}{'z' * 7_500}" for i in range(200)]
    urls = [f"http://127.0.0.1:{house.port}/v1/requests/{id_}" for id_ in (*asked, *ids)]
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS) as client:
        told = [await answer.json() for answer in await asyncio.gather(*map(client.delete, urls))]
    assert [one["aborted"] for one in told] == [0] * len(asked) + [1] * len(ids)
    for answer in answers:
        assert b"request_aborted" in await answer.read()


async def test_a_key_that_is_created_works_at_every_worker_when_the_answer_comes(house: House) -> None:
    house.engine.script = unary()
    async with house.admin("/admin/v1/keys", "POST", json={"tenant": "acme"}) as answer:
        assert answer.status == 200, await answer.text()
        minted = await answer.json()
    headers = {"authorization": f"Bearer {minted['key']}"}
    for worker in house.workers:
        assert worker.gateway.accounts.keys.has(headers["authorization"])
    path = f"/admin/v1/keys/{minted['id']}"
    async with house.admin(path) as shown:
        assert shown.status == 200
        assert shown.headers["etag"]
    async with house.admin(path, "DELETE", headers=OPERATOR | {"if-match": '"other"'}) as no:
        assert no.status == 412
    async with house.admin(path, "DELETE") as gone:
        assert gone.status == 200
    assert not any(worker.gateway.accounts.keys.has(headers["authorization"]) for worker in house.workers)


async def test_a_worker_that_was_not_heard_of_yet_knows_a_new_key_as_well(house: House) -> None:
    """It serves already, up to a heartbeat's time before the supervisor knows."""
    place = house.supervisor.places[1]
    place.status = None
    async with house.admin("/admin/v1/keys", "POST", json={"tenant": "acme"}) as answer:
        minted = await answer.json()
    assert "partial" not in minted
    for worker in house.workers:
        assert worker.gateway.accounts.keys.has(f"Bearer {minted['key']}")


async def test_a_place_without_a_worker_is_named_as_one_that_does_not_know_a_change(house: House) -> None:
    place = house.supervisor.places[1]
    place.status, worker, place._worker = None, place._worker, None
    async with house.admin("/admin/v1/keys", "POST", json={"tenant": "acme"}) as answer:
        assert (await answer.json())["silent_workers"] == [1]
    place._worker = worker


@pytest.mark.parametrize("how", ["by an operator", "in the file"])
async def test_a_revoked_key_stays_so_at_a_replaced_worker_whatever_became_of_the_file(
    house: House, how: str
) -> None:
    if how == "by an operator":
        async with house.admin("/admin/v1/keys/k1", "DELETE") as answer:
            assert answer.status == 200, await answer.text()
    else:
        house.file.write_text(f"{house.file.read_text()}\n[[keys]]\n{OTHER}".replace('id = "k1"', GONE))
        async with house.admin("/admin/v1/reload", "POST") as answer:
            assert answer.status == 200, await answer.text()
    house.file.write_text(f"{house.file.read_text()}\n[[keys]]\nid = 'without a hash'")
    async with house.admin("/admin/v1/reload", "POST") as answer:
        assert answer.status == 400
    house.workers[0].signal(signal.SIGTERM)  # which nobody sent who may
    await until(lambda: len(house.workers) == 3 and house.supervisor.places[0].is_ready)
    for worker in house.workers[1:]:
        with pytest.raises(Unauthenticated):
            worker.gateway.accounts.keys.authenticate(HEADERS["authorization"], time.time())


@pytest.mark.parametrize("is_good", [True, False])
async def test_a_worker_reads_the_file_before_it_listens_and_keeps_what_it_has_if_that_is_bad(
    short_tmp: Path, is_good: bool
) -> None:
    file, text = short_tmp / "gateway.toml", toml("http://127.0.0.1:1")
    revoked = text.replace('id = "k1"', GONE)
    file.write_text(revoked if is_good else f"{text}\n[[keys]]\nid = 'without a hash'")
    with hold_port("127.0.0.1", 0) as held:
        start = WorkerStart("", 0, held.getsockname()[1], str(short_tmp / "0.sock"))
        given = tomllib.loads(text if is_good else revoked)
        async with Gateway(load(given, {}), path=file, worker=start) as gateway:
            with pytest.raises(Unauthenticated):
                gateway.accounts.keys.authenticate(HEADERS["authorization"], time.time())


async def test_a_drained_replica_stays_so_at_a_replaced_worker(house: House) -> None:
    path = "/admin/v1/replicas"
    [id_] = {one.id for one in house.workers[0].gateway.replicas.members()}
    async with house.admin(f"{path}/{id_}/drain", "POST") as answer:
        assert (await answer.json())["drained_by"] == ["operator"]
    assert [place.drained for place in house.supervisor.places] == [[id_], [id_]]
    house.workers[0].signal(signal.SIGTERM)  # which nobody sent who may
    await until(lambda: len(house.workers) == 3 and house.supervisor.places[0].is_ready)
    assert house.workers[2].gateway.replicas.drained == [id_]
    async with house.admin(path) as listed:
        page = await listed.json()
    assert {one["worker"]: one["phase"] for one in page["data"]} == {0: "draining", 1: "draining"}
    async with house.admin(f"{path}/{id_}/undrain", "POST") as answer:
        assert (await answer.json())["drained_by"] == []
    assert not any(worker.gateway.replicas.drained for worker in house.workers[1:])
    async with house.admin(f"{path}/nobody/drain", "POST") as answer:
        assert answer.status == 404


async def test_a_worker_that_begins_to_serve_while_a_replica_is_drained_is_told_as_well(house: House) -> None:
    [id_] = {one.id for one in house.workers[0].gateway.replicas.members()}
    late = house.supervisor.places[1]
    status, late.status = late.status, None

    def begin() -> None:
        late.status = status

    house.workers[0].client.on_ask = begin
    async with house.admin(f"/admin/v1/replicas/{id_}/drain", "POST") as answer:
        assert answer.status == 200
    assert [worker.gateway.replicas.drained for worker in house.workers] == [[id_], [id_]]


async def test_a_silent_worker_is_named_and_holds_up_nobody(house: House) -> None:
    house.workers[0].client.is_silent = True
    async with house.admin("/admin/v1/reload", "POST") as answer:
        assert await answer.json() == {"reloaded": True, "partial": True, "silent_workers": [0]}
    async with house.admin("/admin/v1/keys") as answer:
        assert answer.status == 200, "the other is asked"
    async with house.admin("/admin/openapi.json") as answer:
        assert answer.status == 200
    async with house.admin("/metrics") as answer:
        assert answer.headers[fronts.SILENT_HEADER] == "0"
        assert 'penstock_gateway_workers{phase="serving"} 2.0' in await answer.text()
    async with house.admin("/admin/v1/keys", "POST", json={"tenant": "acme"}) as answer:
        assert answer.status == 503
        assert "Worker 0 did not answer" in await answer.text()
    house.workers[0].client.is_silent, house.workers[1].client.is_silent = False, True
    async with house.admin("/admin/v1/keys", "POST", json={"tenant": "acme"}) as answer:
        assert (await answer.json())["silent_workers"] == [1]
    house.workers[0].client.is_silent = True
    for path, method in (
        ("/admin/v1/keys", "GET"),
        ("/admin/v1/reload", "POST"),
        ("/admin/v1/tenants/a", "PUT"),
    ):
        async with house.admin(path, method, json={} if method == "PUT" else None) as answer:
            assert answer.status == 503
    for worker in house.workers:
        worker.client.is_silent = False


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/worker/status", "GET", 404),
        ("/worker/refresh", "POST", 404),
        ("/admin/v1/../../worker/refresh", "POST", 404),
        ("/nothing", "GET", 404),
        ("/metrics", "POST", 405),
        ("/readyz", "POST", 405),
        ("/readyz", "GET", 200),
        ("/livez", "HEAD", 200),
        ("/livez", "OPTIONS", 200),
        ("/admin/v1/keys", "HEAD", 200),
        ("/admin/v1/nothing", "GET", 404),
        ("/admin/v1/usage?by=nobody", "GET", 400),
        ("/admin/v1/usage", "GET", 200),
    ],
)
async def test_what_is_answered(house: House, path: str, method: str, status: int) -> None:
    async with house.admin(path, method, headers=OPERATOR | {"x-request-id": "mine"}) as answer:
        assert answer.status == status, await answer.text()
        assert answer.headers.getall("x-request-id") == ["mine"]
        assert answer.headers.getall("server") == ["penstock"]


async def test_workers_decide_who_may_ask(house: House) -> None:
    for headers, status in (({}, 401), (HEADERS, 403)):
        for path, method in (
            ("/admin/v1/reload", "POST"),
            ("/admin/v1/keys", "GET"),
            ("/admin/v1/keys", "POST"),
        ):
            async with house.admin(path, method, headers=headers) as answer:
                assert answer.status == status
    assert "admin.change" not in house.log.getvalue()


async def test_what_no_worker_has_changed_is_not_told_again(house: House) -> None:
    house.engine.script = stream(chunk("a"))

    async def poll(known: str) -> tuple[int, str, bytes]:
        headers = OPERATOR | {"if-none-match": known}
        async with house.admin("/admin/v1/requests?state=done", headers=headers) as answer:
            return answer.status, answer.headers["etag"], await answer.read()

    etag = (await poll('"none"'))[1]
    for count in range(1, 4):
        assert await poll(etag) == (304, etag, b"")
        async with house.chat() as answer:
            await answer.read()
        await until(lambda: sum(len(one.gateway._recorder) for one in house.workers) == count)  # noqa: B023
        status, etag, body = await poll(etag)
        assert (status, body.count(b'"request_id"')) == (200, count), "one worker's are as they were"


async def test_usage_in_memory_is_added_up(house: House) -> None:
    house.engine.script = stream(chunk("a"))
    for _ in range(6):
        async with house.chat() as answer:
            await answer.read()
    await until(lambda: house.log.getvalue().count('"request.completed"') == 6)
    async with house.admin("/admin/v1/usage") as usage:
        rows = (await usage.json())["rows"]
    assert [(row["tenant"], row["requests"]) for row in rows] == [("acme", 6)]


async def test_operators_who_ask_too_much_at_once_are_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "ASKING_MAX", 1)
    asked, told = asyncio.Event(), asyncio.Event()

    async def slow(_: Front, *asks: object) -> OperatorAnswer:
        assert not asked.is_set(), "one asks already"
        asked.set()
        await told.wait()
        return OperatorAnswer(200, {}, b"{}")

    monkeypatch.setattr(Front, "_ask", slow)

    async def ask() -> int:
        async with house.admin("/admin/v1/keys") as answer:
            return answer.status

    first = asyncio.create_task(ask())
    await asked.wait()
    assert await ask() == 503
    async with house.admin("/readyz") as answer:
        assert answer.status == 200
    told.set()
    assert await first == 200


async def test_a_front_without_workers_says_so(house: House) -> None:
    await house.supervisor.drain(asyncio.Event())
    assert house.supervisor.lifecycle.phase is Phase.DRAINING
    for path, method, status in (
        ("/readyz", "GET", 503),
        ("/livez", "GET", 200),
        ("/admin/v1/keys", "GET", 503),
        ("/admin/v1/keys", "POST", 503),
        ("/admin/openapi.json", "GET", 503),
        ("/admin/openapi.jsonx", "GET", 404),
        ("/metrics", "GET", 200),
    ):
        async with house.admin(path, method) as answer:
            assert answer.status == status


def test_a_port_that_another_gateway_has_is_not_shared_by_accident() -> None:
    with hold_port("127.0.0.1", 0) as held:
        held.listen()
        with pytest.raises(OSError, match="in use"):
            hold_port("127.0.0.1", held.getsockname()[1])


async def test_bodies_that_do_not_come_keep_no_operator_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a key are refused before, and those of operators are not counted until they have come."""
    monkeypatch.setattr(fronts, "ASKING_MAX", 2)
    writers = []
    right = f"authorization: {OPERATOR['authorization']}\r\n"
    for headers in ("", "authorization: Bearer wrong\r\n", right):
        for _ in range(2 * fronts.ASKING_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", house.admin_port)
            writer.write(
                f"POST /admin/v1/keys HTTP/1.1\r\nhost: [::1]\r\n{headers}content-length: 10\r\n\r\n".encode()
            )
            writers.append(writer)
            if headers != right:
                assert (await reader.readuntil(b"\r\n")).split()[1] == b"401"
    for path in ("/admin/v1/keys", "/metrics"):
        async with house.admin(path) as answer:
            assert answer.status == 200
    for writer in writers:
        writer.transport.abort()


async def test_scrapes_at_one_time_share_a_look_and_are_all_answered(house: House) -> None:
    asked = 0

    def count() -> None:
        nonlocal asked
        asked += 1

    for worker in house.workers:
        worker.client.on_ask = count

    async def scrape() -> int:
        async with house.admin("/metrics", headers={}) as answer:
            return answer.status

    statuses = await asyncio.gather(*(scrape() for _ in range(2 * fronts.ASKING_MAX - 20)))
    assert set(statuses) == {200}
    assert asked < len(statuses)

"""Clients that leave, at every stage: the engine is told, nothing stays held, the log says where."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.admission.quota import Decision, ReservationId, Subject
from gateway.admission.usage import Payer, Used
from gateway.request import edge, pace
from shared.fairness.fair_turns import BEGIN_MAX
from shared.wire.errors import EngineFailed
from shared.wire.ids import RequestId, TenantId
from shared.wire.sse import DONE, closing_comment, error_event
from tests.fakes import VirtualClock
from tests.gateway.conftest import CHAT, KEY, OTHER_KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import HEADERS, Script, chunk, closing, stream, unary

pytestmark = pytest.mark.both_protocols


class RawClient:
    """A client whose connection the test holds in its hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, house: House, receive_buffer_len: int | None = None) -> RawClient:
        sock = socket.socket()
        if receive_buffer_len is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_len)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", house.gateway.port))
        return cls(*await asyncio.open_connection(sock=sock))

    @classmethod
    async def posting(cls, house: House, body: bytes, **head: Any) -> RawClient:
        """A client that has sent a request."""
        client = await cls.of(house)
        client.post(body, **head)
        return client

    def post(
        self, body: bytes, *, path: str = "/v1/chat/completions", length: int | None = None, key: str = KEY
    ) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {len(body) if length is None else length}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)

    def leave(self) -> None:
        assert self.writer.transport is not None
        self.writer.transport.abort()


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(CHAT | fields)


async def left_at(house: House, stage: str) -> None:
    """The client was noticed to leave in this stage, and the engine that had its request is told so."""
    if stage in ("wait", "relay"):
        async with asyncio.timeout(PATIENCE_S):
            await house.engine.seen[0].cancelled.wait()
    line = await house.line()
    assert line["status"] == 499
    assert line["end_reason"] == "client_cancel"
    assert line["stage"] == stage
    await house.at_rest()


async def test_disconnect_while_the_body_is_sent(house: House) -> None:
    client = await RawClient.posting(house, b'{"model":', length=1000)
    await until(lambda: len(house.gateway.live) == 1)
    client.leave()
    await left_at(house, "body")
    assert not house.engine.seen


async def test_who_leaves_behind_a_flood_of_leavers_is_ended_next(house: House) -> None:
    """The requests of callers who leave together are ended in turns, in which tenants follow one another."""
    flood = 10 * BEGIN_MAX
    clients = [await RawClient.of(house) for _ in range(flood + 1)]
    for client in clients:
        client.post(b'{"model":', length=1000, key=KEY if client is not clients[-1] else OTHER_KEY)
    await until(lambda: len(house.gateway.live) == flood + 1)
    for client in clients:
        client.leave()
    counts = [flood + 1]
    async with asyncio.timeout(PATIENCE_S):
        while counts[-1]:
            await asyncio.sleep(0)
            counts.append(len(house.gateway.live))
    assert max(before - after for before, after in itertools.pairwise(counts)) <= BEGIN_MAX
    lines = await house.lines(flood + 1)
    assert [line["tenant"] for line in lines].index("other") <= 3 * BEGIN_MAX < flood
    assert {line["end_reason"] for line in lines} == {"client_cancel"}
    await house.at_rest()


async def test_disconnect_while_the_prompt_is_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = asyncio.Event()

    async def forever(*_: object) -> Any:
        counting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("gateway.request.pipeline.count_tokens", forever)
    client = await RawClient.posting(house, body())
    await counting.wait()
    client.leave()
    await left_at(house, "tokenize")
    assert not house.engine.seen


@pytest.mark.parametrize("granted", [False, True], ids=["before the grant", "after the grant"])
async def test_disconnect_while_the_quota_is_reserved(
    house: House, monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    """A store over the network answers late: the grant may stand although nobody heard of it."""
    reserving = asyncio.Event()
    reserve = house.store.reserve

    async def slowly(
        reservation: ReservationId,
        subjects: list[Subject],
        least: int,
        most: int,
        payer: Payer,
        *,
        wanted: int,
    ) -> Decision:
        if granted:
            await reserve(reservation, subjects, least, most, payer, wanted=wanted)
        reserving.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(house.store, "reserve", slowly)
    client = await RawClient.posting(house, body())
    await reserving.wait()
    client.leave()
    await left_at(house, "quota")
    assert not house.engine.seen
    assert (house.store.ledger.reserved > 0) is granted
    assert house.store.ledger.settled == 0


async def test_disconnect_while_a_connection_to_the_engine_is_opened(open_house: Open) -> None:
    """A listener whose backlog is full answers nothing at all."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        house = await open_house()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        stuck = house.gateway.replicas._pools["tiny"].replicas[0]
        stuck.url = url
        client = await RawClient.posting(house, body())
        await until(lambda: stuck.view.requests == 1)
        await until(lambda: any(e.stages.now == "connect" for e in house.gateway.live._exchanges))
        client.leave()
        await left_at(house, "connect")
        assert house.store.ledger.settled == 0
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_disconnect_before_the_engines_headers(house: House, is_stream: bool) -> None:
    house.engine.script = Script([asyncio.Event(), HEADERS])
    client = await RawClient.posting(house, body(stream=is_stream))
    await house.engine.arrived.wait()
    client.leave()
    await left_at(house, "wait")
    assert house.store.ledger.settled == house.store.ledger.reserved - house.store.ledger.released > 0


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_disconnect_before_the_first_token(house: House, is_stream: bool) -> None:
    script = stream(asyncio.Event()) if is_stream else unary()
    house.engine.script = Script([HEADERS, asyncio.Event()], 200, script.content_type)
    client = await RawClient.posting(house, body(stream=is_stream))
    await house.engine.arrived.wait()
    client.leave()
    await left_at(house, "wait")


@pytest.mark.parametrize("is_half", [False, True], ids=["closed", "half-closed"])
async def test_disconnect_in_the_middle_of_a_stream(house: House, is_half: bool) -> None:
    house.engine.script = stream(chunk("a"), asyncio.Event())
    client = await RawClient.posting(house, body(stream=True))
    await client.reader.readuntil(b"\n\n")
    if is_half:
        client.writer.write_eof()
    else:
        client.leave()
    await left_at(house, "relay")
    line = await house.line()
    assert line["events"] == 1
    assert line["settled_tokens"] == line["reserved_tokens"], "nobody told what was computed"
    client.leave()


@pytest.mark.parametrize("is_stream", [True, False], ids=["fast stream", "unary"])
async def test_disconnect_in_the_middle_of_a_large_answer(house: House, is_stream: bool) -> None:
    """The client is noticed to be gone by a write that fails, too."""
    fast = Script([chunk("x" * 1000)] * 20_000)
    whole = Script([HEADERS, b"x" * 1_000_000, asyncio.Event()], 200, "application/json")
    house.engine.script = fast if is_stream else whole
    client = await RawClient.posting(house, body(stream=is_stream))
    await client.reader.readuntil(b"xxx")
    client.leave()
    await left_at(house, "relay")


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_connection_that_is_half_closed_before_the_answer_gets_none(
    house: House, is_stream: bool
) -> None:
    """Nothing tells a caller who has only done sending from one who is gone."""
    house.engine.script = Script([asyncio.Event(), HEADERS])
    client = await RawClient.posting(house, body(stream=is_stream))
    await house.engine.arrived.wait()
    client.writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        await house.engine.seen[0].cancelled.wait()
        assert await client.reader.read() == b""
    await left_at(house, "wait")
    assert house.store.ledger.settled == house.store.ledger.reserved - house.store.ledger.released > 0
    client.leave()


async def test_a_connection_that_is_half_closed_with_its_request_gets_no_answer(house: House) -> None:
    house.engine.script = Script([asyncio.Event(), HEADERS])
    client = await RawClient.posting(house, body())
    client.writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        assert await client.reader.read() == b""
    line = await house.line()
    assert (line["status"], line["end_reason"]) == (499, "client_cancel")
    await house.at_rest()
    client.leave()


async def test_a_hundred_disconnects_at_random_moments_leak_nothing(house: House) -> None:
    def script(_: object) -> Script:
        return stream(*(chunk(str(i)) for i in range(50)))

    house.engine.script = script

    async def one(turns: int) -> None:
        client = await RawClient.posting(house, body(stream=turns % 2 == 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        client.leave()

    await asyncio.gather(*(one(turns) for turns in range(100)))
    await until(lambda: not len(house.gateway.live) and not house.engine.active)
    await house.at_rest()
    assert {line["end_reason"] for line in house._lines()} <= {"ok", "client_cancel"}


# -- explicit abort -------------------------------------------------------------------------------


@pytest.fixture
async def streaming(house: House) -> AsyncIterator[tuple[House, Callable[[], Any]]]:
    """A stream of id `mine` that has begun and waits."""
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True, headers={"x-request-id": "mine"}) as answer:
        yield house, answer.read


async def test_abort_by_delete_ends_a_stream_with_an_error_event(streaming: tuple[House, Any]) -> None:
    house, read = streaming
    url = f"{house.url}/v1/requests/mine"
    async with house.client.delete(url, headers=house.headers) as answer:
        assert answer.status == 200
        assert await answer.json() == {"id": "mine", "aborted": 1}
    rest = await read()
    assert b"request_aborted" in rest
    assert b"[DONE]" not in rest
    await house.engine.seen[0].cancelled.wait()
    async with house.client.delete(url, headers=house.headers) as answer:
        assert await answer.json() == {"id": "mine", "aborted": 0}
    ends = {line["end_reason"] for line in await house.lines(3)}
    assert ends == {"ok", "aborted"}
    await house.at_rest()


async def test_abort_by_delete_ends_a_unary_request_with_499(house: House) -> None:
    house.engine.script = Script([asyncio.Event()])
    pending = asyncio.ensure_future(house.chat(headers={"x-request-id": "mine"}).__aenter__())
    await house.engine.arrived.wait()
    async with house.client.delete(f"{house.url}/v1/requests/mine", headers=house.headers) as answer:
        assert (await answer.json())["aborted"] == 1
    answer = await pending
    assert answer.status == 499
    assert answer.headers["x-should-retry"] == "false"
    assert (await answer.json())["error"]["code"] == "request_aborted"
    await house.at_rest()


async def test_abort_by_delete_does_not_end_itself_when_it_has_the_same_id(
    streaming: tuple[House, Any],
) -> None:
    house, read = streaming
    url, headers = f"{house.url}/v1/requests/mine", house.headers | {"x-request-id": "mine"}
    for aborted in (1, 0):
        async with house.client.delete(url, headers=headers) as answer:
            assert answer.status == 200
            assert await answer.json() == {"id": "mine", "aborted": aborted}
        if aborted:
            assert b"request_aborted" in await read()
    assert sorted(line["end_reason"] for line in await house.lines(3)) == ["aborted", "ok", "ok"]


async def test_abort_by_delete_ends_only_requests_of_the_same_tenant(streaming: tuple[House, Any]) -> None:
    house, _ = streaming
    other = {"authorization": "Bearer other-key"}
    for request_id, headers in (("mine", other), ("min", house.headers), ("mine2", house.headers)):
        async with house.client.delete(f"{house.url}/v1/requests/{request_id}", headers=headers) as answer:
            assert (await answer.json())["aborted"] == 0
    assert len(house.gateway.live) == 1


async def test_a_flood_of_deletes_is_its_tenants_own(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a key that may ask for nothing: each is looked for by every worker."""
    monkeypatch.setattr(edge, "ENDS_AT_ONCE", 3)
    house = await open_house(tenant={"limits": {"requests_per_min": 0}}, clock=VirtualClock())
    told: list[str] = []

    async def end_elsewhere(tenant: TenantId, _: RequestId) -> int:
        told.append(tenant)
        return 0

    house.gateway._edge.end_elsewhere = end_elsewhere
    url, victim = f"{house.url}/v1/requests/mine", {"authorization": "Bearer other-key"}
    for status in (200, 200, 200, 429, 429):
        async with house.client.delete(url, headers=house.headers) as answer:
            assert answer.status == status
    assert int(answer.headers["retry-after-ms"]) <= 1000 / edge.ENDS_PER_S + 1
    async with house.client.delete(url, headers=victim) as answer:
        assert answer.status == 200
    assert told == ["acme"] * 3 + ["other"]


# -- who leaves with everything has not cancelled -------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_disconnect_after_the_last_event_is_logged_as_ok(house: House, is_stream: bool) -> None:
    house.engine.script = stream(chunk("a")) if is_stream else unary()
    for _ in range(20):
        client = await RawClient.posting(house, body(stream=is_stream))
        await client.reader.readuntil(b"[DONE]\n\n" if is_stream else b'"fp"}')
        client.leave()
    lines = await house.lines(20)
    assert {(line["status"], line["end_reason"], line["settled_tokens"]) for line in lines} == {
        (200, "ok", 13)
    }
    await house.at_rest()


async def test_a_disconnect_after_the_engines_error_event_is_no_cancellation(house: House) -> None:
    event = error_event(EngineFailed("The engine failed."))
    comment = closing_comment(closing(reason="engine_failed"))
    house.engine.script = Script([chunk("a"), event + comment, asyncio.Event()])
    client = await RawClient.posting(house, body(stream=True))
    await client.reader.readuntil(event)
    client.leave()
    line = await house.line()
    assert (line["status"], line["end_reason"], line["settled_tokens"]) == (200, "engine_failed", 13)
    await house.at_rest()


async def test_a_disconnect_during_settlement_does_not_stop_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.engine.script = unary()
    settling, go_on, settle = asyncio.Event(), asyncio.Event(), house.store.settle

    async def slowly(reservation: ReservationId, used: Used) -> Any:
        settling.set()
        await go_on.wait()
        return await settle(reservation, used)

    monkeypatch.setattr(house.store, "settle", slowly)
    client = await RawClient.posting(house, body())
    await settling.wait()
    client.leave()
    await asyncio.sleep(0)
    go_on.set()
    line = await house.line()
    assert (line["status"], line["end_reason"], line["settled_tokens"]) == (200, "ok", 13)
    await house.at_rest()


async def test_an_abort_after_the_whole_answer_changes_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.engine.script = stream(chunk("a"))
    settling, go_on, settle = asyncio.Event(), asyncio.Event(), house.store.settle

    async def slowly(reservation: ReservationId, used: Used) -> Any:
        settling.set()
        await go_on.wait()
        return await settle(reservation, used)

    monkeypatch.setattr(house.store, "settle", slowly)
    async with house.chat(stream=True, headers={"x-request-id": "mine"}) as answer:
        assert await answer.read() == chunk("a") + DONE
        await settling.wait()
        # on another connection: on this one it would wait for the first request's end
        async with (
            aiohttp.ClientSession() as other,
            other.delete(f"{house.url}/v1/requests/mine", headers=house.headers) as deleted,
        ):
            assert (await deleted.json())["aborted"] == 1
        go_on.set()
        lines = await house.lines(2)
    assert {(line["status"], line["end_reason"]) for line in lines} == {(200, "ok")}
    await house.at_rest()


def test_a_pace_is_kept_of_a_bounded_number_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "TENANTS_MAX", 2)
    kept = pace.Pace(1.0, 1)
    for name in ("one", "two", "three"):
        assert kept.wait_s(TenantId(name), 0.0) == 0.0
    assert len(kept._free_at_s) == 2

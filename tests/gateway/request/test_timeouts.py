"""Every wait has its own bound, its own error and its own end reason; and the engine is told.

Each can be set for everybody, for a model, for a class of tenants and for a tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from gateway.client import connection as connections
from gateway.client.connection import BoundedConnection
from gateway.client.deadlines import Watch
from gateway.request import edge
from shared.wire.errors import ApiError, FirstTokenTimeout, InterTokenTimeout, RequestAborted, TotalTimeout
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import HEADERS, Script, Step, chunk, stream
from tests.gateway.request.test_disconnect import RawClient, body

SOON_S = 0.05

Set = Callable[..., dict[str, Any]]
LEVELS: dict[str, Set] = {
    "everybody's": lambda **s: {"timeouts": s},
    "the model's": lambda **s: {"model": {"timeouts": s}},
    "the tenant's": lambda **s: {"tenant": {"timeouts": s}},
}


@pytest.fixture(params=list(LEVELS.values()), ids=list(LEVELS))
def level(request: pytest.FixtureRequest) -> Set:
    """Where a timeout is set: every test of one runs at every level."""
    level: Set = request.param
    return level


async def ended(house: House, reason: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await house.engine.seen[0].cancelled.wait()
    line = await house.line()
    assert line["end_reason"] == reason
    assert line["status"] == status
    await house.at_rest()


@pytest.mark.parametrize("head_is_sent", [False, True])
async def test_first_token_timeout(open_house: Open, level: Set, head_is_sent: bool) -> None:
    """Whether the engine's headers came or not: a head is no token."""
    never = asyncio.Event()
    steps: list[Step] = [HEADERS, never] if head_is_sent else [never, HEADERS]
    house = await open_house(**level(first_token_s=SOON_S))
    house.engine.script = Script(steps)
    async with house.chat(stream=True) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "first_token_timeout"
    await ended(house, "first_token_timeout", 504)


async def test_a_comment_does_not_stop_the_first_token_timeout(open_house: Open) -> None:
    house = await open_house(timeouts={"first_token_s": SOON_S})
    house.engine.script = Script([b": ping\n\n", asyncio.Event()])
    async with house.chat(stream=True) as answer:
        assert answer.status == 504


async def test_a_comment_does_not_stop_the_inter_token_timeout(open_house: Open) -> None:
    house = await open_house(timeouts={"inter_token_s": SOON_S, "total_s": 600 * SOON_S})
    house.engine.script = Script([chunk("a"), *[b": ping\n\n"] * 1_000_000])
    async with house.chat(stream=True) as answer:
        assert b"inter_token_timeout" in await answer.read()
    await ended(house, "inter_token_timeout", 200)


async def test_inter_token_timeout(open_house: Open, level: Set) -> None:
    house = await open_house(**level(inter_token_s=SOON_S))
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True) as answer:
        rest = await answer.read()
    assert rest.startswith(chunk("a"))
    assert b"inter_token_timeout" in rest
    assert b"[DONE]" not in rest
    await ended(house, "inter_token_timeout", 200)


async def test_total_timeout(open_house: Open, level: Set) -> None:
    house = await open_house(**level(total_s=20 * SOON_S))
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True) as answer:
        assert b"total_timeout" in await answer.read()
    await ended(house, "total_timeout", 200)


async def test_a_unary_answer_is_bounded_by_the_total_timeout_alone(open_house: Open, level: Set) -> None:
    house = await open_house(**level(total_s=4 * SOON_S, first_token_s=SOON_S, inter_token_s=SOON_S))
    house.engine.script = Script([asyncio.Event(), HEADERS])
    async with house.chat() as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "total_timeout"
    await ended(house, "total_timeout", 504)


async def test_connect_timeout(open_house: Open, level: Set) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        house = await open_house(**level(connect_s=SOON_S))
        house.gateway.replicas._pools["tiny"].replicas[0].url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        async with house.chat() as answer:
            assert answer.status == 504
            assert (await answer.json())["error"]["code"] == "connect_timeout"
        line = await house.line()
        assert line["end_reason"] == "connect_timeout"
        assert line["settled_tokens"] == 0
        await house.at_rest()
        for filler in fillers:
            filler.close()


async def test_slow_client_timeout(open_house: Open, level: Set) -> None:
    """Pressure reaches the engine: it is not read beyond what bounded buffers hold."""
    house = await open_house(**level(slow_client_s=10 * SOON_S))
    house.engine.script = Script([chunk("x" * 1000)] * 100_000)
    client = await RawClient.of(house, receive_buffer_len=16 * 1024)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    client.post(body(stream=True))
    await until(lambda: bool(house.engine.seen))
    await ended(house, "slow_client", 200)
    assert house.engine.written < 1_000_000
    client.leave()


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: "], ids=["nothing", "half a head"]
)
@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["at first", "next"])
async def test_an_idle_connection_is_closed_after_its_timeout(
    open_house: Open, before: bytes, said: bytes
) -> None:
    house = await open_house(timeouts={"idle_s": SOON_S})
    client = await RawClient.of(house)
    client.writer.write(before + said)
    async with asyncio.timeout(PATIENCE_S):
        answer = await client.reader.read()
    client.leave()
    assert answer.startswith(b"HTTP/1.1 200") if before else not answer


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["at first", "next"])
async def test_a_head_that_drips_is_ended_after_its_timeout(open_house: Open, before: bytes) -> None:
    """However often a byte comes, and however long an idle connection may live."""
    house = await open_house(timeouts={"head_s": 4 * SOON_S, "idle_s": 60})
    client = await RawClient.of(house)
    client.writer.write(before)
    if before:
        await client.reader.readuntil(b"}")
    client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
    async with asyncio.timeout(PATIENCE_S):
        while True:  # until the connection is closed
            with contextlib.suppress(TimeoutError):
                assert await asyncio.wait_for(client.reader.read(), SOON_S) == b""
                break
            client.writer.write(b"a")
            async with house.get("/v1/models") as answer:
                assert answer.status == 200, "others are served meanwhile"
    client.leave()
    assert not len(house.gateway.live)


async def test_backpressure_of_a_slow_client_holds_up_no_other_stream(open_house: Open) -> None:
    house = await open_house()
    house.engine.script = lambda seen: Script(
        [chunk("x" * 1000)] * (100_000 if "big" in str(seen.body) else 3)
    )
    slow = await RawClient.of(house)
    slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
    slow.post(body(stream=True, user="big"))
    await house.engine.arrived.wait()
    for _ in range(5):
        async with house.chat(stream=True) as answer:
            assert b"xxx" in await answer.read()
    slow.leave()


async def test_the_most_specific_timeout_wins_longer_or_shorter(open_house: Open) -> None:
    house = await open_house(
        timeouts={"total_s": SOON_S, "inter_token_s": SOON_S},
        model={"timeouts": {"total_s": SOON_S, "first_token_s": 30, "inter_token_s": 60}},
        tenant={"timeouts": {"total_s": 60, "inter_token_s": 2 * SOON_S}},
    )
    house.engine.script = stream(chunk("a"), asyncio.Event())
    async with house.chat(stream=True) as answer:
        assert b"inter_token_timeout" in await answer.read()
    await ended(house, "inter_token_timeout", 200)


# -- the watch itself -----------------------------------------------------------------------------


async def outcome(watch: Watch, work: Callable[[], Awaitable[None]]) -> type[BaseException]:
    """How waiting forever ended, after `work` within the watch."""
    try:
        with watch:
            await work()
            await asyncio.Event().wait()
    except ApiError as error:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "the task can be cancelled again"
        return type(error)
    raise AssertionError("it did not end")


async def test_the_watch_raises_its_reason() -> None:
    watch = Watch(10)

    async def work() -> None:
        watch.expect(0.01, FirstTokenTimeout, "late")

    assert await outcome(watch, work) is FirstTokenTimeout


async def test_the_total_timeout_wins_over_a_later_deadline() -> None:
    watch = Watch(0.01)

    async def work() -> None:
        watch.expect(5, FirstTokenTimeout, "late")

    assert await outcome(watch, work) is TotalTimeout


@pytest.mark.parametrize(("first_s", "then_s"), [(10, 0.01), (0.01, 0.02)], ids=["shorter", "longer"])
async def test_a_changed_total_timeout_counts_from_the_start(first_s: float, then_s: float) -> None:
    watch = Watch(first_s)

    async def work() -> None:
        watch.bound(then_s)
        assert watch._deadline_s == watch._started_s + then_s

    assert await outcome(watch, work) is TotalTimeout


async def test_a_deadline_can_be_moved_both_ways() -> None:
    watch = Watch(10)

    async def work() -> None:
        watch.expect(0.01, FirstTokenTimeout, "late")
        timer = watch._timer
        watch.relax()
        await until(lambda: watch._timer is not timer)  # it fired early, and was set again
        watch.expect(5, FirstTokenTimeout, "late")
        watch.expect(0.01, InterTokenTimeout, "late")

    assert await outcome(watch, work) is InterTokenTimeout


async def test_a_renewed_deadline_has_its_full_time() -> None:
    watch = Watch(10)

    async def work() -> None:
        watch.expect(0.02, InterTokenTimeout, "late")
        first_s = watch._deadline_s
        timer = watch._timer
        await until(lambda: watch._loop.time() > first_s - 0.01)
        watch.again()
        assert watch._deadline_s > first_s
        await until(lambda: watch._timer is not timer)  # it fired early, and was set again

    assert await outcome(watch, work) is InterTokenTimeout


async def test_the_total_timeout_wins_over_a_renewed_deadline() -> None:
    watch = Watch(0.02)

    async def work() -> None:
        watch.expect(0.015, InterTokenTimeout, "late")
        while watch._loop.time() <= watch._started_s + 0.006:
            pass  # awaiting would let the timer fire first, on a machine that is busy for 9 ms
        watch.again()

    assert await outcome(watch, work) is TotalTimeout


async def test_ending_a_watch_twice_or_after_its_end_changes_nothing() -> None:
    watch = Watch(10)

    async def work() -> None:
        watch.end(RequestAborted("first"))
        watch.end(TotalTimeout("second"))

    assert await outcome(watch, work) is RequestAborted
    watch.end(TotalTimeout("third"))
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_wins_over_a_timeout() -> None:
    watch = Watch(10)

    async def work() -> None:
        watch.end(RequestAborted("x"))

    task = asyncio.create_task(outcome(watch, work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["read no more", "closed with it", "closed as idle"])
async def test_an_answer_that_aiohttp_writes_holds_a_connection_that_is_not_read_for_a_bounded_time(
    open_house: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also behind the end of the connection, where its buffers hold what nobody reads."""
    unread = web.Response(body=b"x" * 4_000_000)
    monkeypatch.setattr(edge, "probe_response", lambda *_: unread)
    idle_s, buffer = (
        SOON_S if how == "closed as idle" else 60,
        1024 if how == "read no more" else 16 * 1024**2,
    )
    times = {"slow_client_s": 2 * SOON_S, "idle_s": idle_s}
    monkeypatch.setattr(connections, "WRITE_BUFFER_LEN", buffer)
    house = await open_house(timeouts=times)
    closes = "connection: close\r\n" if how == "closed with it" else ""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, limit=1)
    writer.write(f"GET /livez HTTP/1.1\r\nhost: here\r\n{closes}\r\n".encode())
    await reader.readexactly(1)
    assert house.gateway._public is not None
    server = house.gateway._public._server
    await until(lambda: not server.connections)
    writer.transport.abort()


async def test_a_closed_connection_of_which_only_a_part_is_read_still_ends(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_BUFFER_LEN", 1024)
    house = await open_house(timeouts={"slow_client_s": 2 * SOON_S})
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, limit=1)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: here\r\n\r\n")
    await reader.readexactly(1)
    assert house.gateway._public is not None
    server = house.gateway._public._server
    [connection] = server.connections
    assert connection.transport is not None
    connection.transport.write(b"x" * 16_000_000)
    connection.force_close()
    connection.resume_writing()  # as when a part of it was read
    await until(lambda: not server.connections)
    writer.transport.abort()


async def test_a_request_that_is_answered_has_its_own_time_to_be_read(open_house: Open) -> None:
    house = await open_house(timeouts={"slow_client_s": SOON_S}, tenant={"timeouts": {"slow_client_s": 60}})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on, chunk("b"))
    async with house.chat(stream=True) as answer:
        assert await answer.content.readuntil(b"\n\n") == chunk("a")
        assert house.gateway._public is not None
        [connection] = house.gateway._public._server.connections
        assert isinstance(connection, BoundedConnection)
        assert connection.transport is not None
        connection._cut_off(
            connection.transport
        )  # as if nothing had been read for the time that the listener gives
        go_on.set()
        assert (await answer.read()).startswith(chunk("b"))

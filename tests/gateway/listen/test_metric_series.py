"""The number of metric series is bounded, whatever callers send."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest

from gateway.identity.keys import hash_key
from gateway.listen.listener import BoundedServer
from gateway.request.record import TENANTS_SHOWN_MAX, UPSTREAM_ATTEMPTS, ExchangeRecord, Reporter
from shared.process import logs
from shared.telemetry.stages import Stages
from shared.wire.completed_line import DETAIL_LEN_MAX, FAILURES_SHOWN_MAX
from shared.wire.errors import UpstreamFailed
from shared.wire.ids import ReplicaId, RequestId, TenantId
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import unary
from tests.mutations import Connection

REAL: Final = 1_000
"""Keys of one tenant."""
KEYS: Final = 10_000
"""Those and made-up ones."""
AT_ONCE: Final = 250
pytestmark = pytest.mark.hop("http2")


async def test_callers_add_no_series_to_the_metrics_whatever_they_send(open_house: Open) -> None:
    """1,000 made-up models, paths, methods, ids, keys and hosts; then 150 tenants, of which 100 are shown."""
    tenants = [{"id": f"t{i}"} for i in range(150)]
    keys = [{"id": f"k{i}", "hash": hash_key(f"key-{i}"), "tenant": f"t{i}"} for i in range(150)]
    house = await open_house(admin={"port": 0}, tenants=tenants, keys=keys)
    house.engine.script = unary()
    others = await _series(house)  # of whatever this process served before
    key = {"authorization": "Bearer key-0"}
    async with house.chat(headers=key) as answer:
        assert answer.status == 200

    async def made_up(i: int) -> None:
        name = f"made-up-{i}"
        for headers in (key, {"authorization": f"Bearer {name}"}):
            more = {"x-request-id": name, "host": name, "user-agent": name, "traceparent": name}
            async with house.chat(model=name, user=name, headers=headers | more) as answer:
                assert answer.status in (401, 404)
        method = ("PATCH", "PURGE", "REPORT", "PROPFIND")[i % 4]  # the parser knows no made-up ones
        async with house.client.request(method, f"{house.url}/{name}", headers=key) as answer:
            assert answer.status == 404

    for at in range(0, 1000, 50):
        await asyncio.gather(*(made_up(i) for i in range(at, at + 50)))
    before = await _series(house)
    await made_up(1000)
    assert await _series(house) == before, "the last of a thousand adds nothing"
    assert not any("made-up" in one for one in before)
    for i in range(150):
        async with house.chat(headers={"authorization": f"Bearer key-{i}"}) as answer:
            assert answer.status == 200
    assert len(await _series(house) - others) <= 1000


async def _series(house: House) -> set[str]:
    """The names of all series with their labels."""
    async with house.client.get(f"http://127.0.0.1:{house.gateway.admin_port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@pytest.mark.slow
async def test_ten_thousand_keys_add_no_series_to_the_metrics(open_house: Open) -> None:
    logs.close()
    logs.configure("gateway", level="error", stream=io.StringIO())  # ten thousand lines take seconds
    real = [{"id": f"k{i}", "hash": hash_key(f"key-{i}"), "tenant": "acme"} for i in range(REAL)]
    house = await open_house(admin={"port": 0}, tenants=[{"id": "acme"}], keys=real)
    server = house.gateway._chats.serve
    assert isinstance(server, BoundedServer)
    assert await _statuses(server, [0, KEYS]) == {404: 1, 401: 1}
    before = await _series(house)
    statuses: Counter[int] = Counter()
    for at in range(0, KEYS, AT_ONCE):
        statuses += await _statuses(server, range(at, at + AT_ONCE))
    assert statuses == {404: REAL, 401: KEYS - REAL}
    assert await _series(house) == before


async def _statuses(server: BoundedServer, numbers: Sequence[int]) -> Counter[int]:
    """The answers to a chat with each of these keys, for a model that there is not."""
    connections = [Connection(server) for _ in numbers]
    body = b'{"model": "made-up", "messages": [{"role": "user", "content": "hi"}]}'
    for connection, i in zip(connections, numbers, strict=True):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer key-{i}\r\n"
        connection.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: all(connection.answer for connection in connections))
    found = [re.match(rb"HTTP/1.1 (\d{3}) ", connection.answer) for connection in connections]
    for connection in connections:
        connection.leave()
    return Counter(int(one[1]) for one in found if one is not None)


def test_tenants_and_replicas_have_a_bounded_number_of_names() -> None:
    """In metrics, and in the line of one request."""
    reporter = Reporter()
    tenants = [TenantId(f"tenant {number}") for number in range(TENANTS_SHOWN_MAX + 1)]
    assert [reporter._tenant_label(tenant) for tenant in tenants] == [*tenants[:-1], "other"]
    assert reporter._tenant_label(tenants[0]) == tenants[0]
    record = ExchangeRecord.begun(RequestId("r"), "POST", "/v1/chat/completions", Stages("gateway"))
    replica = ReplicaId("of this test")
    for _ in range(FAILURES_SHOWN_MAX + 1):
        record.attempt_failed(replica, UpstreamFailed("It failed.", detail="x" * 999), Stages("gateway"))
    UPSTREAM_ATTEMPTS.forget(replica)
    assert record.failed_attempts is not None
    assert [one.code for one in record.failed_attempts] == ["upstream_failed"] * FAILURES_SHOWN_MAX
    assert {len(one.detail or "") for one in record.failed_attempts} == {DETAIL_LEN_MAX}

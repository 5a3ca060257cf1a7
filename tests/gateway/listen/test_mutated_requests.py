"""Mutated requests: none crashes anything, is answered with 5xx, or leaves anything behind."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from gateway.client.body import validate
from gateway.endpoints.table import ENDPOINTS
from gateway.listen.listener import BoundedServer
from shared.apis.holding import census_of
from shared.process import logs
from shared.wire.envelope import ErrorEnvelope
from shared.wire.errors import ApiError
from tests.bench.cpu import resident_bytes
from tests.bench.gateway.mutations import mutated
from tests.effort import drawn
from tests.gateway.conftest import OTHER_KEY, House, Open, until
from tests.gateway.fake_engine import unary
from tests.mutations import BODIES, CORPUS, Connection

SEED: Final = 20261123
BODIES_COUNT: Final = drawn(2_000, whole=60_000)
REQUESTS_COUNT: Final = drawn(4_000, whole=40_000)
AT_ONCE: Final = 100
TURNS: Final = 12
"""Turns of the event loop within which a request without anything to wait for is answered."""
GROWTH_MAX: Final = 50 * 1024**2
PLANNED: Final = frozenset({200, 400, 401, 404, 405, 408, 413, 417, 429})
pytestmark = pytest.mark.hop("http2")


def test_a_mutated_body_is_taken_or_refused_by_the_validator() -> None:
    draw = random.Random(SEED)
    encoded = [(ENDPOINTS[path].shape, msgspec.json.encode(fields)) for path, fields in BODIES]
    outcomes: Counter[str] = Counter()
    for _ in range(BODIES_COUNT):
        shape, body = draw.choice(encoded)
        sent = mutated(body, draw, CORPUS)
        refusal: ApiError | None = None
        try:
            validate(sent, shape, "ignore", census_of(sent))
        except ApiError as error:
            refusal = error
        assert refusal is None or (refusal.status == 400 and len(refusal.message) < 1000), (sent, refusal)
        outcomes["taken" if refusal is None else "refused"] += 1
    assert min(outcomes.values()) > BODIES_COUNT // 50, "both happen"


@pytest.mark.slow
async def test_a_mutated_request_is_answered_as_its_callers_mistake(open_house: Open) -> None:
    """The tenant has one token left: its requests come as far as the last stage before an engine, and no
    further. Another tenant's requests are answered in between as they are alone."""
    logs.close()
    errors = io.StringIO()
    logs.configure("gateway", level="error", stream=errors)
    house: House = await open_house(tenant={"limits": {"token_budget": 1}})
    house.engine.script = unary()
    crashes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: crashes.append(context))
    server = house.gateway._chats.serve
    assert isinstance(server, BoundedServer)
    draw, statuses, grown = random.Random(SEED), Counter[int](), 0
    for batch in range(REQUESTS_COUNT // AT_ONCE):
        if batch == 10:
            grown = resident_bytes(os.getpid())
        sent = [mutated(draw.choice(CORPUS), draw, CORPUS) for _ in range(AT_ONCE)]
        statuses += await _answered(server, sent)
        if batch % 40 == 0:
            async with house.chat(headers={"authorization": f"Bearer {OTHER_KEY}"}) as answer:
                assert answer.status == 200
    await until(lambda: not len(house.gateway.live))
    assert set(statuses) <= PLANNED, statuses
    assert {200, 400, 401, 404, 429} <= set(statuses), "the mutations reach every stage"
    assert resident_bytes(os.getpid()) - grown < GROWTH_MAX
    assert crashes == []
    assert errors.getvalue() == ""
    assert len(house.engine.seen) == REQUESTS_COUNT // AT_ONCE // 40, "the victim's"
    await house.at_rest()


async def _answered(server: BoundedServer, sent: list[bytes]) -> Counter[int]:
    """Send each on a connection of its own, and count the statuses that come back."""
    connections = [Connection(server) for _ in sent]
    for connection, data in zip(connections, sent, strict=True):
        connection.send(data)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    for connection in connections:
        connection.leave()
    await asyncio.sleep(0)
    statuses: Counter[int] = Counter()
    for connection, data in zip(connections, sent, strict=True):
        statuses.update(_statuses(bytes(connection.answer), data))
    return statuses


_HEAD: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n(.*?)\r\n\r\n", re.DOTALL)


def _statuses(answer: bytes, sent: bytes) -> Iterator[int]:
    """The statuses of the answers in what came back. Each is whole, and every error has its envelope."""
    while answer:
        head = _HEAD.match(answer)
        assert head is not None, (sent, answer)
        status, fields, answer = int(head[1]), head[2].lower(), answer[head.end() :]
        length = re.search(rb"content-length: (\d+)", fields)
        body = b"" if length is None else answer[: int(length[1])]
        if body.startswith(b"{"):  # none is sent after HEAD
            answer = answer[len(body) :]
            assert length is not None
            assert len(body) == int(length[1])
            msgspec.json.decode(body, type=ErrorEnvelope if status >= 400 else dict)
        assert status == 100 or b"x-request-id: " in fields, (sent, head[0])
        if status != 100:
            yield status

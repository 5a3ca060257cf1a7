"""A closed loop of unary requests to one subject of a bench, and the CPU time that they take."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tests.bench.client import TimedRequest
from tests.bench.gateway.subjects import ServerUnderTest
from tests.bench.streams import BenchFailed

UNARY_REQUESTS: Final = 400
"""The requests of one round to one subject. Subjects take turns round by round, so that a change of the
machine's speed meets all of them."""
UNARY_CONNECTIONS: Final = 8
UNARY_TOKENS: Final = 16


class Unary:
    """A closed loop of unary requests to one subject, and the time that they took."""

    def __init__(self, subject: ServerUnderTest) -> None:
        self._subject = subject
        self._request = subject.chat(UNARY_TOKENS, stream=False)
        self._cpu_s = 0.0
        self.elapsed_s = 0.0
        self.requests = 0

    @property
    def cost_us(self) -> float:
        return 1e6 * self._cpu_s / self.requests

    async def round(self, *, counted: bool = True) -> float:
        """Run one round. Returns the CPU time of one of its requests, in microseconds."""
        before_s, start = self._subject.cpu_s(), time.perf_counter()
        await asyncio.gather(*(self._one_by_one() for _ in range(UNARY_CONNECTIONS)))
        taken_s = self._subject.cpu_s() - before_s
        if counted:
            self._cpu_s += taken_s
            self.elapsed_s += time.perf_counter() - start
            self.requests += UNARY_REQUESTS
        return 1e6 * taken_s / UNARY_REQUESTS

    async def _one_by_one(self) -> None:
        connection = await self._subject.endpoint.connect()
        try:
            for _ in range(UNARY_REQUESTS // UNARY_CONNECTIONS):
                checked(await connection.exchange(self._request))
        finally:
            connection.close()


def checked(exchange: TimedRequest) -> TimedRequest:
    if exchange.error is not None:
        raise BenchFailed(exchange.error)
    return exchange

"""The workers beside this one, as it asks them to end requests of a caller, and what they have of others:
which of them has a request is the kernel's choice (`gateway.workers.supervisor`), and no caller can know.

They are found by their sockets, which are all in one directory. What callers ask for is sent in rounds, one
after the other, so that a flood of it costs each worker few requests. A worker that does not answer counts as
one that had none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from gateway.operators.server import DIGEST_HEADER
from gateway.operators.together import OperatorAnswer
from gateway.workers.channel import Ending, WorkerClient, WorkerSilent, heard
from shared.wire.ids import RequestId, TenantId

ROUND_MAX: Final = 256
"""The most wishes of one round."""


class _Asked(Struct, eq=False):
    """A caller's wish, and the number of requests that were ended, once that is known."""

    ending: Ending
    ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Siblings:
    """The other workers."""

    def __init__(self, socket: str) -> None:
        """`socket` is the path of this worker's own end of its channel."""
        self._own: Final = Path(socket)
        self._clients: Final[dict[Path, WorkerClient]] = {}
        self._asked: list[_Asked] = []
        """The wishes that wait for the next round."""
        self._rounds: asyncio.Task[None] | None = None

    async def end(self, tenant: TenantId, request_id: RequestId) -> int:
        """End the tenant's requests of this id at all other workers. Returns how many that were."""
        asked = _Asked(Ending(tenant, request_id))
        self._asked.append(asked)
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._ask())
        return await asked.ended

    async def told(self, digest: bytes, target: str, within_s: float) -> list[OperatorAnswer]:
        """The answers of all other workers to a question of an operator's, whose key has this digest."""
        with suppress(OSError):
            await self._look()
        headers = {DIGEST_HEADER: digest.hex()}
        asks = (heard(_told(client, target, headers, within_s)) for client in self._clients.values())
        return [answer for answer in await asyncio.gather(*asks) if answer is not None]

    async def aclose(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked[:ROUND_MAX], self._asked[ROUND_MAX:]
                counts = await self._round([one.ending for one in asked])
                for one, count in zip(asked, counts, strict=True):
                    if not one.ended.done():
                        one.ended.set_result(count)
        finally:
            self._rounds = None

    async def _round(self, endings: Sequence[Ending]) -> Sequence[int]:
        """The number of requests that were ended for each."""
        with suppress(OSError):  # then it asks those that it knows
            await self._look()
        none = [0] * len(endings)
        told = await asyncio.gather(*(heard(client.end(endings)) for client in self._clients.values()))
        return [sum(counts) for counts in zip(none, *(one or none for one in told), strict=True)]

    async def _look(self) -> None:
        """See which workers there are."""
        there = {path for path in self._own.parent.iterdir() if path.is_socket() and path != self._own}
        for gone in self._clients.keys() - there:
            await self._clients.pop(gone).aclose()
        for new in there - self._clients.keys():
            self._clients[new] = WorkerClient(str(new))


async def _told(
    client: WorkerClient, target: str, headers: Mapping[str, str], within_s: float
) -> OperatorAnswer:
    """Raises WorkerSilent."""
    try:
        async with asyncio.timeout(within_s):
            return await client.ask("GET", target, headers, b"")
    except TimeoutError:
        raise WorkerSilent("it did not answer in time") from None

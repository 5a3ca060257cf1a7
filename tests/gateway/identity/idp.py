"""An issuer's key server, and a gateway that trusts it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any, Final

from gateway.config.edge import IssuerConfig
from gateway.identity import jwks
from gateway.identity.jwks import POLL_S, RemoteKeys
from tests.fakes import VirtualClock
from tests.gateway.conftest import OTHER_KEY, PATIENCE_S, House, Open, until
from tests.gateway.identity.issuers import Key, KeyServer

OLD, NEW = Key("old"), Key("new", number=1)
VICTIM: Final = {"authorization": f"Bearer {OTHER_KEY}"}
GRANTS: Final = [{"issuer": "idp", "tenant": "acme"}]
RARE_S: Final = 30.0
"""A longer time between two fetches that unknown keys cause, as an operator may set it."""


class Idp:
    """An issuer's key server, and a gateway that trusts it."""

    def __init__(self, server: KeyServer, house: House, clock: VirtualClock) -> None:
        self.server, self.house, self.clock = server, house, clock
        self._count = itertools.count()

    def token(self, key: Key, **claims: Any) -> str:
        """A token that the gateway has not seen."""
        return key.token(self.clock.wall(), jti=next(self._count), **claims)

    async def status(self, token: str) -> int:
        return await self._status({"authorization": f"Bearer {token}"})

    async def victim(self) -> int:
        """The status of another tenant's request."""
        return await self._status(VICTIM)

    async def _status(self, headers: dict[str, str]) -> int:
        url = f"{self.house.url}/v1/models"
        async with asyncio.timeout(PATIENCE_S), self.house.client.get(url, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def fetched(self, after_s: float = POLL_S) -> None:
        """Let so much time pass, and wait for the end of the fetch that is due then."""
        fetch = self.source._task
        await until(lambda: self.clock.sleeping > 0)
        self.clock.advance(after_s)
        await until(lambda: self.source._task is not fetch)
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)

    async def sought(self, *statuses: asyncio.Task[int]) -> None:
        """Let the time pass after which the fetch begins that these wait for, and wait for its end."""
        await until(lambda: self.source._looking is not None and self.clock.sleeping > 1)
        assert not any(status.done() for status in statuses)
        await self.fetched(jwks.REFETCH_S)

    @property
    def source(self) -> RemoteKeys:
        source = self.house.gateway._key_sources._sources["idp"]
        assert isinstance(source, RemoteKeys)
        return source

    @property
    def task(self) -> asyncio.Task[None]:
        assert self.source._task is not None
        return self.source._task

    async def rejected(self) -> list[str]:
        """The problems of the keys that were rejected first, once the log has them."""
        await until(lambda: bool(self._rejected()))
        problems: list[str] = self._rejected()[0]["problems"]
        return problems

    def _rejected(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.house.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == "keys.rejected"]


async def opened(open_house: Open, server: KeyServer, **more: Any) -> Idp:
    clock = VirtualClock()
    house = await open_house(issuers=[server.settings(**more)], grants=GRANTS, clock=clock)
    return Idp(server, house, clock)


def as_issuer(server: KeyServer) -> IssuerConfig:
    settings = server.settings()
    settings |= {name: tuple(settings[name]) for name in ("audiences", "algorithms")}
    return IssuerConfig(**settings)

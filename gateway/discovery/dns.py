"""Members from DNS: the addresses of a name, or the targets of SRV records. They are asked for again and
again.

Rules:

1. A question that fails changes nothing: what it was answered last time counts. So does an answer of nobody
   (NXDOMAIN, no records), as a pool is never emptied because of a resolver. The dead are found by their
   health.
2. The two families of addresses, and the targets of SRV records, fail each by itself.
3. An answer of thousands is cut to `REPLICAS_MAX`, the same ones at every gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from heapq import nsmallest
from random import Random
from typing import Any, Final, Literal, Protocol, TypeVar

from msgspec import Struct

from gateway.config.discovery import DiscoveryConfig, host_and_port
from gateway.config.whole import REPLICAS_MAX
from gateway.discovery.addresses import url_of, usable
from gateway.discovery.source import SourceProgress
from gateway.routing.members import Listed
from shared.process.clock import SYSTEM_CLOCK, Clock

LOOKUP_S: Final = 5.0
"""The time for one question, over all servers that are asked, in seconds."""
TRY_S: Final = 2.0
"""The time for one try at one server, in seconds."""
AT_ONCE: Final = 16
"""The number of questions that are open at a time."""
JITTER: Final = 0.1
"""The part of the interval by which chance shortens or lengthens it."""

T = TypeVar("T")
Family = Literal["A", "AAAA"]


class LookupFailed(Exception):
    """DNS gave no answer. That it knows of nobody is one."""


class SrvTarget(Struct, frozen=True, order=True):
    """An SRV record, without its weight."""

    priority: int
    host: str
    port: int


class Resolver(Protocol):
    """Questions to DNS. A name that does not exist has no records. They raise LookupFailed."""

    async def addresses(self, name: str, family: Family) -> Sequence[str]: ...

    async def targets(self, name: str) -> Sequence[SrvTarget]: ...


class DnsSource:
    """The members that a name in DNS has."""

    def __init__(
        self,
        config: DiscoveryConfig,
        resolver: Resolver | None = None,
        clock: Clock = SYSTEM_CLOCK,
        seed: int | None = None,
    ) -> None:
        self._config: Final = config
        self._resolver: Final = resolver or SystemResolver(config.nameserver)
        self._clock: Final = clock
        self._random: Final = Random(seed)
        self._known: dict[tuple[str, str], Sequence[Any]] = {}
        """The last answers, by name and kind."""
        self._room: Final = asyncio.Semaphore(AT_ONCE)

    async def watch(self, progress: SourceProgress) -> None:
        while True:
            await self.ask(progress)
            by_chance = 1 + JITTER * (2 * self._random.random() - 1)
            await self._clock.sleep(self._config.interval_s * by_chance)

    async def ask(self, progress: SourceProgress) -> None:
        """Ask once, and report what is known then."""
        problems: list[str] = []
        asked: dict[tuple[str, str], Sequence[Any]] = {}
        urls = await (self._by_srv(asked, problems) if self._config.srv else self._by_name(asked, problems))
        self._known = asked  # names that are asked for no more are forgotten
        if problems:
            progress.failed("; ".join(sorted(set(problems))))
        if urls:
            members = [Listed(url) for url in urls]
            (progress.listed if not problems else progress.kept)(members)
        elif not problems:
            progress.failed("DNS knows of nobody")

    async def _by_name(self, asked: dict[tuple[str, str], Sequence[Any]], problems: list[str]) -> set[str]:
        parts = host_and_port(self._config.dns or "")
        assert parts is not None, "the configuration was checked"
        return await self._urls(parts[0], parts[1], asked, problems)

    async def _by_srv(self, asked: dict[tuple[str, str], Sequence[Any]], problems: list[str]) -> set[str]:
        name = self._config.srv or ""

        async def look() -> Sequence[SrvTarget]:
            return await self._resolver.targets(name)

        targets = await self._answer(name, "SRV", look, asked, problems)
        lowest = min((target.priority for target in targets), default=0)
        found = {one for one in targets if one.priority == lowest and one.host not in ("", ".") and one.port}
        chosen = nsmallest(REPLICAS_MAX, found)
        if self._config.scheme == "https":  # the certificate is for the name, and proves it
            return {url_of("https", one.host.rstrip("."), one.port) for one in chosen}
        urls = [self._urls(one.host, one.port, asked, problems) for one in chosen]
        return set().union(*await asyncio.gather(*urls))

    async def _urls(
        self, name: str, port: int, asked: dict[tuple[str, str], Sequence[Any]], problems: list[str]
    ) -> set[str]:
        """The URLs of a name's addresses."""

        async def look(family: Family) -> Sequence[str]:
            return await self._answer(
                name, family, lambda: self._resolver.addresses(name, family), asked, problems
            )

        found = await asyncio.gather(look("A"), look("AAAA"))
        good = [usable(text, loopback=self._config.loopback) for texts in found for text in texts]
        return {url_of(self._config.scheme, str(one), port) for one in good if one is not None}

    async def _answer(
        self,
        name: str,
        kind: str,
        look: Callable[[], Awaitable[Sequence[T]]],
        asked: dict[tuple[str, str], Sequence[Any]],
        problems: list[str],
    ) -> Sequence[T]:
        """The answer to a question, or the last one where that fails: each question fails by itself (rule
        2)."""
        try:
            async with self._room:
                answer = await look()
        except LookupFailed as error:
            problems.append(f"{kind} of {name}: {error}")
            answer = self._known.get((name, kind), ())
        asked[name, kind] = answer
        return answer


class SystemResolver:
    """The system's resolver, or the one at `nameserver`, asked by dnspython."""

    def __init__(self, nameserver: str | None = None) -> None:
        self._nameserver: Final = None if nameserver is None else host_and_port(nameserver)

    async def addresses(self, name: str, family: Family) -> Sequence[str]:
        return [record.address for record in await self._ask(name, family)]

    async def targets(self, name: str) -> Sequence[SrvTarget]:
        records = await self._ask(name, "SRV")
        return [SrvTarget(one.priority, one.target.to_text(), one.port) for one in records]

    async def _ask(self, name: str, kind: str) -> Sequence[Any]:
        # Only here: a gateway whose replicas are listed has no use for it.
        import dns.asyncresolver
        import dns.exception
        import dns.resolver

        try:
            resolver = dns.asyncresolver.Resolver(configure=self._nameserver is None)
            if self._nameserver is not None:
                resolver.nameservers, resolver.port = [self._nameserver[0]], self._nameserver[1]
            resolver.timeout, resolver.lifetime = TRY_S, LOOKUP_S
            async with asyncio.timeout(2 * LOOKUP_S):
                answer = await resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return ()
        except (dns.exception.DNSException, OSError, TimeoutError, ValueError) as error:
            raise LookupFailed(str(error) or type(error).__name__) from error
        return () if answer.rrset is None else list(answer.rrset)

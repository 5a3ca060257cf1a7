"""The gateways that share a Redis: each says there where its admin listener is, and who has said so lately.

Rules

1. A gateway says it every `BEAT_S`, and its word counts for `TTL_S` by the clock of Redis. One that is
   stopped takes it back; one that dies is asked, and named as silent, until its word has run out.
2. It is reached at the address that its listener has, or where that is any, at the one from which it reaches
   Redis. A listener of this machine alone is told of only where Redis is on this machine, too; one that asks
   clients for certificates, not at all.
3. While Redis cannot be asked, those count that were known last. No request of a caller waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.config.edge import AdminConfig, is_loopback
from gateway.config.redis import RedisConfig, redis_hosts
from gateway.redis.link import RedisUnavailable, Word, packed
from gateway.redis.links import links_of, tag_of
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.files import read_text
from shared.wire.ids import TenantId
from shared.wire.undecodable import UNDECODABLE

BEAT_S: Final = 2.0
TTL_S: Final = 10.0
TIMEOUT_S: Final = 1.0
"""The time limit of a call: no request waits for it."""
NAME_LEN_MAX: Final = 300
MEMBERS_MAX: Final = 256
"""Gateways that are asked at most, those that have said where they are last."""
TAG: Final = TenantId("~gateways")
"""The hash tag of the key in Redis. No tenant can have this id."""
SCRIPT: Final = (Path(__file__).parent / "members.lua").read_text()
CERT_LEN_MAX: Final = 1024 * 1024
EVERYWHERE: Final = ("0.0.0.0", "::")
_URL: Final = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,256}:[0-9]{1,5}")

log = logs.get(__name__)


class GatewayMember(Struct, frozen=True):
    """A gateway, as it tells of itself."""

    name: str
    """A name for operators: its host's, and the port of its admin listener."""
    url: str
    """Where its admin listener is."""
    cert: str | None = None
    """The SHA-256 of its certificate, in hexadecimal; None for plain text."""


class GatewayList:
    """The gateways on a Redis."""

    def __init__(
        self, config: RedisConfig, admin: AdminConfig, env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Raises ConfigError when a password or a certificate cannot be read."""
        self._admin: Final = admin
        self._clock: Final = clock
        self._servers: Final = redis_hosts(config.url or "")
        self._links: Final = links_of(replace(config, timeout_s=TIMEOUT_S), env)
        self._key: Final = f"{config.key_prefix}:{{{tag_of(TAG)}}}:gateways"
        self._knows_servers = False
        self.own: GatewayMember | None = None
        """What is told of this one. None as long as it has no listener that others reach."""
        self.others: tuple[GatewayMember, ...] = ()

    async def listens(self, port: int) -> None:
        """Note the port of the admin listener."""
        try:
            host = await asyncio.to_thread(self._reachable)
        except OSError as error:
            host, reason = None, str(error)
        else:
            reason = "the admin listener is for this machine alone, or for clients with certificates"
        if host is None:
            log.info("gateways.not_reached", reason=reason)
            return
        scheme = "http" if self._admin.tls is None else "https"
        shown = f"[{host}]" if ":" in host else host
        self.own = GatewayMember(f"{socket.gethostname()}:{port}", f"{scheme}://{shown}:{port}")

    async def keep(self) -> None:
        """Tell of this gateway, and learn of the others, until cancelled."""
        was_told = True
        while True:
            try:
                await self._beat()
                was_told = False
            except RedisUnavailable as error:
                if not was_told:
                    log.warning("gateways.not_asked", reason=str(error))
                was_told = True
            await self._clock.sleep(BEAT_S)

    async def aclose(self) -> None:
        """Take the word back, and close the connection."""
        own, self.own = self.own, None
        if own is not None:
            with contextlib.suppress(RedisUnavailable):
                await self._call(msgspec.json.encode(own), leaves=True)
        await self._links.aclose()

    async def _beat(self) -> None:
        """Raises RedisUnavailable."""
        if self.own is not None and self._admin.tls is not None:
            self.own = msgspec.structs.replace(self.own, cert=fingerprint(Path(self._admin.tls.cert)))
        told = await self._call(b"" if self.own is None else msgspec.json.encode(self.own))
        own_url = "" if self.own is None else self.own.url
        by_url = {member.url: member for member in map(_read, told) if member is not None}  # the last word
        by_url.pop(own_url, None)
        self.others = tuple(by_url.values())

    async def _call(self, own: bytes, *, leaves: bool = False) -> list[bytes]:
        if not self._knows_servers:
            await self._links.refresh()
            self._knows_servers = True
        link = self._links.of(TAG)
        words: tuple[Word, ...] = (int(1000 * TTL_S), own, int(leaves), MEMBERS_MAX)
        asked: tuple[Word, ...] = ("EVAL", SCRIPT, 1, self._key, *words)
        if not link.is_up:
            await link.probe(*asked)
        try:
            reply: list[bytes] = await link.call(packed(asked))
        except RedisUnavailable:
            self._knows_servers = False  # it may have moved
            raise
        return reply[1:]

    def _reachable(self) -> str | None:
        """The address at which others reach the listener (rule 2). None where there is none."""
        host, tls = self._admin.host, self._admin.tls
        if tls is not None and tls.client_certificates == "required":
            return None
        if host in EVERYWHERE:
            host = _own_address(*self._servers[0])
        is_here = all(is_loopback(server) for server, _ in self._servers)
        return host if is_here or not is_loopback(host) else None


def fingerprint(cert: Path) -> str | None:
    """The SHA-256 of the first certificate of a chain, in hexadecimal. None where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        pem = read_text(cert, CERT_LEN_MAX)
        end = "-----END CERTIFICATE-----"
        first = pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]
        return sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()
    return None


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches another. Nothing is sent."""
    for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
            return own
    raise OSError(f"there is no way to {host}")


def _read(raw: bytes) -> GatewayMember | None:
    """None of what is no gateway's word: Redis may hold anything."""
    try:
        member = msgspec.json.decode(raw, type=GatewayMember)
    except UNDECODABLE:
        return None
    return member if _URL.fullmatch(member.url) and len(member.name) <= NAME_LEN_MAX else None

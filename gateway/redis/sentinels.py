"""The address of a primary, as Sentinels tell it.

They are asked all at once, and the first that knows a primary that is well is believed. One after the other,
a silent one would take the time in which a connection must be made, each time anew, whoever could answer
after it; and one whose machine is gone is silent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, Final

from gateway.config.secret import RenewableSecret
from gateway.redis.link import Address, Command, RedisUnavailable, ask

_DOWN: Final = (b"s_down", b"o_down")
"""Flags of a primary that is down as one Sentinel sees it, or as they agree."""


class Sentinels:
    """The Sentinels that watch over one primary."""

    def __init__(
        self,
        primary: str,
        addresses: Sequence[Address],
        username: str | None,
        password: RenewableSecret,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`primary` is their name of it."""
        self._primary: Final = primary
        self._addresses: Final = addresses
        self._username: Final = username
        self._password: Final = password
        self._tls: Final = tls

    async def find(self) -> Address:
        """The primary's address now; the caller bounds the time. Raises RedisUnavailable when all have
        answered, and none knows one that is well."""
        questions = *_greeting(self._username, await self._password.now()), ("SENTINEL", "MASTERS")
        asked = [asyncio.create_task(self._told_by(address, questions)) for address in self._addresses]
        problems = []
        try:
            for each in asyncio.as_completed(asked):
                told = await each
                if isinstance(told, Address):
                    return told
                problems.append(told)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)  # each ends at once: it only closes its socket
        raise RedisUnavailable(f"No master found for {self._primary!r}: {', '.join(problems)}"[:200])

    async def _told_by(self, sentinel: Address, questions: Sequence[Command]) -> Address | str:
        """The primary's address, or why this Sentinel does not tell it."""
        name = f"{sentinel.host}:{sentinel.port}"
        try:
            found = self._found(await ask(sentinel, self._tls, *questions))
            return found or f"{name} knows none that is well"
        except (OSError, ValueError, LookupError, TypeError) as error:  # the others may know better
            return f"{name}: {type(error).__name__} {error}"

    def _found(self, told: Sequence[Sequence[Any]]) -> Address | None:
        """The primary among all that a Sentinel watches over. Each is a list of names and values in turn."""
        for words in told:
            state = dict(zip(words[::2], words[1::2], strict=True))
            flags = state[b"flags"].split(b",")
            if state[b"name"] == self._primary.encode() and not any(flag in flags for flag in _DOWN):
                return Address(state[b"ip"].decode(), int(state[b"port"])) if b"master" in flags else None
        return None


def _greeting(username: str | None, password: str | None) -> tuple[Command, ...]:
    if username is not None:
        return (("AUTH", username, password or ""),)
    return () if password is None else (("AUTH", password),)

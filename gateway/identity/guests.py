"""Callers whom the gateway itself vouches for: the console's chats, which run in the name of a key.

The gateway does not have the key, only its hash. So it mints a secret for the one request, which stands for
the key's principal as long as that request runs, and for nothing afterwards. All limits of the key and of its
tenant hold as ever.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.identity.caller import Caller, Identity, Principal
from shared.process.shield import Done

SECRET_LEN: Final = 32
"""Random bytes of a secret."""


class Guests:
    """The requests that are vouched for at the moment."""

    def __init__(self) -> None:
        self._by_digest: Final[dict[bytes, Principal]] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    @contextmanager
    def vouched(self, principal: Principal) -> Iterator[str]:
        """Give an `Authorization` header that stands for the principal until the block is left."""
        authorization = f"Bearer guest-{secrets.token_urlsafe(SECRET_LEN)}"
        digest = _digest(authorization)
        self._by_digest[digest] = principal
        try:
            yield authorization
        finally:
            del self._by_digest[digest]

    def find(self, authorization: str | None) -> Principal | None:
        """The principal that a header stands for. None for all others."""
        if not self._by_digest or authorization is None:
            return None
        return self._by_digest.get(_digest(authorization))


class WithGuests:
    """An identity, and the guests beside it."""

    def __init__(self, identity: Identity, guests: Guests) -> None:
        self._identity: Final = identity
        self._guests: Final = guests

    def identify(self, caller: Caller, now_s: float) -> Awaitable[Principal]:
        """As `Identity` has it."""
        guest = self._guests.find(caller.authorization)
        return self._identity.identify(caller, now_s) if guest is None else Done(guest)


def _digest(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode(errors="replace")).digest()

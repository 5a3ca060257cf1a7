"""The token ids of pieces of long prompts, kept for the next turn of their conversation.

An agent sends its whole conversation with each turn: 100,000 tokens, of which more than nine tenths are those
of the turn before, and take a quarter of a second to encode. Long texts are encoded in pieces that follow
from their beginning alone (`shared.text.text_slices`), so what two prompts have in common at their beginning
is in equal pieces.

Rules

1. A piece is known by a keyed digest of its tenant, its tokenizer and its text. No text is kept, and a tenant
   cannot tell by the time that a count takes what another has sent.
2. The ids take `KEPT_LEN_MAX` bytes at most. The piece that makes room is the one of the tenant with the most
   bytes that was asked for longest ago: a tenant that sends many prompts forgets its own.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from threading import Lock
from typing import Final, Protocol

KEPT_LEN_MAX: Final = 32 * 1024 * 1024
"""Bytes of ids, some 80 conversations of 100,000 tokens."""
ENTRY_LEN: Final = 256
"""Bytes of what is kept with the ids of a piece."""
_DIGEST_LEN: Final = 16
_KEY_LEN: Final = 32


class PieceEncoder(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def hash(self) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class KnownPieces:
    """The pieces of all tenants. Safe to use from several threads."""

    def __init__(self, kept_len_max: int = KEPT_LEN_MAX) -> None:
        self._kept_len_max: Final = kept_len_max
        self._key: Final = secrets.token_bytes(_KEY_LEN)
        self._lock: Final = Lock()
        self._by_tenant: Final[dict[str, OrderedDict[bytes, array[int]]]] = {}
        """The pieces of each tenant, the one that was asked for last at the end."""
        self._lens: Final[dict[str, int]] = {}
        """Bytes of each tenant."""
        self.kept_len = 0
        """Bytes of all."""

    def of(self, tenant: str) -> TenantPieces:
        return TenantPieces(self, tenant)

    def find(self, tenant: str, digest: bytes) -> array[int] | None:
        with self._lock:
            own = self._by_tenant.get(tenant)
            if own is None or (ids := own.get(digest)) is None:
                return None
            own.move_to_end(digest)
            return ids

    def keep(self, tenant: str, digest: bytes, ids: array[int]) -> None:
        length = _len(ids)
        if length > self._kept_len_max:
            return
        with self._lock:
            own = self._by_tenant.setdefault(tenant, OrderedDict())
            if digest in own:
                return
            own[digest] = ids
            self._count(tenant, length)
            while self.kept_len > self._kept_len_max:
                self._forget(max(self._lens, key=self._lens.__getitem__))

    def digest(self, tenant: str, tokenizer: PieceEncoder, piece: str) -> bytes:
        head = f"{len(tenant)} {tenant} {tokenizer.hash} ".encode()
        data = head + piece.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=_DIGEST_LEN, key=self._key).digest()

    def _forget(self, tenant: str) -> None:
        own = self._by_tenant[tenant]
        self._count(tenant, -_len(own.popitem(last=False)[1]))
        if not own:
            del self._by_tenant[tenant], self._lens[tenant]

    def _count(self, tenant: str, length: int) -> None:
        self._lens[tenant] = self._lens.get(tenant, 0) + length
        self.kept_len += length


def _len(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + ENTRY_LEN


class TenantPieces:
    """The pieces of one tenant, as its prompts are encoded with them."""

    __slots__ = ("_known", "_tenant")

    def __init__(self, known: KnownPieces, tenant: str) -> None:
        self._known = known
        self._tenant = tenant

    def encode(self, tokenizer: PieceEncoder, piece: str) -> tuple[list[int], bool]:
        """The ids of a piece, without special tokens, and whether they were known."""
        digest = self._known.digest(self._tenant, tokenizer, piece)
        if (kept := self._known.find(self._tenant, digest)) is not None:
            return kept.tolist(), True
        ids = tokenizer.encode(piece, add_special_tokens=False)
        self._known.keep(self._tenant, digest, array("I", ids))
        return ids, False

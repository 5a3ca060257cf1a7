"""API keys: `sk_<env>_<keyid>_<secret>`.

Rules:

1. The key's form is checked before anything is looked up, and a key is never echoed or logged; its
   `keyid` is a name, not a secret, and may be.
2. At rest there is only the SHA-256 of the whole key. A minted secret has 190 random bits, so there
   is nothing that a slow hash or a pepper would protect: a stolen file of hashes opens no door. A
   pepper would be one more secret to hand to every gateway and to rotate.
3. A minted key is found by its `keyid` and compared in constant time; on a miss the same comparison
   is made against a dummy, so that the time tells nothing about which ids exist.
4. Any other string can be registered as a development key. It is found by its full hash, whose bits
   no caller can steer. A guessable string is as weak as it looks: development only.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

from gateway.config import HASH_PREFIX, KeyConfig
from gateway.identity.caller import Caller, Principal
from gateway.shield import Done
from shared.errors import Unauthenticated
from shared.ids import KeyId

KEY_LEN_MAX: Final = 256
ENV_LEN_MAX: Final = 16
KEYID_LEN: Final = 12
SECRET_LEN: Final = 32
_KEYID_ALPHABET: Final = string.ascii_lowercase + string.digits
_SECRET_ALPHABET: Final = string.ascii_letters + string.digits
assert len(_SECRET_ALPHABET) ** SECRET_LEN > 2**128

_MINTED: Final = re.compile(
    rf"sk_[a-z0-9]{{1,{ENV_LEN_MAX}}}_([a-z0-9]{{{KEYID_LEN}}})_[A-Za-z0-9]{{{SECRET_LEN}}}"
)
_PRINTABLE: Final = re.compile(rf"[ -~]{{1,{KEY_LEN_MAX}}}")
_DUMMY: Final = hashlib.sha256(secrets.token_bytes(32)).digest()


@dataclass(frozen=True, slots=True)
class MintedKey:
    """Shown once, stored as its hash."""

    id: KeyId
    text: str = field(repr=False)

    @property
    def hash(self) -> str:
        return hash_key(self.text)


def mint_key(env: str) -> MintedKey:
    assert re.fullmatch(rf"[a-z0-9]{{1,{ENV_LEN_MAX}}}", env), env
    keyid = "".join(secrets.choice(_KEYID_ALPHABET) for _ in range(KEYID_LEN))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(SECRET_LEN))
    return MintedKey(KeyId(keyid), f"sk_{env}_{keyid}_{secret}")


def hash_key(text: str) -> str:
    """What the configuration holds instead of the key: `sha256:<hex>`."""
    return HASH_PREFIX + _digest(text).hex()


def key_problem(text: str) -> str | None:
    """What a key must be to fit into an Authorization header; None when it is that."""
    if _PRINTABLE.fullmatch(text) and text == text.strip():
        return None
    return f"must be 1 to {KEY_LEN_MAX} printable ASCII characters, no space at its ends"


@dataclass(frozen=True, slots=True)
class _Record:
    principal: Principal
    digest: bytes = field(repr=False)
    disabled: bool
    expires_s: float
    """On the wall clock; infinity is never."""

    @classmethod
    def of(cls, key: KeyConfig) -> Self:
        return cls(
            Principal(key.key_id, key.tenant_id, key.models, key.limits, model_limits=key.model_limits),
            bytes.fromhex(key.hash.removeprefix(HASH_PREFIX)),
            key.disabled,
            math.inf if key.expires is None else key.expires.timestamp(),
        )


class KeyTable:
    """All keys at one moment. Immutable: a reload builds another."""

    __slots__ = ("_by_digest", "_by_id")

    def __init__(self, keys: Iterable[KeyConfig]) -> None:
        records = [_Record.of(key) for key in keys]
        self._by_id: Final = {record.principal.key: record for record in records}
        self._by_digest: Final = {record.digest: record for record in records}

    def identify(self, caller: Caller, now_s: float) -> Done[Principal]:
        """As `Identity` has it: by the `Authorization` header alone."""
        return Done(self.authenticate(caller.authorization, now_s))

    def authenticate(self, authorization: str | None, now_s: float) -> Principal:
        """The caller named by an `Authorization` header.

        Raises:
            Unauthenticated: whatever is wrong; `detail` says what, for the operator.
        """
        text = _bearer(authorization)
        digest = _digest(text)
        minted = _MINTED.fullmatch(text)
        by_id = self._by_id.get(KeyId(minted[1] if minted else ""))
        by_digest = self._by_digest.get(digest)  # looked up in any case: a hit takes as long as a miss
        record = by_id or by_digest
        same = hmac.compare_digest(digest, _DUMMY if record is None else record.digest)
        if record is None or not same:
            named = f" with id {minted[1]}" if minted else ""
            raise Unauthenticated("Incorrect API key provided.", detail=f"unknown key{named}")
        key = record.principal.key
        if record.disabled:
            raise Unauthenticated("This API key has been revoked.", detail=f"key {key} is disabled")
        if now_s >= record.expires_s:
            raise Unauthenticated("This API key has expired.", detail=f"key {key} has expired")
        return record.principal


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated(
            "You did not provide an API key. Send it in the header 'Authorization: Bearer KEY'.",
            detail="no key",
        )
    scheme, _, text = authorization.partition(" ")
    text = text.strip(" ")
    if scheme.lower() != "bearer" or not _PRINTABLE.fullmatch(text):
        raise Unauthenticated(
            "The Authorization header is malformed. It must read 'Bearer KEY'.", detail="malformed header"
        )
    return text


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()

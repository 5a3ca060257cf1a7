"""API keys: `sk_<env>_<keyid>_<secret>`.

Rules:

1. The key's form is checked before anything is looked up, and a key is never echoed or logged; its
   `keyid` is a name, not a secret, and may be.
2. At rest there is only the SHA-256 of the whole key. A minted secret has 190 random bits, so there
   is nothing that a slow hash or a pepper would protect: a stolen file of hashes opens no door. A
   pepper would be one more secret to hand to every gateway and to rotate.
3. A key is found by its full hash, whose bits no caller can steer, and compared in constant time; on a miss
   the same comparison is made with the key of the shown `keyid`, or with a dummy, so that the time tells
   nothing about which ids exist.
4. A key whose secret was replaced may be shown with the one before for a while: both are compared.
5. Any string can be registered as a development key. A guessable one is as weak as it looks: development
   only.
6. Where two entries have one hash, the one that the configuration file declares is meant. Of others a minted
   key is the one of its own `keyid`, and a development key is none of them: it is not known whose it is.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import string
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

from msgspec import Struct

from gateway.config.quotas import QuotaLimits
from gateway.config.whole import ALL_MODELS, HASH_PREFIX, KeyConfig
from gateway.identity.caller import Caller, Principal
from shared.process.shield import Done
from shared.wire.errors import IdentityUnavailable, Unauthenticated
from shared.wire.ids import KeyId

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
_NO_LIMITS: Final = QuotaLimits()


@dataclass(frozen=True, slots=True)
class MintedKey:
    """Shown once, stored as its hash."""

    id: KeyId
    text: str = field(repr=False)

    @property
    def hash(self) -> str:
        return hash_key(self.text)


def mint_key(env: str, keyid: str | None = None) -> MintedKey:
    """A new key with a new secret, and with a new id unless one is given."""
    assert re.fullmatch(rf"[a-z0-9]{{1,{ENV_LEN_MAX}}}", env), env
    if keyid is None:
        keyid = "".join(secrets.choice(_KEYID_ALPHABET) for _ in range(KEYID_LEN))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(SECRET_LEN))
    return MintedKey(KeyId(keyid), f"sk_{env}_{keyid}_{secret}")


def hash_key(text: str) -> str:
    """The hash that the configuration holds instead of the key: `sha256:<hex>`."""
    return HASH_PREFIX + _digest(text).hex()


def key_problem(text: str) -> str | None:
    """The rule that a key breaks, so that it does not fit into an Authorization header. None when it does."""
    if _PRINTABLE.fullmatch(text) and text == text.strip():
        return None
    return f"must be 1 to {KEY_LEN_MAX} printable ASCII characters, no space at its ends"


class _Record(Struct, frozen=True, gc=False):
    principal: Principal
    digest: bytes
    previous: bytes
    """The digest of the key with the secret before; one that no key has, where there is none."""
    previous_until_s: float
    """On the wall clock, as the other."""
    is_disabled: bool
    expires_s: float
    """On the wall clock; infinity is never."""

    @classmethod
    def of(cls, key: KeyConfig) -> Self:
        limits = _NO_LIMITS if key.limits == _NO_LIMITS else key.limits
        models, endpoints = _all_or(key.models), _all_or(key.endpoints)
        return cls(
            Principal(
                key.key_id,
                key.tenant_id,
                models,
                limits,
                endpoints=endpoints,
                model_limits=key.model_limits,
            ),
            digest_of(key.hash),
            _DUMMY if key.previous_hash is None else digest_of(key.previous_hash),
            -math.inf if key.previous_expires is None else key.previous_expires.timestamp(),
            key.disabled,
            math.inf if key.expires is None else key.expires.timestamp(),
        )


def _all_or(names: tuple[str, ...]) -> tuple[str, ...]:
    """One and the same tuple for the many keys that may use everything."""
    return ALL_MODELS if names == ALL_MODELS else names


class KeyTable:
    """The keys that open. It is changed in place: a request looks its key up once, and goes on with the
    principal that it found."""

    __slots__ = ("_by_digest", "_by_id", "_claims", "_declared", "is_complete")

    def __init__(self, keys: Iterable[KeyConfig] = ()) -> None:
        self._by_id: Final[dict[KeyId, _Record]] = {}
        self._by_digest: Final[dict[bytes, _Record]] = {}
        self._claims: Final[dict[bytes, dict[KeyId, _Record]]] = {}
        """The keys of each digest that several have. The one that is meant is in `_by_digest` (rule 6)."""
        self.is_complete = True
        """True if what is here is all there is. If not, only the `declared` keys are known to work, and a
        key that is not here may be one that could not be read."""
        self._declared: Set[str] = frozenset()
        for key in keys:
            self.put(key)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def declared(self) -> Set[str]:
        """The ids of the keys that the configuration file has."""
        return self._declared

    @declared.setter
    def declared(self, ids: Set[str]) -> None:
        self._declared = ids
        for digest in [*self._claims]:
            self._settle(digest)

    def put(self, key: KeyConfig) -> bool:
        """Add a key, or replace the one of the same id. Returns whether this revokes it: one that worked no
        longer does, its expiry aside."""
        record = _Record.of(key)
        old = self._take_out(record.principal.key)
        self._by_id[record.principal.key] = record
        for digest in _digests(record):
            holder = self._by_digest.get(digest)
            if holder is None and digest not in self._claims:
                self._by_digest[digest] = record
                continue
            claims = self._claims.setdefault(digest, {} if holder is None else {holder.principal.key: holder})
            claims[record.principal.key] = record
            self._settle(digest)
        return record.is_disabled and old is not None and not old.is_disabled

    def remove(self, key: KeyId) -> bool:
        """Remove a key, if it is there. Returns whether this revokes it: it worked, its expiry aside."""
        old = self._take_out(key)
        return old is not None and not old.is_disabled

    def _take_out(self, key: KeyId) -> _Record | None:
        old = self._by_id.pop(key, None)
        for digest in () if old is None else _digests(old):
            if (claims := self._claims.get(digest)) is None:
                self._by_digest.pop(digest, None)
            else:
                claims.pop(key, None)
                self._settle(digest)
        return old

    def is_contested(self, key: KeyId) -> bool:
        """True if a secret of this key's does not open it, as another key has it too."""
        record = self._by_id.get(key)
        digests = () if record is None else _digests(record)
        return any(digest in self._claims and self._by_digest.get(digest) is not record for digest in digests)

    def _settle(self, digest: bytes) -> None:
        """Choose the key that is meant, for a digest that several have, or had: the file's, or the one of its
        own `keyid` (rule 6)."""
        claims = self._claims[digest]
        declared = [record for id_, record in claims.items() if id_ in self._declared]
        self._by_digest.pop(digest, None)
        if len(holders := declared or [*claims.values()]) == 1:
            self._by_digest[digest] = holders[0]
        if len(claims) <= 1:
            del self._claims[digest]

    def identify(self, caller: Caller, now_s: float) -> Done[Principal]:
        """As `Identity` has it: by the `Authorization` header alone."""
        return Done(self.authenticate(caller.authorization, now_s))

    def has(self, authorization: str | None) -> bool:
        """True if an `Authorization` header holds one of these keys, be it expired or revoked."""
        text = (authorization or "").partition(" ")[2].strip(" ")
        return _PRINTABLE.fullmatch(text) is not None and _digest(text) in self._by_digest

    def authenticate(self, authorization: str | None, now_s: float) -> Principal:
        """The caller named by an `Authorization` header.

        Raises:
            Unauthenticated: whatever is wrong; `detail` says what, for the operator.
            IdentityUnavailable: it is not known at the moment whether the key works.
        """
        text = _bearer(authorization)
        digest = _digest(text)
        minted = _MINTED.fullmatch(text)
        by_id = self._by_id.get(KeyId(minted[1] if minted else ""))
        by_digest = self._by_digest.get(digest)  # looked up in any case: a hit takes as long as a miss
        record = by_digest or by_id
        is_current = hmac.compare_digest(digest, _DUMMY if record is None else record.digest)
        is_previous = hmac.compare_digest(digest, _DUMMY if record is None else record.previous)
        if not self.is_complete and (record is None or record.principal.key not in self.declared):
            raise IdentityUnavailable("API keys cannot be looked up at the moment.", retry_after_s=1.0)
        if record is None or not (is_current or is_previous):
            named = f" with id {minted[1]}" if minted else ""
            raise Unauthenticated("Incorrect API key provided.", detail=f"unknown key{named}")
        return _working(record, now_s, is_current=is_current)

    def of_digest(self, digest: bytes, now_s: float) -> Principal:
        """The caller whose key, shown before, has this digest. Raises Unauthenticated once it does not work
        any more."""
        if (record := self._by_digest.get(digest)) is None:
            raise Unauthenticated("This API key does not exist any more.", detail="a key that is gone")
        return _working(record, now_s, is_current=hmac.compare_digest(digest, record.digest))

    def digests(self, key: KeyId) -> tuple[bytes, ...]:
        """The digests of a key's secrets, the one that is valid longest in front; none of one that is not
        here."""
        record = self._by_id.get(key)
        return () if record is None else _digests(record)

    def any_working(self, now_s: float) -> KeyId | None:
        """A key that works. None where none does."""
        for key in self._by_id:
            with suppress(Unauthenticated):
                return self.of_id(key, now_s).key
        return None

    def of_id(self, key: KeyId, now_s: float) -> Principal:
        """The caller of the key with this id, whose holder has been recognised in another way. Raises
        Unauthenticated where it does not work."""
        if (record := self._by_id.get(key)) is None:
            raise Unauthenticated("There is no such API key.", detail="unknown key")
        return _working(record, now_s, is_current=True)


def _working(record: _Record, now_s: float, *, is_current: bool) -> Principal:
    """The principal of a key that was recognised. Raises Unauthenticated where it does not work."""
    key = record.principal.key
    if record.is_disabled:
        raise Unauthenticated("This API key has been revoked.", detail=f"key {key} is disabled")
    if now_s >= record.expires_s:
        raise Unauthenticated("This API key has expired.", detail=f"key {key} has expired")
    if not is_current and now_s >= record.previous_until_s:
        detail = f"the secret of key {key} was replaced"
        raise Unauthenticated("This API key was replaced by a newer one.", detail=detail)
    return record.principal


def _digests(record: _Record) -> tuple[bytes, ...]:
    is_one = record.previous is _DUMMY or record.previous == record.digest
    return (record.digest,) if is_one else (record.digest, record.previous)


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated(
            "You did not provide an API key. Send it as 'Authorization: Bearer KEY', or as x-api-key.",
            detail="no key",
        )
    scheme, _, text = authorization.partition(" ")
    text = text.strip(" ")
    if scheme.lower() != "bearer" or not _PRINTABLE.fullmatch(text):
        raise Unauthenticated(
            "The Authorization header is malformed. It must read 'Bearer KEY'.", detail="malformed header"
        )
    return text


def digest_of(hash_: str) -> bytes:
    """The digest that a configured hash spells."""
    return bytes.fromhex(hash_.removeprefix(HASH_PREFIX))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()

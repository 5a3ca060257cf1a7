"""JSON Web Tokens (RFC 7519) of configured issuers, by the rules of RFC 8725.

Rules:

1. Length and form are checked before anything is decoded, and everything that the token says of itself before
   its signature: an issuer that is known, an algorithm and a key of this very issuer, audience and times. So
   a forged token costs one signature check at most, `jwks.TRIED_MAX` where it names no key; most cost none.
2. The key comes from the issuer's set alone: the one of the token's `kid`, or where it has none, the one that
   has signed it. The algorithm is one of the issuer's and one of the key's: neither `none` nor a public key
   in place of a secret can be chosen by a caller. What the token says of where its key is, is not looked at;
   an extension that must be understood (`crit`) is refused.
3. JSON is read strictly: an object with a name twice, NaN, a number that no double holds, half a character,
   or a claim of a wrong type is refused.
4. A token that was accepted is known by the SHA-256 of its whole text until it expires, or until a key of its
   issuer goes away. The number of those is bounded, and the oldest makes room.
5. A refusal says to the caller little, and to the operator what is wrong; neither is shown the token, nor any
   text in it that is not plain.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.config.edge import IssuerConfig
from gateway.config.holders import GrantConfig
from gateway.identity.bounded import BoundedDict
from gateway.identity.caller import Principal
from gateway.identity.jwks import REFETCH_WAIT_S, REFETCH_WITHIN_S, SOUGHT, IssuerKeys, Sought
from gateway.identity.key_set import KID, VerificationKey, algorithms
from shared.process.shield import Done
from shared.wire.errors import IdentityUnavailable, Unauthenticated
from shared.wire.ids import KeyId, TenantId
from shared.wire.undecodable import UNDECODABLE

TOKEN_LEN_MAX: Final = 8000
"""Bytes of a token: a header holds hardly more (`shared.process.listening`)."""
VERIFIED_MAX: Final = 16 * 1024
"""Tokens that are known to be good, and callers that they name; some 10 MiB."""
SUB_LEN_MAX: Final = 255
SUBJECT_DIGITS: Final = 32
SKEW_S: Final = 30.0
"""How far an issuer's clock may be off, in seconds."""
TYPES: Final = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""The types that a token may name (header `typ`), in lower case (RFC 7519; RFC 9068 for access tokens)."""

_SEGMENTS: Final = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_SHOWN: Final = re.compile(r"[A-Za-z0-9._~+/:@-]{1,100}")
_TIME: Final = Meta(ge=0, le=2**53)
_Time = Annotated[int, _TIME] | Annotated[float, _TIME]
_Text = Annotated[str, Meta(min_length=1)]

Claims = Mapping[str, Any]
T = TypeVar("T")


class _Header(Struct, frozen=True):
    alg: str
    kid: str | None = None
    typ: str | None = None
    crit: object = UNSET
    b64: object = UNSET


class _Registered(Struct, frozen=True):
    """The registered claims (RFC 7519 section 4.1) that are needed, and those that bound a token in time."""

    iss: _Text
    sub: Annotated[str, Meta(min_length=1, max_length=SUB_LEN_MAX)]
    aud: _Text | list[_Text]
    exp: _Time
    nbf: _Time | UnsetType = UNSET
    iat: _Time | UnsetType = UNSET


class _Read(Struct, frozen=True):
    """A token whose form and claims are in order, and whose signature has not been checked."""

    issuer: _Issuer
    header: _Header
    registered: _Registered
    claims: Claims
    signed: bytes
    signature: bytes


class _Issuer(Struct, frozen=True, eq=False):
    config: IssuerConfig
    keys: IssuerKeys
    grants: tuple[GrantConfig, ...]


class _Verified(Struct, frozen=True):
    """A good token, as far as it is remembered."""

    principal: Principal
    keys: IssuerKeys
    generation: int
    until_s: float


class TokenTable:
    """All issuers and grants at one moment. Immutable but for what it remembers: a reload builds another."""

    __slots__ = ("_issuers", "_principals", "_tenants", "_verified")

    def __init__(
        self,
        issuers: Iterable[IssuerConfig],
        grants: Iterable[GrantConfig],
        tenants: Iterable[TenantId],
        keys: Mapping[str, IssuerKeys],
    ) -> None:
        """`keys` are those of each issuer, by its id."""
        grants = tuple(grants)
        self._issuers: Final = {
            issuer.issuer: _Issuer(
                issuer, keys[issuer.id], tuple(grant for grant in grants if grant.issuer == issuer.id)
            )
            for issuer in issuers
        }
        self._tenants: Final = frozenset(tenants)
        self._verified: Final = BoundedDict[bytes, _Verified](VERIFIED_MAX)
        self._principals: Final = BoundedDict[tuple[KeyId, TenantId, int], Principal](VERIFIED_MAX)
        """One for each caller, so that what is worked out for it outlives a single token."""

    def identify(
        self, token: str, now_s: float, whose: Callable[[], str] = lambda: ""
    ) -> Awaitable[Principal]:
        """The caller that a token names. Waits only where its key is not known, by rule 1 of
        `gateway.identity.jwks`, which has it fetched. `whose` tells with whom it shares the places of those
        who wait.

        Raises:
            Unauthenticated: whatever is wrong; `detail` says what, for the operator.
            IdentityUnavailable: the issuer's keys are not known at the moment.
        """
        if len(token) > TOKEN_LEN_MAX or not token.isascii():
            _refuse(f"longer than {TOKEN_LEN_MAX} bytes, or not ASCII")
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is not None and now_s < known.until_s and known.generation == known.keys.generation:
            _require_trusted(known.keys)
            return Done(known.principal)
        read = self._read(token, now_s)
        keys = read.issuer.keys
        keys.reread()
        _require_trusted(keys)
        if (principal := self._accepted(read, digest)) is not None:
            return Done(principal)
        begins_in_s = keys.seek(_sought(read, digest))
        if begins_in_s is None or begins_in_s > REFETCH_WITHIN_S:
            raise self._refusal(read, digest)
        return self._after(read, digest, begins_in_s + REFETCH_WAIT_S, whose())

    async def _after(self, read: _Read, digest: bytes, wait_s: float, whose: str) -> Principal:
        """The caller that a token names whose key is being looked for."""
        keys, sought, tried = read.issuer.keys, _sought(read, digest), read.issuer.keys.keys
        deadline_s = asyncio.get_running_loop().time() + wait_s
        with keys.waiting.place(whose) as has_place:
            if not has_place:
                SOUGHT.inc(keys.config.id, "no_place")
                raise _unavailable(keys)
            is_over = False
            while not is_over:
                is_over = not await keys.waiting.called(deadline_s)
                _require_trusted(keys)
                is_new = keys.keys is not tried
                if is_new and (principal := self._accepted(read, digest, tried)) is not None:
                    SOUGHT.inc(keys.config.id, "found")
                    return principal
                tried = keys.keys
                is_over = is_over or keys.seek(sought) is None
            raise self._refusal(read, digest)

    def _refusal(self, read: _Read, digest: bytes) -> Unauthenticated | IdentityUnavailable:
        """The refusal of a token whose key is not known. Where a fetch may still find it, it asks for a
        retry."""
        keys = read.issuer.keys
        if not keys.is_certain(_sought(read, digest)):
            SOUGHT.inc(keys.config.id, "put_off")
            return _unavailable(keys, keys.retry_after_s)
        SOUGHT.inc(keys.config.id, "unknown")
        kid, algorithm = read.header.kid, read.header.alg
        if kid is None:
            told = f"no kid, and no key for {algorithm} that has signed it, or too many to try"
            return _refusal(told, read.issuer)
        return _refusal(f"no key {kid} for {algorithm}", read.issuer)

    def _read(self, token: str, now_s: float) -> _Read:
        """All that is checked before the signature: length, form, issuer, algorithm, key, audience, times
        (rule 1)."""
        found = _SEGMENTS.fullmatch(token)
        if found is None:
            _refuse("not three parts in base64url")
        header = _convert(_json(_decoded(found[1])), _Header, "header")
        claims = _json(_decoded(found[2]))
        registered = _convert(claims, _Registered, "claims")
        issuer = self._issuers.get(registered.iss)
        if issuer is None:
            _refuse(f"unknown issuer {_shown(registered.iss)}")
        _check_header(header, issuer)
        _check_claims(registered, issuer, now_s)
        signed = token[: found.start(3) - 1].encode()
        return _Read(issuer, header, registered, claims, signed, _decoded(found[3]))

    def _accepted(
        self, read: _Read, digest: bytes, tried: Collection[VerificationKey] = ()
    ) -> Principal | None:
        """Check the signature and look for what is granted. None where the key is not known, as far as the
        token says which it is. The keys in `tried` have not signed it."""
        issuer, registered, header = read.issuer, read.registered, read.header
        fitting = [key for key in issuer.keys.fitting(header.kid, header.alg) if key not in tried]
        verify = algorithms()[header.alg].verify
        if not any(verify(read.signed, key.material, read.signature) for key in fitting):
            if fitting and header.kid is not None:
                _refuse("wrong signature", issuer)
            return None
        principal = self._granted(read)
        until_s = registered.exp + SKEW_S
        self._verified.put(digest, _Verified(principal, issuer.keys, issuer.keys.generation, until_s))
        return principal

    def _granted(self, read: _Read) -> Principal:
        issuer, claims = read.issuer, read.claims
        fitting = ((at, grant) for at, grant in enumerate(issuer.grants) if _fits(grant, claims))
        if (first := next(fitting, None)) is None:
            _refuse("no grant fits its claims", issuer)
        at, grant = first
        tenant = TenantId(grant.tenant or _tenant_in(grant, claims))
        if tenant not in self._tenants:
            _refuse(f"the tenant {_shown(tenant)} that it names does not exist", issuer)
        caller = (subject_id(issuer.config, read.registered.sub), tenant, at)
        principal = self._principals.get(caller)
        if principal is None:
            principal = Principal(
                *caller[:2],
                grant.models,
                grant.limits,
                grant.service_tier,
                model_limits=grant.model_limits,
            )
            self._principals.put(caller, principal)
        return principal


def subject_id(issuer: IssuerConfig, sub: str) -> KeyId:
    """The id of an issuer's subject in logs and quotas: the issuer's id, a colon, and the beginning of the
    SHA-256 of iss, a line feed and sub. The same for all its tokens, unlike any key's id, and of a form and
    length of ours, whatever an issuer puts into sub, such as a person's address."""
    digest = hashlib.sha256(f"{issuer.issuer}\n{sub}".encode()).hexdigest()
    return KeyId(f"{issuer.id}:{digest[:SUBJECT_DIGITS]}")


# -- checks ---------------------------------------------------------------------------------------


def _check_header(header: _Header, issuer: _Issuer) -> None:
    if header.alg not in issuer.config.algorithms:
        _refuse(f"algorithm {_shown(header.alg)} is none of the issuer's", issuer)
    if header.crit is not UNSET or header.b64 is not UNSET:
        _refuse("an extension (crit or b64) that is not supported", issuer)
    if header.typ is not None and header.typ.lower() not in TYPES:
        _refuse(f"typ {_shown(header.typ)} is no access token's", issuer)
    if header.kid is not None and not KID.fullmatch(header.kid):
        _refuse("kid is not 1 to 128 plain characters", issuer)


def _check_claims(claims: _Registered, issuer: _Issuer, now_s: float) -> None:
    named = {claims.aud} if isinstance(claims.aud, str) else set(claims.aud)
    if named.isdisjoint(issuer.config.audiences):
        _refuse("another audience", issuer)
    if now_s >= claims.exp + SKEW_S:
        late_s = int(now_s - claims.exp)
        raise Unauthenticated(
            "The token has expired.", detail=f"token of {issuer.config.id}: expired {late_s} s ago"
        )
    for name, time_s in (("nbf", claims.nbf), ("iat", claims.iat)):
        if time_s is not UNSET and now_s < time_s - SKEW_S:
            _refuse(f"{name} is {int(time_s - now_s)} s ahead", issuer)


def _sought(read: _Read, digest: bytes) -> Sought:
    """The name of a token's key, by which a key that is not known is remembered."""
    return digest if read.header.kid is None else read.header.kid


def _require_trusted(keys: IssuerKeys) -> None:
    if not keys.is_trusted:
        raise _unavailable(keys)


def _unavailable(keys: IssuerKeys, retry_after_s: float = 1.0) -> IdentityUnavailable:
    return IdentityUnavailable(
        "Tokens of this issuer cannot be checked at the moment.",
        retry_after_s=retry_after_s,
        detail=f"the keys of {keys.config.id} are not known, or not all of them",
    )


def _refuse(detail: str, issuer: _Issuer | None = None) -> NoReturn:
    raise _refusal(detail, issuer)


def _refusal(detail: str, issuer: _Issuer | None = None) -> Unauthenticated:
    whose = "" if issuer is None else f" of {issuer.config.id}"
    return Unauthenticated("The token is not valid here.", detail=f"token{whose}: {detail}")


def _shown(text: str) -> str:
    """A text of the token for the log, where it is plain."""
    return repr(text) if _SHOWN.fullmatch(text) else "of characters that are not shown"


# -- claims ---------------------------------------------------------------------------------------


def _fits(grant: GrantConfig, claims: Claims) -> bool:
    return not grant.claim or grant.value in _texts(_claim(claims, grant.claim), grant.claim)


def _claim(claims: Claims, path: tuple[str, ...]) -> object:
    """The claim at a path; None where there is none."""
    inside: object = claims
    for name in path:
        inside = inside.get(name) if isinstance(inside, dict) else None
    return inside


def _texts(value: object, path: tuple[str, ...]) -> list[str]:
    """The values that a claim has, each as a configuration spells it."""
    if path == ("scope",) and isinstance(value, str):  # RFC 8693 section 4.2
        return value.split(" ")
    values = value if isinstance(value, list) else [value]
    return [
        json.dumps(one) if isinstance(one, bool | int) else one
        for one in values
        if isinstance(one, bool | int | str)
    ]


def _tenant_in(grant: GrantConfig, claims: Claims) -> str:
    tenant = _claim(claims, grant.tenant_claim)
    return tenant if isinstance(tenant, str) else ""


# -- decoding -------------------------------------------------------------------------------------


def _decoded(segment: str) -> bytes:
    """The bytes of a part in base64url, which has one spelling for them: without padding, and with zeros in
    the bits that are left over."""
    if len(segment) % 4 == 1:
        _refuse("a part is no base64url")
    data = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != segment:
        _refuse("a part is no base64url")
    return data


def _json(data: bytes) -> dict[str, Any]:
    """A JSON object, read strictly: no name twice, no NaN, no half character (rule 3)."""
    try:
        found: object = msgspec.json.decode(data)  # all but a name given twice
        json.loads(data, object_pairs_hook=_unique)
    except (*UNDECODABLE, ValueError):
        _refuse("a part is no JSON, or names a member twice")
    if not isinstance(found, dict):
        _refuse("a part is no JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError


def _convert(value: dict[str, Any], type_: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        _refuse(f"{what}: {error}")

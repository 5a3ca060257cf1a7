"""Keys of issuers of tokens, as a JWK set (RFC 7517) or a file with a shared secret holds them.

Rule: only public keys of stated kinds and sizes are taken from a set, only those meant for signatures, and of
a private key its public part alone. A shared secret comes from a file of its own: a public key can never be
taken for a secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shared.wire.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from jwt.algorithms import Algorithm

SET_LEN_MAX: Final = 256 * 1024
"""The largest key file, in bytes."""
KEYS_MAX: Final = 64
"""The most keys of one issuer."""
RSA_BITS_MIN: Final = 2048
RSA_BITS_MAX: Final = 4096
"""The largest RSA key: checking a signature takes time with the square of its size."""
KID: Final = re.compile(r"[A-Za-z0-9._~+/=:@-]{1,128}")
"""The form of a key id. It is only ever looked up."""


class BadKeys(Exception):
    """Keys that cannot be used; each problem is for the operator, and shows nothing of a secret."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A key that checks signatures."""

    kid: str | None
    """Its id; None for a key that has none."""
    algorithms: frozenset[str]
    """The algorithms that it may be used with."""
    source: bytes = field(repr=False)
    """The key as it was read: two keys are the same when it is."""
    material: Any = field(repr=False, compare=False)
    """The key as PyJWT's algorithms take it."""


class Jwk(msgspec.Struct, frozen=True):
    """The public members of a JSON Web Key (RFC 7517, RFC 7518 section 6). Private ones are not read."""

    kty: str
    kid: str | None = None
    use: str | None = None
    key_ops: list[str] | None = None
    alg: str | None = None
    crv: str | None = None
    n: str | None = None
    e: str | None = None
    x: str | None = None
    y: str | None = None


class _JwkSet(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_FITTING: Final = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA"}),
}
"""The algorithms of each kind of key: its `kty` and curve."""


@cache
def algorithms() -> dict[str, Algorithm]:
    """PyJWT's implementations, by their names. Imported at first use: with cryptography they take 9 MiB, for
    which a gateway without issuers has no use."""
    from jwt.algorithms import get_default_algorithms

    return get_default_algorithms()


def keys_of(data: bytes) -> tuple[tuple[VerificationKey, ...], list[str]]:
    """The keys of a JWK set, and what is wrong with those that were left out. Keys of one id differ in their
    algorithms (RFC 7517 section 4.5); those without one need not. Raises BadKeys where none is left, or where
    they are too many."""
    try:
        found = msgspec.json.decode(data, type=_JwkSet).keys
    except UNDECODABLE:
        raise BadKeys("is no JWK set") from None
    if len(found) > KEYS_MAX:
        raise BadKeys(f"has {len(found)} keys, more than {KEYS_MAX}")
    keys: list[VerificationKey] = []
    problems = []
    for at, raw in enumerate(found):
        try:
            key = _key_of(raw)
            alike = [one for one in keys if one.kid == key.kid and one.algorithms & key.algorithms]
            if key in alike or (alike and key.kid is not None):
                raise BadKeys("has the id of another, and an algorithm of it")
            keys.append(key)
        except BadKeys as error:
            problems.append(f"keys[{at}] {error}")
    if not keys:
        raise BadKeys("has no key that can be used", *problems)
    return tuple(keys), problems


def _key_of(raw: msgspec.Raw) -> VerificationKey:
    try:
        jwk = msgspec.json.decode(raw, type=Jwk)
    except UNDECODABLE:
        raise BadKeys("is no JSON Web Key") from None
    if jwk.kid is not None and not KID.fullmatch(jwk.kid):
        raise BadKeys("has an id that is not 1 to 128 plain characters")
    if jwk.use not in (None, "sig") or (jwk.key_ops is not None and "verify" not in jwk.key_ops):
        raise BadKeys("is not for signatures")
    fitting = _FITTING.get((jwk.kty, jwk.crv))
    if fitting is None:
        raise BadKeys("is of a kind that is not used here")
    fitting = fitting if jwk.alg is None else fitting & {jwk.alg}
    if not fitting:
        raise BadKeys("has an algorithm that does not go with its kind")
    public = {name: text for name, text in msgspec.structs.asdict(jwk).items() if isinstance(text, str)}
    try:
        material = algorithms()[min(fitting)].from_jwk(public)
    except Exception as error:  # whatever libraries make of a key that is not ours
        raise BadKeys(f"is malformed ({type(error).__name__})") from None
    if jwk.kty == "RSA" and not RSA_BITS_MIN <= material.key_size <= RSA_BITS_MAX:
        raise BadKeys(f"is not {RSA_BITS_MIN} to {RSA_BITS_MAX} bits long")
    return VerificationKey(jwk.kid, fitting, msgspec.json.encode(jwk), material)


def secret_of(data: bytes, names: Sequence[str]) -> VerificationKey:
    """The shared secret that a file holds, without the line end after it, for the algorithms of these names.
    Raises BadKeys."""
    from jwt.exceptions import PyJWTError

    secret = data.removesuffix(b"\n").removesuffix(b"\r")
    needed = max(int(name.removeprefix("HS")) // 8 for name in names)
    if len(secret) < needed:
        raise BadKeys(f"holds {len(secret)} bytes; {max(names)} needs at least {needed} (RFC 7518)")
    try:
        material = algorithms()[max(names)].prepare_key(secret)
    except PyJWTError:
        raise BadKeys("holds a public key or a JSON Web Key, which is no secret") from None
    return VerificationKey(None, frozenset(names), secret, material)

"""Issuers of tokens for tests: their keys, tokens of any shape, and an https server of their JWK sets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from gateway.config.edge import IssuerConfig
from gateway.config.holders import GrantConfig
from gateway.identity.caller import Principal
from gateway.identity.jwks import KeySources
from gateway.identity.jwt import TokenTable
from shared.process.setting_values import to_toml
from shared.process.shield import Done
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock

ISS = "https://idp.test/"
AUDIENCE = "penstock"
NOW_S = 1_700_000_000
"""The time of `tests.fakes.VirtualClock`."""
ALGORITHMS = get_default_algorithms()


@cache
def private_key(kind: str, number: int = 0) -> Any:
    """What signs by the algorithm `kind`: a key pair, or a shared secret. Those of different numbers differ.
    RSA takes long to make, so each is made once, for all algorithms that use it."""
    match kind:
        case "RS256":
            return rsa.generate_private_key(65537, 2048)
        case "RS384" | "RS512" | "PS256" | "PS384" | "PS512":
            return private_key("RS256", number)
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "ES384":
            return ec.generate_private_key(ec.SECP384R1())
        case "ES512":
            return ec.generate_private_key(ec.SECP521R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
        case "HS256" | "HS384" | "HS512":
            return hashlib.sha512(str(number).encode()).digest()
    raise AssertionError(kind)


def b64(data: bytes | str | Mapping[str, Any]) -> str:
    """A part of a token."""
    if isinstance(data, Mapping):
        data = json.dumps(data)
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass
class Key:
    """A key of an issuer."""

    kid: str
    kind: str = "ES256"
    number: int = 0

    @property
    def private(self) -> Any:
        return private_key(self.kind, self.number)

    @property
    def jwk(self) -> dict[str, Any]:
        """Its public part."""
        public = ALGORITHMS[self.kind].to_jwk(self.private.public_key(), as_dict=True)
        return {**public, "kid": self.kid, "use": "sig", "alg": self.kind, "key_ops": ["verify"]}

    def signature(self, signed: str) -> bytes:
        return ALGORITHMS[self.kind].sign(signed.encode(), self.private)

    def sign(self, header: Mapping[str, Any] | str, claims: Mapping[str, Any] | str) -> str:
        """A token whose header and claims are exactly these."""
        signed = f"{b64(header)}.{b64(claims)}"
        return f"{signed}.{b64(self.signature(signed))}"

    def token(self, now_s: float = NOW_S, header: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """A good token, but for what is given. A claim or member that is `...` is left out."""
        all_claims = claims_at(now_s) | claims
        all_header = {"alg": self.kind, "kid": self.kid, "typ": "JWT"} | dict(header or {})
        return self.sign(
            {name: value for name, value in all_header.items() if value is not ...},
            {name: value for name, value in all_claims.items() if value is not ...},
        )


def claims_at(now_s: float) -> dict[str, Any]:
    """The claims of a good token."""
    return {"iss": ISS, "sub": "user-1", "aud": AUDIENCE, "exp": int(now_s) + 300, "iat": int(now_s)}


def jwk_set(*keys: Key) -> bytes:
    return json.dumps({"keys": [key.jwk for key in keys]}).encode()


def nameless_set(*keys: Key) -> bytes:
    """The same of keys without ids."""
    jwks = [{name: value for name, value in key.jwk.items() if name != "kid"} for key in keys]
    return json.dumps({"keys": jwks}).encode()


Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class KeyServer:
    """`async with KeyServer(directory, key) as server:` an https server of a JWK set."""

    directory: Path
    keys: tuple[Key, ...]
    asked: int = 0
    """The number of requests so far."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, nothing is answered."""
    answer: Answer | None = None
    """Answers in place of the set."""
    port: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.authority = trustme.CA()
        self._stack = AsyncExitStack()

    @property
    def ca(self) -> str:
        return str(self.directory / "idp.ca")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/jwks.json"

    def settings(self, **more: Any) -> dict[str, Any]:
        """The issuer's part of the configuration."""
        named = {"id": "idp", "issuer": ISS, "audiences": [AUDIENCE], "algorithms": ["ES256", "RS256"]}
        return {**named, "jwks_url": self.url, "ca": self.ca, **more}

    async def __aenter__(self) -> KeyServer:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        self.authority.cert_pem.write_to_path(self.ca)
        runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self._stack.aclose()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        await self.gate.wait()
        if self.answer is not None:
            return await self.answer(request)
        return web.Response(body=jwk_set(*self.keys), content_type="application/json")


EC = Key("ec-1")
RSA = Key("rsa-1", "RS256")
ED = Key("ed-1", "EdDSA")
SECRET = b"0123456789abcdef0123456789abcdef"
EVERYBODY = GrantConfig("idp", tenant="acme")


def issuer(path: Path, *keys: Key, **more: Any) -> IssuerConfig:
    """An issuer whose keys are in a file."""
    path.write_bytes(jwk_set(*keys))
    base = IssuerConfig("idp", ISS, (AUDIENCE,), ("ES256", "RS256", "EdDSA"), jwks_file=str(path))
    return replace(base, **more)


def table(*issuers: IssuerConfig, grants: tuple[GrantConfig, ...] = (EVERYBODY,)) -> TokenTable:
    tenants = [TenantId("acme"), TenantId("other")]
    return TokenTable(issuers, grants, tenants, KeySources(VirtualClock()).of(issuers))


def identify(tokens: TokenTable, token: str, now_s: float = NOW_S) -> Principal:
    found = tokens.identify(token, now_s)
    assert isinstance(found, Done), "nothing is waited for"
    principal: Principal = found.result
    return principal


GRANT = {"issuer": "idp", "tenant": "acme"}


def as_toml(config: IssuerConfig) -> dict[str, Any]:
    """The settings of an issuer as a file has them."""
    return tomllib.loads(to_toml(config))


ISSUER = IssuerConfig("idp", ISS, (AUDIENCE,), ("ES256",), jwks_file="keys.json")

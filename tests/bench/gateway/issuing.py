"""Issuers of tokens for benches: keys that sign, certificates, and an https server of published keys."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import jwt
import msgspec
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

AUDIENCE: Final = "penstock"
ALGORITHM: Final = "ES256"
TOKEN_S: Final = 3600
HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key pair of an issuer."""

    kid: str
    pair: ec.EllipticCurvePrivateKey

    @classmethod
    def made(cls, kid: str) -> Self:
        return cls(kid, ec.generate_private_key(ec.SECP256R1()))

    def token(self, issuer: str, subject: str, number: int = 0) -> str:
        """A token for an hour. Those of different numbers differ."""
        claims = {"iss": issuer, "aud": AUDIENCE, "sub": subject, "exp": int(time.time()) + TOKEN_S}
        return jwt.encode({**claims, "jti": str(number)}, self.pair, ALGORITHM, headers={"kid": self.kid})


def jwk_set(*keys: SigningKey) -> bytes:
    """The set of public keys that an issuer publishes, as JSON."""
    public = [ECAlgorithm.to_jwk(key.pair.public_key(), as_dict=True) | {"kid": key.kid} for key in keys]
    return msgspec.json.encode({"keys": public})


@dataclass(frozen=True, slots=True)
class Certificate:
    """Paths of a certificate for this machine, which it has signed itself, and of its key, both PEM."""

    cert: str
    key: str

    @classmethod
    def made(cls, directory: Path) -> Self:
        pair = ec.generate_private_key(ec.SECP256R1())
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        cert, key = directory / "cert.pem", directory / "key.pem"
        cert.write_bytes(_certificate(pair).public_bytes(serialization.Encoding.PEM))
        key.write_bytes(pair.private_bytes(serialization.Encoding.PEM, *private))
        return cls(str(cert), str(key))


def _certificate(pair: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address(HOST))
    builder = x509.CertificateBuilder(name, name, pair.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return builder.sign(pair, hashes.SHA256())


class KeyServer:
    """`async with KeyServer(directory) as server:` an https server of the key sets of issuers, by name."""

    def __init__(self, directory: Path) -> None:
        self.certificate = Certificate.made(directory)
        self.published: dict[str, tuple[SigningKey, ...]] = {}
        self._port = 0
        self._stack = AsyncExitStack()

    def url(self, name: str) -> str:
        return f"https://{HOST}:{self._port}/{name}"

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate.cert, self.certificate.key)
        runner = web.ServerRunner(web.Server(self._answer))
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, HOST, 0, ssl_context=context).start()
        self._port = runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        keys = self.published[request.path.lstrip("/")]
        return web.Response(body=jwk_set(*keys), content_type="application/json")

"""The settings of the listeners, of TLS and of the issuers of tokens, and the bounds on what the gateway
holds: the part of the configuration (`gateway.config.whole`) that says how the gateway is reached and which
signatures it trusts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Final, Literal

from msgspec import Meta

from gateway.config.secret import SecretSource
from shared.apis.holding import memory_max
from shared.fairness.fair_share import FairShare
from shared.process.setting_values import ConfigError
from shared.process.settings import Moment, Port, Rule, Text, Unit, url_parts
from shared.wire.shapes import BODY_LEN_MAX, TOKENS_MAX

KIB: Final = 1024
MIB: Final = 1024 * KIB
ENTRIES_MAX: Final = 10_000
"""The most keys, and the most tenants: they are held in memory, each with its usage."""
AUDIENCES_MAX: Final = 16
ISSUERS_MAX: Final = 32
_BASE_URL: Final = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")
HMAC_PREFIX: Final = "HS"
"""The beginning of the names of the algorithms that take a shared secret."""

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""An id, which logs, metrics and a header of the hop show."""
KeyHash = Annotated[
    str,
    Meta(pattern=r"^sha256:[0-9a-f]{64}$"),
    Rule(
        "be the hash of a key, sha256: and 64 of 0-9 a-f, and not the key; `penstock keys mint` shows both",
        lambda _: True,
    ),
]
Bytes = Annotated[int, Unit("bytes")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
HostName = Annotated[str, Meta(pattern=r"^(\*|[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?)$")]
"""The name of a host, in small letters; `*` is any."""
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Algorithm = Literal[
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384",
    "ES512", "EdDSA",
]  # fmt: skip
"""A signature algorithm of JWS (RFC 7518, RFC 8037)."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """A listener's certificate, and whether it asks clients for theirs. The files are read again when they
    change."""

    cert: Text
    """File with the certificate chain, PEM."""
    key: Text
    """File with its private key, PEM."""
    client_certificates: Literal["none", "optional", "required"] = "none"
    """True if clients are asked for a certificate (mTLS). optional: one that is shown must be good. required:
    without one there is no connection, for probes neither."""
    client_ca: Text | None = None
    """File with the authorities that sign clients' certificates, PEM."""
    crl: Text | None = None
    """File with a revocation list of each authority that signs clients' certificates, PEM. Unset: nothing is
    revoked."""

    def __post_init__(self) -> None:
        if (self.client_certificates == "none") != (self.client_ca is None):
            raise ConfigError(["client_ca belongs to client_certificates that are optional or required"])
        if self.crl is not None and self.client_ca is None:
            raise ConfigError(["crl needs client_ca, with the authorities that sign it"])


@dataclass(frozen=True, slots=True)
class HopConfig:
    """The connections to engines."""

    ca: Text | None = None
    """File with the authorities that are trusted when a replica's URL is https, PEM. Unset: the system's."""
    cert: Text | None = None
    """File with the gateway's own certificate chain, PEM, for engines that ask for one (mTLS)."""
    key: Text | None = None
    """File with its private key, PEM."""
    salt: SecretSource | None = None
    """Where the secret is, env:NAME or file:PATH, that tenants' cached prefixes are kept apart by at engines
    of another make. Gateways before the same engines need the same. Unset: a random one at each start."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(["cert and key belong together"])


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """The public listener."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on; 0 takes any free one, which the log line gateway.listening names."""
    tls: TlsConfig | None = None
    """Serve https. Unset: plain text."""
    plaintext: bool = False
    """Serve plain text on an address beyond this machine: only where TLS ends in front of the gateway, since
    keys and prompts can be read on the way."""
    ready_without_engines: bool = True
    """Whether /readyz says yes while no replica of any model may be sent a request. false: a load balancer
    that has other gateways, with engines of their own, is to ask those."""

    def __post_init__(self) -> None:
        check_plaintext(self.host, self.tls, self.plaintext)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Sizes and counts that bound what the gateway holds."""

    body_len_max: Annotated[Bytes, Meta(ge=KIB, le=BODY_LEN_MAX)] = BODY_LEN_MAX
    """Length of a request body; a longer one is refused with 413."""
    request_memory: Annotated[int, Meta(ge=MIB, le=1024**4)] = 512 * MIB
    """Memory that the bodies of requests and what is made of them may take until they are answered, all
    together. A tenant has three quarters of it at most; beyond it requests get 503 at once."""
    live_max: Annotated[int, Meta(ge=1, le=100_000), Unit("requests")] = 4096
    """Requests in progress; beyond it requests get 503 at once. A tenant has three quarters of it at most."""
    connections_max: Annotated[int, Meta(ge=1, le=1_000_000), Unit("connections")] = 16_384
    """Client connections, idle ones too, or as many as the process may open files for; beyond it the oldest
    that has sent nothing is closed, else the oldest idle one, else the newest."""
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads that tokenize long texts and parse large bodies."""

    def __post_init__(self) -> None:
        needed = memory_max(self.body_len_max)
        if FairShare(self.request_memory).most < needed:
            raise ConfigError(
                [
                    f"request_memory must be at least {-(-needed * 4 // 3)} bytes, so that a body of "
                    f"body_len_max ({self.body_len_max}) bytes fits into one tenant's part of it"
                ]
            )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The settings of admission."""

    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """The answer to fields of a request that OpenAI's API does not have. ignore: name them in the answer.
    refuse: answer 400."""
    completion_estimate: Annotated[int, Meta(ge=1, le=TOKENS_MAX), Unit("tokens")] = 1024
    """Tokens that are reserved at least for each choice of a request that states no maximum."""


@dataclass(frozen=True, slots=True)
class IssuerConfig:
    """A signer of tokens (JWT) that this gateway accepts."""

    id: Id
    """Its name in logs and metrics, and the first part of its callers' key ids."""
    issuer: Name
    """The claim iss of its tokens, character for character."""
    audiences: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=AUDIENCES_MAX)]
    """The claim aud of its tokens names one of these at least."""
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)]
    """The signature algorithms that it uses: those with a shared secret (HS...), or others, never both."""
    jwks_url: Name | None = None
    """https URL of its public keys, a JWK set. It is asked directly, not through a proxy."""
    jwks_file: Text | None = None
    """File with its public keys, a JWK set. It is read again when it changes."""
    secret_file: Text | None = None
    """File with the secret that it shares with this gateway, at least as long as the signature. It is read
    again when it changes."""
    ca: Text | None = None
    """File with the authorities that are trusted when keys are fetched, PEM. It is read again when it
    changes. Unset: the system's."""

    def __post_init__(self) -> None:
        if problems := list(_issuer_problems(self)):
            raise ConfigError(problems)


def _issuer_problems(issuer: IssuerConfig) -> Iterator[str]:
    if sum(one is not None for one in (issuer.jwks_url, issuer.jwks_file, issuer.secret_file)) != 1:
        yield "needs exactly one of jwks_url, jwks_file and secret_file"
    is_secret = issuer.secret_file is not None
    if any(name.startswith(HMAC_PREFIX) != is_secret for name in issuer.algorithms):
        yield "algorithms HS... need secret_file, all others jwks_url or jwks_file"
    if issuer.jwks_url is not None and not _is_https(issuer.jwks_url):
        yield f"jwks_url {issuer.jwks_url!r} is no https URL"


def _is_https(text: str) -> bool:
    parts = url_parts(text)
    return parts is not None and parts.scheme == "https" and parts.username is None


def is_base_url(text: str) -> bool:
    """True if the text is an http or https URL without a user, a query and a fragment."""
    return _BASE_URL.fullmatch(text) is not None and url_parts(text) is not None


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


LABEL_LEN_MAX: Final = 128
Label = Annotated[
    str,
    Meta(min_length=1, max_length=LABEL_LEN_MAX),
    Rule(f"be a printable text of 1 to {LABEL_LEN_MAX} characters", str.isprintable),
]
"""A text that operators give to a key."""
LABELS_MAX: Final = 16
Labels = Annotated[tuple[Label, ...], Meta(max_length=LABELS_MAX)]


def check_plaintext(host: str, tls: TlsConfig | None, plaintext: bool) -> None:
    """Raises ConfigError unless a listener has TLS, is of this machine alone, or was asked for plain text by
    name: keys and prompts are sent to it."""
    if tls is None and not plaintext and not is_loopback(host):
        raise ConfigError(
            [
                f"host {host!r} is reached from other machines: give tls, or set plaintext = true where TLS "
                "ends in front of the gateway, or nobody else reads the network"
            ]
        )
    if tls is not None and plaintext:
        raise ConfigError(["plaintext and tls exclude each other"])


@dataclass(frozen=True, slots=True)
class AnyKeyConfig:
    """What keys of callers and of operators have in common."""

    id: Id
    """The keyid of a minted key; any name for a development key. Audit lines name it."""
    hash: KeyHash = field(repr=False)
    """sha256: and the hex digest of the whole key."""
    _: KW_ONLY
    labels: Labels = ()
    """Texts for operators, such as the key's owner; lists show them."""
    created: Moment | None = None
    """When it was created, with the offset from UTC. Unset: not known."""
    expires: Moment | None = None
    """When it stops working, with the offset from UTC. Unset: never."""
    disabled: bool = False
    """True if the key is revoked."""
    previous_hash: KeyHash | None = field(default=None, repr=False)
    """The hash of the whole key as it was before its secret was replaced, which still works until
    previous_expires."""
    previous_expires: Moment | None = None
    """When the secret before the last replacement stops working, with the offset from UTC."""

    def __post_init__(self) -> None:
        if (self.previous_hash is None) != (self.previous_expires is None):
            raise ConfigError(["previous_hash and previous_expires belong together"])


@dataclass(frozen=True, slots=True)
class OperatorKeyConfig(AnyKeyConfig):
    """A key of an operator. It opens the admin listener's changes, and nothing on the public port."""


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """A second listener: `/metrics` and the probes for everybody who reaches it, changes for operators' keys.

    It is not on the public port because label values name tenants and models.
    """

    host: Text = "127.0.0.1"
    """Address that /metrics and the probes are served on, without authentication: for the operator's network
    only."""
    port: Port | None = None
    """Port for them. Unset: there is no such listener."""
    names: Annotated[tuple[HostName, ...], Meta(max_length=64)] = ()
    """Names by which it may be called, in URLs and in the header Host, beside addresses and localhost; `*` is
    any. Under another it answers 403: a page in an operator's browser may have any name point here (DNS
    rebinding)."""
    keys: Annotated[tuple[OperatorKeyConfig, ...], Meta(max_length=ENTRIES_MAX)] = ()
    """Keys that may change something. Without one, nothing can be changed."""
    tls: TlsConfig | None = None
    """Serve https. Unset: plain text."""
    plaintext: bool = False
    """Serve plain text on an address beyond this machine: only on a network that nobody else reads, since
    operators' keys and the keys that they make are sent over it."""
    records: Annotated[int, Meta(ge=0, le=100_000)] = 2048
    """Completed requests of each kind (answered; failed or slow; refused; of callers without a key) that are
    kept for `/admin/v1/requests`, the latest of them, all in 16 MiB at most. 0: none."""

    def __post_init__(self) -> None:
        check_plaintext(self.host, self.tls, self.plaintext)

    @property
    def called(self) -> tuple[str, ...]:
        """The names by which it may be called: that which it listens on, too."""
        return (self.host, *self.names)

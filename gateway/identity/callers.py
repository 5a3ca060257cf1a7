"""All ways to name a caller, in one order:

1. What the `Authorization` header holds decides, where there is one, or `x-api-key`, which Anthropic's SDKs
   send. It is a token (JWT) where issuers are
   configured and it has the form of one, at least two dots, and is no key: a development key may have dots.
   Else it is a key.
2. Without these headers it is the client's certificate.

The first that is shown decides alone. A key that is revoked does not fall back on the certificate that came
with it: else revoking it would change its caller's rights instead of ending them. And a certificate that is
revoked or has expired is refused whatever else is shown, as it would be in the handshake of a new connection.

Before any of that is asked, `KnownCallers` has the tenants of the callers that were let in of late, by what
their `Authorization` headers hold. They tell whose turn a connection takes before its request is read, and
decide about nothing else: keys that do not work any more may still be here. Kept are Python's own hashes of
the headers, which tell nothing of a key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

from gateway.config.whole import GatewayConfig
from gateway.identity.bounded import BoundedDict
from gateway.identity.caller import Caller, Identity, Principal, Revoked
from gateway.identity.jwks import KeySources
from gateway.identity.keys import KEY_LEN_MAX, KeyTable
from shared.process.shield import Done
from shared.wire.errors import Unauthenticated
from shared.wire.ids import TenantId

if TYPE_CHECKING:
    from gateway.identity.certificates import CertificateTable
    from gateway.identity.jwt import TokenTable

# -- callers of late ------------------------------------------------------------------------------


CALLERS_MAX: Final = 16_384
"""The headers that are kept. A tenant whose are not any more loses its own turns until its next request."""


class KnownCallers:
    __slots__ = ("_tenants",)

    def __init__(self) -> None:
        self._tenants: Final[BoundedDict[int, TenantId]] = BoundedDict(CALLERS_MAX)

    def note(self, authorization: str, tenant: TenantId) -> None:
        """Note that a caller with this header belongs to the tenant."""
        if self._tenants.get(own := hash(authorization)) != tenant:
            self._tenants.put(own, tenant)

    def tenant_of(self, authorization: str) -> TenantId | None:
        """The tenant that a caller with this header belonged to. None where there was none of late."""
        return self._tenants.get(hash(authorization))


# -- all callers ----------------------------------------------------------------------------------


_DOTS: Final = 2


class Callers:
    """An `Identity` by keys, tokens and certificates."""

    __slots__ = ("_certificates", "_keys", "_tokens")

    def __init__(
        self, keys: KeyTable, tokens: TokenTable | None, certificates: CertificateTable | None
    ) -> None:
        self._keys: Final = keys
        self._tokens: Final = tokens
        self._certificates: Final = certificates

    def identify(self, caller: Caller, now_s: float) -> Awaitable[Principal]:
        """As `Identity` has it, in the order above."""
        certified: Principal | None = None
        if self._certificates is not None and (certificate := caller.certificate) is not None:
            certified = self._certificates.check(certificate, now_s)
            if caller.authorization is None:
                return Done(_named(certified))
        if self._tokens is not None and (token := self._token(caller.authorization)) is not None:
            return self._tokens.identify(token, now_s, caller.whose)
        return self._keys.identify(caller, now_s)

    def _token(self, authorization: str | None) -> str | None:
        """The text of an `Authorization: Bearer` header that has the form of a token and is no key; None for
        any other. Few tokens are so short that it has to be looked whether they are a key."""
        scheme, _, text = (authorization or "").partition(" ")
        text = text.strip(" ")
        if scheme.lower() != "bearer" or text.count(".") < _DOTS:
            return None
        return None if len(text) <= KEY_LEN_MAX and self._keys.has(authorization) else text


def callers_of(
    config: GatewayConfig,
    keys: KeyTable,
    tenants: Iterable[TenantId],
    sources: KeySources,
    revoked: Callable[[], Revoked],
) -> Identity:
    """The identity of a configuration: of keys alone, where there is nothing else. `tenants` are all that
    tokens may name. `revoked` gives the certificates that are revoked now. Raises ConfigError where an
    issuer's keys cannot be read from their file."""
    tls = config.listen.tls
    signed = sources.of(config.issuers)
    tokens = certificates = None
    # Imported where they are used: what they need takes 9 MiB and 60 ms, which keys alone do not.
    if config.issuers:
        from gateway.identity.jwt import TokenTable

        tokens = TokenTable(config.issuers, config.grants, tenants, signed)
    if tls is not None and tls.client_certificates != "none":
        from gateway.identity.certificates import CertificateTable

        certificates = CertificateTable(config.certificates, revoked)
    return Callers(keys, tokens, certificates) if tokens or certificates else keys


def _named(principal: Principal | None) -> Principal:
    if principal is None:
        message = "You did not provide an API key, and the client certificate names no caller."
        raise Unauthenticated(message, detail="certificate names no caller")
    return principal

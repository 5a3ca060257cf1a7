"""The settings of callers without keys: the rights of tokens' holders, and of client certificates'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from gateway.config.certificate_names import CertificateName, is_dns_name, is_uri, subject_of
from gateway.config.edge import Id, Name
from gateway.config.quotas import NO_LIMITS, PerModel, QuotaLimits
from shared.process.setting_values import ConfigError

ANY: Final = "*"
ALL_MODELS: Final = (ANY,)
Tier = Literal["flex", "default", "priority"]


@dataclass(frozen=True, slots=True)
class GrantConfig:
    """The rights of a token's holder. The first grant that fits the token's issuer and claims is the
    holder's; a token that none fits is refused."""

    issuer: Id
    """Id of the issuer of the token."""
    claim: tuple[Name, ...] = ()
    """Name of the claim that is looked at; within nested claims, the names from the outermost to the
    innermost. Unset: every token of the issuer fits."""
    value: Name | None = None
    """The claim must be this text, number or truth, or a list with it; of the claim scope, one of its
    words."""
    tenant: Id | None = None
    """Id of the tenant that the holder belongs to."""
    tenant_claim: tuple[Name, ...] = ()
    """Name of the claim that is the tenant's id, in place of tenant."""
    models: tuple[Name, ...] = ALL_MODELS
    """Those of the tenant's models that the holder may use; * is all."""
    service_tier: Tier | None = None
    """The highest tier of the holder's requests, where it is below the tenant's."""
    limits: QuotaLimits = NO_LIMITS
    """Quotas of each subject (claim sub) alone, beside its tenant's."""
    model_limits: PerModel = ()
    """Quotas of each subject (claim sub) alone for single models, beside its tenant's."""

    def __post_init__(self) -> None:
        if bool(self.claim) != (self.value is not None):
            raise ConfigError(["claim and value belong together"])
        if (self.tenant is None) != bool(self.tenant_claim):
            raise ConfigError(["needs exactly one of tenant and tenant_claim"])


@dataclass(frozen=True, slots=True)
class CertificateConfig:
    """The rights of a client certificate's holder. The first entry that fits a name of the certificate is
    the holder's."""

    id: Id
    """The holder's name in logs and quotas; no key has the same."""
    tenant: Id
    """Id of the tenant that the holder belongs to."""
    dns: Name | None = None
    """DNS name in the certificate's subjectAltName, in full, in capitals or not; * stands for nothing
    else."""
    uri: Name | None = None
    """URI in its subjectAltName, such as spiffe://prod/billing, character for character."""
    subject: Name | None = None
    """Its whole subject as RFC 4514 writes it, such as CN=billing,O=Acme: as it is printed by openssl x509
    -noout -subject -nameopt RFC2253."""
    models: tuple[Name, ...] = ALL_MODELS
    """Those of the tenant's models that the holder may use; * is all."""
    service_tier: Tier | None = None
    """The highest tier of the holder's requests, where it is below the tenant's."""
    limits: QuotaLimits = NO_LIMITS
    """Quotas of the holder alone, beside its tenant's."""
    model_limits: PerModel = ()
    """Quotas of the holder alone for single models, beside its tenant's."""

    def __post_init__(self) -> None:
        if sum(name is not None for name in (self.dns, self.uri, self.subject)) != 1:
            raise ConfigError(["needs exactly one of dns, uri and subject"])
        if self.dns is not None and not is_dns_name(self.dns):
            raise ConfigError(
                [f"dns {self.dns!r} is no DNS name, such as billing.example or xn--a-1ga.example"]
            )
        if self.uri is not None and not is_uri(self.uri):
            raise ConfigError([f"uri {self.uri!r} is no URI with a scheme, such as spiffe://prod/billing"])
        if self.subject is not None:
            try:
                subject_of(self.subject)
            except ValueError as error:
                form = "is not written as RFC 4514 says, such as CN=billing,O=Acme"
                raise ConfigError([f"subject {self.subject!r} {form}: {error}"]) from None

    @property
    def name(self) -> CertificateName:
        """The name that certificates are looked up by."""
        if self.dns is not None:
            return "dns", self.dns.lower()
        if self.uri is not None:
            return "uri", self.uri
        assert self.subject is not None
        return "subject", subject_of(self.subject)

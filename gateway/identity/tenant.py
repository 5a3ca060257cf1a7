"""The models and endpoints that a tenant and its keys may use, and the time that they may take.

A model that a caller may not use answers 404 like one that does not exist: which models are served
to others is nobody's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final, get_args

from gateway.config.quotas import NO_LIMITS
from gateway.config.whole import ANY, ModelConfig, TenantConfig, Tier
from gateway.endpoints.routes import SCOPES
from gateway.identity.caller import Principal
from shared.wire.errors import InvalidRequest, ModelNotFound, PermissionDenied
from shared.wire.ids import TenantId

NAME_SHOWN_LEN: Final = 100
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
"""From the lowest to the highest."""


Rights = tuple[tuple[str, ...], tuple[str, ...]]
"""The names of the models that a tenant may use, and of those that one of its callers may."""


class TenantPolicy:
    """Models and tenants at one moment. Immutable: a reload builds another."""

    __slots__ = ("_fallback", "_names", "_tenants", "ids", "models")

    def __init__(self, models: Iterable[ModelConfig], tenants: Iterable[TenantConfig]) -> None:
        self.models: Final = tuple(models)
        self._names: Final = {name: model for model in self.models for name in model.names}
        self._fallback: Final = self._names.pop(ANY, None)
        self._tenants: Final = {TenantId(tenant.id): tenant for tenant in tenants}
        self.ids: Final = self._tenants.keys()
        """The ids of all tenants."""

    def changed(self, put: Iterable[TenantConfig], removed: Iterable[TenantId]) -> TenantPolicy:
        """Another policy, with some tenants added or replaced and some removed."""
        gone = set(removed)
        kept = (tenant for id_, tenant in self._tenants.items() if id_ not in gone)
        return TenantPolicy(self.models, (*kept, *put))

    def tenant(self, principal: Principal) -> TenantConfig:
        """The tenant's settings, with the caller's own tier where that is lower."""
        tenant = self._tenants[principal.tenant]
        own = principal.service_tier
        if own is None or TIERS.index(own) >= TIERS.index(tenant.service_tier):
            return tenant
        return replace(tenant, service_tier=own)

    def all(self) -> Iterable[TenantConfig]:
        """The settings of every tenant."""
        return self._tenants.values()

    def is_some_without_limits(self) -> bool:
        """True if a tenant without limits may use a model that adds none. Each tenant and each model is
        looked at once."""
        free = frozenset(model.name for model in self.models if model.limits == NO_LIMITS)
        return any(tenant.limits == NO_LIMITS and _is_free(tenant, free) for tenant in self._tenants.values())

    def resolve(self, principal: Principal, name: str | None) -> ModelConfig:
        """The model behind a name or alias; without a name, the only one there is.

        Raises:
            ModelNotFound: there is none of that name for this caller.
            InvalidRequest: no name, and several models.
        """
        if name is None:
            if len(self.models) > 1:
                raise InvalidRequest("model is required, because several are served.", param="model")
            name = self.models[0].name
        model = self._names.get(name, self._fallback)
        if model is None or not self._allows(principal, model):
            shown = name[:NAME_SHOWN_LEN]
            raise ModelNotFound(
                f"The model {shown!r} does not exist or you do not have access to it.", param="model"
            )
        return model

    def visible(self, principal: Principal) -> list[tuple[str, ModelConfig]]:
        """Every name that this caller may ask for, aliases too (`*` is no name)."""
        own, callers = map(frozenset, self.rights(principal))  # either may name thousands
        return [
            (name, model)
            for name, model in self._names.items()
            if _allows(own, model) and _allows(callers, model)
        ]

    def rights(self, principal: Principal) -> Rights:
        """The rights that decide which models this caller may use."""
        return self._tenants[principal.tenant].models, principal.models

    def _allows(self, principal: Principal, model: ModelConfig) -> bool:
        return all(_allows(allowed, model) for allowed in self.rights(principal))


def check_endpoint(principal: Principal, path: str) -> None:
    """Check that a caller may use the endpoint at a path. A path of no endpoint is for the router to refuse.
    Raises PermissionDenied."""
    if ANY in principal.endpoints:
        return
    scope = next((scope for scope in SCOPES if path == scope or path.startswith(f"{scope}/")), None)
    if scope is not None and scope not in principal.endpoints:
        raise PermissionDenied(
            f"This API key may not use {scope}. It is restricted to {', '.join(principal.endpoints)}.",
            detail=f"key {principal.key} lacks the endpoint {scope}",
        )


def _is_free(tenant: TenantConfig, free: frozenset[str]) -> bool:
    """True if the tenant may use one of these models, and its own settings limit it in none."""
    own = free if ANY in tenant.models else free.intersection(tenant.models)
    limited = (entry.model for entry in tenant.model_limits if entry.limits != NO_LIMITS)
    return bool(own.difference(limited))


def _allows(allowed: Collection[str], model: ModelConfig) -> bool:
    return ANY in allowed or model.name in allowed

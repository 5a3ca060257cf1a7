"""The settings of quotas: the limits of tenants, keys and models, where usage is counted, and what holds
while it cannot be asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from shared.process.settings import ModelName, Unit

QUOTA_MAX: Final = 10**9
"""The largest limit of a minute, and of concurrent requests."""
BUDGET_MAX: Final = 10**15
"""The largest budget, in tokens."""
MODEL_LIMITS_MAX: Final = 256
Quota = Annotated[int, Meta(ge=0, le=QUOTA_MAX)]
Budget = Annotated[int, Meta(ge=0, le=BUDGET_MAX), Unit("tokens")]

QuotaFail = Literal["closed", "local"]
"""The answer to requests of a tenant with limits while the store cannot be asked: 503, or what this gateway's
part of the limits allows."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The quotas of a tenant, a key or a model. None is no limit; 0 lets nothing through."""

    requests_per_min: Annotated[Quota, Unit("requests")] | None = None
    """Requests in a minute. Unset: no limit. 0 lets nothing through, as in each of these."""
    tokens_per_min: Annotated[Quota, Unit("tokens")] | None = None
    """Tokens of prompts and answers in a minute. Unset: no limit."""
    concurrent: Annotated[Quota, Unit("requests")] | None = None
    """Requests in progress. Unset: no limit."""
    token_budget: Budget | None = None
    """Tokens in total, which time does not refill. Unset: no limit."""
    tokens_per_day: Budget | None = None
    """Tokens on a day of the calendar, in UTC. Unset: no limit."""
    tokens_per_month: Budget | None = None
    """Tokens in a month of the calendar, in UTC. Unset: no limit."""


NO_LIMITS: Final = QuotaLimits()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The quotas of a tenant or a key for one model, beside those for all its models."""

    model: ModelName
    """Name (not an alias) of the model."""
    limits: QuotaLimits
    """Quotas of its requests for this model."""


PerModel = Annotated[tuple[ModelLimits, ...], Meta(max_length=MODEL_LIMITS_MAX)]


def model_limit_problems(entries: PerModel, models: Container[str]) -> Iterator[str]:
    """The models that are named twice, or that there are not."""
    for name, count in Counter(entry.model for entry in entries).items():
        if count > 1:
            yield f"model_limits: {name!r} is given {count} times"
        if name not in models:
            yield f"model_limits: there is no model {name!r}"


@dataclass(frozen=True, slots=True)
class QuotasConfig:
    """Where the usage of quotas is counted."""

    store: Literal["memory", "redis"] = "memory"
    """memory: each gateway process counts for itself, and a restart forgets. redis: all gateways count
    together, on the server of [redis]."""
    one_node: bool = False
    """True if one node of the Cluster counts for all tenants, as limits of a model over all of them need.
    What was counted before it was set, or unset, is not seen afterwards."""
    fail: QuotaFail = "closed"
    """The answer to requests of tenants with limits while the store is down. closed: 503. local: each gateway
    counts for itself, with its part of each limit."""
    gateways: Annotated[int, Meta(ge=1, le=10_000), Unit("processes")] = 1
    """Gateway processes that callers reach: with fail = "local" each allows this part of every limit, and
    several refuse limits that would be counted in memory."""

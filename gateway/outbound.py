"""A request as it goes to a replica: the body's fields, and the headers of the hop.

An engine of ours is told everything: the ids that were counted, the tenant and the class that it may
have at most, how long its callers wait. Any other engine gets OpenAI's own fields alone: there is nobody
there who would hold a caller's `priority` down, and some refuse what they do not know.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Raw

from gateway.admission.tokens import Count
from gateway.config import Tier
from gateway.directory import Terms
from gateway.exchange import Exchange
from gateway.relay.upstream import Outbound
from shared.ids import (
    QUEUE_TIMEOUT_HEADER,
    REQUEST_ID_HEADER,
    REQUEST_TIMEOUT_HEADER,
    SERVICE_TIER_HEADER,
    TENANT_HEADER,
    TRACEPARENT_HEADER,
)
from shared.openai import BODY_LEN_MAX
from shared.validation import Parsed, with_fields

OURS_ALONE: Final = frozenset({"penstock", "priority"})
"""Fields that no other engine is sent."""
_RANKS: Final[dict[object, int]] = {"flex": 0, "default": 1, "auto": 1, "scale": 1, "priority": 2}

Headers = tuple[tuple[bytes, bytes], ...]

_JSON: Final = (b"content-type", b"application/json")
_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_TRACEPARENT: Final = TRACEPARENT_HEADER.encode()
_TENANT: Final = TENANT_HEADER.encode()
_SERVICE_TIER: Final = SERVICE_TIER_HEADER.encode()
_QUEUE_TIMEOUT: Final = QUEUE_TIMEOUT_HEADER.encode()
_REQUEST_TIMEOUT: Final = REQUEST_TIMEOUT_HEADER.encode()


def outbound(
    exchange: Exchange,
    terms: Terms,
    parsed: Parsed[Any],
    count: Count,
    *,
    ours: bool,
    credentials: Headers,
) -> Outbound:
    """`credentials`: the gateway's own towards this model's replicas; the caller's key goes nowhere."""
    headers = (
        _JSON,
        (_REQUEST_ID, exchange.record.request_id.encode()),
        (_TRACEPARENT, exchange.stages.trace.traceparent.encode()),
        *credentials,
    )
    overrides: dict[str, object] = {"model": terms.model.upstream_model or terms.model.name}
    if ours:
        headers += _for_ours(exchange, terms)
        fields = parsed.fields
    else:
        fields, held_down = _for_others(parsed, terms.tenant.service_tier)
        overrides |= held_down
    ids = {} if count.extension is None else {"penstock": count.extension}
    body = with_fields(fields, **overrides, **ids)
    if len(body) > BODY_LEN_MAX:  # with the ids of a huge prompt: the engine counts it again
        body = with_fields(fields, **overrides)
    return Outbound("POST", exchange.request.path, headers, body)


def _for_ours(exchange: Exchange, terms: Terms) -> Headers:
    callers, tenant, model = exchange.request.headers, terms.tenant, terms.model
    headers: Headers = ((_TENANT, tenant.id.encode()), (_SERVICE_TIER, tenant.service_tier.encode()))
    queued = bound(callers.get(QUEUE_TIMEOUT_HEADER), tenant.queue_timeout_s or model.queue_timeout_s)
    if queued is not None:
        headers += ((_QUEUE_TIMEOUT, queued.encode()),)
    in_all = bound(callers.get(REQUEST_TIMEOUT_HEADER), tenant.request_timeout_s or model.request_timeout_s)
    if in_all is not None:
        headers += ((_REQUEST_TIMEOUT, in_all.encode()),)
    return headers


def bound(asked: str | None, most_s: float | None) -> str | None:
    """A deadline for the engine, in seconds: the caller's own, or the configured one where the caller names
    none or a longer one. What is no number is passed on: the engine refuses it, by name."""
    if asked is None or most_s is None:
        return asked if most_s is None else str(most_s)
    try:
        return str(most_s) if float(asked) > most_s else asked
    except ValueError:
        return asked


def _for_others(parsed: Parsed[Any], tier_max: Tier) -> tuple[dict[str, Raw], dict[str, str]]:
    """The fields that another engine is sent, and a `service_tier` instead of one above the tenant's."""
    fields = {name: value for name, value in parsed.fields.items() if name not in OURS_ALONE}
    tier = getattr(parsed.request, "service_tier", None)
    is_above = tier is not None and _RANKS[tier] > _RANKS[tier_max]
    return fields, {"service_tier": tier_max} if is_above else {}

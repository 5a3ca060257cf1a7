"""A request as it goes to a replica: the body's fields, and the headers of the hop.

An engine of ours is sent everything: the token ids that were counted, the tenant and the highest class that
it may have, the session, the deadlines. Ids count as values of the body there, so they are left out where
there are too many. An engine of another make is sent the fields on a list alone, at every depth that it
reads: it would not hold down a caller's `priority`, and may know fields by which more is generated than was
reserved. It is told one maximum, which is the reserved one, and its streams are asked for their usage, by
which the request is charged. One that takes a salt for its cached prefixes is sent the tenant's (`salts`),
never the caller's own.

What goes out is chosen before it is counted (`chosen_fields`), and is what is counted.

Rules for the fields that an engine of another make is sent:

1. What may be generated is what was reserved, and a request goes where operators send it. Engines have fields
   of their own by which a caller could undo both: llama.cpp's `n_predict` wins over `max_tokens`, `best_of`
   and `use_beam_search` compute more sequences than are answered, `kv_transfer_params` names another host.
   Nobody can list all of them, so the list is of what is harmless, or is counted. Operators may add to it
   (`pass_fields`).
2. Messages, tools and predictions are sent in OpenAI's shapes for them, and nothing beside: vLLM takes a part
   of type `text` with an `image_url` for an image. A tool that the engine would call itself is refused.
3. Engines fetch what a URL names from where they stand. An image is sent with the request (`data:`), or
   comes from a host that operators allow (`image_hosts`).
4. A field that is left out is named to its caller. Names are compared as they are, since some engines read
   `Max_Tokens` as `max_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.admission.tokens import TokenCount
from gateway.config.whole import ANY, ModelConfig, Tier
from gateway.directory.accounts import Terms
from gateway.endpoints.endpoint import Asked, Endpoint
from gateway.relay.engines import Known
from gateway.relay.upstream import HeaderPairs, Outbound
from gateway.request.exchange import Exchange
from shared.apis.chat_messages import ImagePart
from shared.apis.generation import GenerationRequest
from shared.apis.holding import SURE_LEN, most_of
from shared.apis.prompt import ChatPrompt, PromptForm
from shared.apis.validation import FIELDS_MAX, Parsed, named, with_fields
from shared.wire.errors import InvalidRequest
from shared.wire.ids import (
    FIRST_TOKEN_TIMEOUT_HEADER,
    QUEUE_TIMEOUT_HEADER,
    REQUEST_ID_HEADER,
    REQUEST_TIMEOUT_HEADER,
    SERVICE_TIER_HEADER,
    SESSION_HEADER,
    TENANT_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
)
from shared.wire.shapes import BODY_LEN_MAX
from shared.wire.timeouts import TIMEOUT_S_MAX, stated_timeout_s

_DATA_URL: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,")
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_HTTP_URL: Final = re.compile(r"https?://([a-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?][!-\[\]-~]{0,8192})?")
"""What all readers of URLs take for the same host: no user, no escapes, and none of the characters that some
of them repair."""

_SALT: Final = "cache_salt"
"""The field that is sent with another value than the caller's, or not at all."""


# -- images ---------------------------------------------------------------------------------------


def check_images(prompt: PromptForm | None, hosts: Sequence[str]) -> None:
    """Raises InvalidRequest for an image in a chat that is neither in the request nor on one of these
    hosts."""
    if not isinstance(prompt, ChatPrompt):
        return
    for index, message in enumerate(prompt.messages):
        for at, part in enumerate(message.parts):
            if isinstance(part, ImagePart) and (problem := _problem(part.image_url.url, hosts)):
                where = f"{prompt.place(index)}.content[{at}].image_url.url"
                raise InvalidRequest(f"{where} {problem}.", param=where)


def _problem(url: str, hosts: Sequence[str]) -> str | None:
    """The reason why an image cannot be taken from this URL. None where it can."""
    if (data := _DATA_URL.match(url)) is not None:
        rest = url[data.end() :]
        if not rest or not rest.isascii() or rest.encode().translate(None, _BASE64):
            return "must hold an image in base64"
        return None
    if not url.startswith(("http://", "https://")):
        return "must be a data URL of a PNG, JPEG, GIF or WebP image in base64"
    found = _HTTP_URL.fullmatch(url)
    if found is None or not (ANY in hosts or found[1] in hosts):
        return "names a host that this model's images may not come from; send the image as a data URL"
    return None


# -- its fields ------------------------------------------------------------------------------------


class Passed(Struct, frozen=True):
    """The fields of one request that an engine of another make is sent."""

    fields: dict[str, Raw]
    """The fields as they came, without those of the endpoint's `maxima`."""
    left_out: tuple[str, ...]
    """The names of the fields that it is not sent, those within others too."""


def shaped(parsed: Parsed[Any]) -> dict[str, Raw]:
    """The fields of a request, its messages without what their shapes do not have."""
    if not parsed.shapeless:
        return parsed.fields
    return {**parsed.fields, "messages": Raw(msgspec.json.encode(parsed.request.messages))}


def passed_on(asked: Asked, model: ModelConfig) -> Passed:
    """Choose the fields of a request that an engine of another make is sent. Raises InvalidRequest for what
    it may not be sent at all."""
    endpoint, parsed, request = asked.endpoint, asked.parsed, asked.parsed.request
    passes, set_here = endpoint.passes, {*endpoint.maxima, _SALT}
    if model.pass_fields:
        passes = passes.union(model.pass_fields)
    if (surplus := request.surplus) is not None:
        passes -= {surplus}  # so many sequences are computed, and `n` of them were reserved
    fields = {n: value for n, value in shaped(parsed).items() if n in passes and n not in set_here}
    left_out = [name for name in parsed.fields if name not in passes and name not in set_here]
    left_out += parsed.shapeless
    if asked.generation is not None:
        sent = asked.generation.max_tokens_param
        left_out += [n for n in endpoint.maxima if n != sent and getattr(request, n, None) is not None]
    check_images(request.prompt_form, model.image_hosts)
    for name, clean in endpoint.nested:
        if name in fields:
            fields[name] = clean(fields[name], left_out)
    return Passed(fields, tuple(left_out))


# -- the whole request ----------------------------------------------------------------------------


TENANTS_KEPT_MAX: Final = 1024
"""The number of tenants, and times for a first token, whose headers are cached."""
_RANKS: Final[dict[object, int]] = {"flex": 0, "default": 1, "auto": 1, "scale": 2, "priority": 2}
"""OpenAI's `scale` costs more than its `default`."""


_JSON: Final = (b"content-type", b"application/json")
_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_TRACEPARENT: Final = TRACEPARENT_HEADER.encode()
_TRACESTATE: Final = TRACESTATE_HEADER.encode()
_TENANT: Final = TENANT_HEADER.encode()
_SERVICE_TIER: Final = SERVICE_TIER_HEADER.encode()
_SESSION: Final = SESSION_HEADER.encode()
_FIRST_TOKEN_TIMEOUT: Final = FIRST_TOKEN_TIMEOUT_HEADER.encode()


class OutboundFields(Struct, frozen=True):
    """The fields of a request that go out."""

    ours: bool
    """True if the engine is told what one of ours is told."""
    fields: dict[str, Raw]
    left_out: tuple[str, ...] = ()
    """The names of those that an engine of another make is not sent."""


def chosen_fields(asked: Asked, model: ModelConfig, engine: Known) -> OutboundFields:
    """Choose what goes out. Raises InvalidRequest for what another make may not be sent."""
    is_ours = engine.is_ours
    if not (is_ours or engine.counts_as_ours):
        passed = passed_on(asked, model)
        return OutboundFields(False, passed.fields, passed.left_out)
    if not is_ours:
        check_images(asked.parsed.request.prompt_form, model.image_hosts)
    return OutboundFields(True, shaped(asked.parsed))


def outbound(
    exchange: Exchange,
    terms: Terms,
    asked: Asked,
    chosen: OutboundFields,
    count: TokenCount,
    *,
    maximum: int | None,
    salt: str | None,
    credentials: HeaderPairs,
) -> Outbound:
    """The request as it is sent to a replica.

    `maximum` is the most tokens that each choice may have, where the request states none, or more than there
    is room for, which an engine of ours cuts by itself and tells; None leaves that open. Where the engine is
    none of ours, the exchange is told which fields were left out. `salt` is for its cached prefixes, in place
    of the caller's; None where none is sent, or the caller's as it is. `credentials` are the gateway's own
    towards this model's replicas; the caller's key goes nowhere. Raises InvalidRequest.
    """
    headers = (
        _JSON,
        (_REQUEST_ID, exchange.request_id.encode()),
        (_TRACEPARENT, exchange.stages.trace.traceparent.encode()),
        *credentials,
    )
    if exchange.stages.state:
        headers += ((_TRACESTATE, exchange.stages.state.encode()),)
    overrides: dict[str, object] = {"model": terms.model.upstream_model or terms.model.name}
    fields, ours, generation = chosen.fields, chosen.ours, asked.generation
    if salt is not None:
        overrides["cache_salt"] = salt
    if ours:
        headers += _for_ours(exchange, terms)
        if maximum is not None and generation is not None and generation.output_tokens_max is None:
            overrides[generation.max_tokens_param] = maximum
    else:
        is_unsalted = salt is None and "cache_salt" in asked.parsed.fields
        exchange.ignored_fields = named((*chosen.left_out, "cache_salt") if is_unsalted else chosen.left_out)
        if generation is not None:
            overrides |= _instead(asked.endpoint, generation, fields, terms, maximum)
    ids = _ids(asked.parsed, count) if ours else {}
    body = with_fields(fields, **overrides, **ids)
    if ids and len(body) > SURE_LEN and not _is_taken(body):
        body = with_fields(fields, **overrides)  # the engine tokenizes the prompt again
    asks_for_usage = "stream_options" in overrides
    is_salted = salt is not None and not ours
    return Outbound("POST", exchange.path, headers, body, asks_for_usage, ours, is_salted)


def _ids(parsed: Parsed[Any], count: TokenCount) -> dict[str, object]:
    """The field with the prompts' ids, unless they were not counted, or there is no room for a field."""
    if count.extension is None or len(parsed.fields) >= FIELDS_MAX:
        return {}
    return {"penstock": count.extension}


def _is_taken(body: bytes) -> bool:
    """True if an engine takes a body with the ids in it: they count as values of the caller's there."""
    return len(body) <= BODY_LEN_MAX and most_of(body).excess is None


def _for_ours(exchange: Exchange, terms: Terms) -> HeaderPairs:
    tenant, model = terms.tenant, terms.model
    headers = _same_for_all(tenant.id, tenant.service_tier, _first_token_s(exchange))
    if exchange.session is not None:
        headers += ((_SESSION, exchange.session.encode()),)
    deadlines = (
        (QUEUE_TIMEOUT_HEADER, tenant.queue_timeout_s or model.queue_timeout_s),
        (REQUEST_TIMEOUT_HEADER, tenant.request_timeout_s or model.request_timeout_s),
    )
    for name, most_s in deadlines:
        asked = exchange.headers.get(name)
        if asked is None and most_s is None:  # as nearly always
            continue
        if (seconds := bound_s(name, asked, most_s)) is not None:
            headers += ((name.encode(), repr(seconds).removesuffix(".0").encode()),)
    return headers


@lru_cache(maxsize=TENANTS_KEPT_MAX)
def _same_for_all(tenant: str, tier: Tier, first_token_s: float) -> HeaderPairs:
    """The headers that are the same for all requests of a tenant with the same time for a first token."""
    return (
        (_TENANT, tenant.encode()),
        (_SERVICE_TIER, tier.encode()),
        (_FIRST_TOKEN_TIMEOUT, b"%d" % max(1, round(1e3 * first_token_s))),
    )


def _first_token_s(exchange: Exchange) -> float:
    """The time for which a first token is of use: a stream is given up without one, and another answer when
    it is not complete."""
    timeouts = exchange.timeouts
    if exchange.streams:
        return min(timeouts.first_token_s, timeouts.total_s, TIMEOUT_S_MAX)
    return min(timeouts.total_s, TIMEOUT_S_MAX)


def bound_s(header: str, asked: str | None, most_s: float | None) -> float | None:
    """A deadline for the engine, in seconds: the caller's own, or the configured one where the caller names
    none or a longer one. Raises InvalidRequest for a value that is none."""
    asked_s = stated_timeout_s(header, asked)
    if asked_s is None or most_s is None:
        return most_s if asked_s is None else asked_s
    return min(asked_s, most_s)


def _instead(
    endpoint: Endpoint,
    request: GenerationRequest,
    fields: Mapping[str, Raw],
    terms: Terms,
    maximum: int | None,
) -> dict[str, object]:
    """The fields whose values are replaced for an engine of another make: those of its endpoint, a
    `service_tier` above the tenant's, the maximum, and what asks for a stream's usage. `fields` are those
    that it is sent."""
    instead: dict[str, object] = {**endpoint.sent}
    tier, tier_max = request.service_tier, terms.tenant.service_tier
    if "service_tier" in fields and tier is not None and _RANKS[tier] > _RANKS[tier_max]:
        instead["service_tier"] = tier_max
    most = request.output_tokens_max if maximum is None else maximum
    if most is not None and endpoint.maxima:  # also what a completion has by default
        instead[endpoint.maximum_param(request, terms.model.maximum_field)] = most
    return instead | endpoint.usage_asked(request, fields)

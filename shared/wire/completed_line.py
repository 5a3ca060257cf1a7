"""The completed line: what each service logs about a request when it has ended, whatever its end.

These types are the schema. A field that both services write is in `CompletedLine`, with one name, one type
and one unit; what only one of them knows is in `GatewayLine` or `EngineLine`.

Rules:

1. A service writes one line per request that reached it. Their `request_id` and `trace_id` are equal. The
   engine's `parent_span_id` is the gateway's `span_id`, which is unique: it joins the two exactly, also where
   callers use an id more than once.
2. A field without a value is left out of the line and is None here. A line has no null.
3. Times are in milliseconds. `<stage>_ms` is all that the request spent in one stage, however often it was
   there; a stage that it never came to has no field.
4. Counts of tokens are the engine's own, and equal in both lines, once the engine has told what it computed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from shared.wire.causes import CAUSES_MAX, Cause
from shared.wire.end_reason import EndReason

EVENT: Final = "request.completed"
UNPARSED: Final = "unparsed"
"""The `endpoint` of what is not well-formed HTTP."""

FAILURES_SHOWN_MAX: Final = 8
"""Failed attempts that a line tells."""
DETAIL_LEN_MAX: Final = 120
"""Characters that it tells of each one's error."""

BLOCKED_SHOWN_MAX: Final = 8
"""Times in which the client was behind that a line tells. What follows counts to the last of them."""

WholeNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e12)]

Keeping = Literal["kept", "too_long", "no_room", "unavailable", "unreadable"]
"""The fate of a response that was to be kept: that it is, or why it is not. `too_long` and `no_room` are by
the bounds of `[responses]`, `unavailable` by the store, `unreadable` by an engine of another make."""


class CompletedLine(Struct, omit_defaults=True):
    """The fields that both services' lines have. It is made of what every line has, and then filled in."""

    ts: Annotated[datetime, Meta(tz=True)]
    """When the line was written: the end of the request, on this service's clock."""
    level: str
    """`info`; `debug` for probes and scrapes."""
    event: Literal["request.completed"]
    logger: str
    """The module that wrote the line."""
    request_id: str
    """The caller's own `x-request-id` where it is well formed, else one that the gateway made."""
    trace_id: str
    """The W3C trace: the caller's, where it sent a `traceparent`."""
    span_id: str
    """This request in this service."""
    method: str
    """At most 16 characters; empty where the request could not be parsed."""
    endpoint: str
    """The route, not the path as it was sent: `/v1/models/{id}`, `unknown`, `unparsed`."""
    status: WholeNumber
    """The HTTP status that the client was sent; 499 where it left first."""
    end_reason: EndReason
    stage: str
    """The stage in which the request ended, before anything that is done afterwards."""
    stream: bool
    """True if a stream was asked for. False as long as the body was not read."""
    total_ms: Milliseconds
    """From the request's headers to its end."""
    parent_span_id: str | None = None
    """The span that `traceparent` named. None without that header."""
    tenant: str | None = None
    """None for a caller without a valid key, and for one that asks the engine itself."""
    model: str | None = None
    """The model's configured name, not the alias that was asked for. None until it is known."""
    error_code: str | None = None
    """The `code` of the error that ended the request. This and the next two are None where none did."""
    error_param: str | None = None
    """The parameter to change, where the error names one."""
    error_detail: str | None = None
    """The error's text for the operator, where it says more than its code; the client is never sent it."""
    prompt_tokens: WholeNumber | None = None
    """Tokens of all prompts. In the engine's line only those of prompts that it began to compute, and None
    for a request that ended before it was submitted to the core."""
    completion_tokens: WholeNumber | None = None
    """Tokens of all answers. None where the engine told nothing, or the request was not submitted to its
    core."""
    cached_tokens: WholeNumber | None = None
    """Prompt tokens that were found in the prefix cache. None as `completion_tokens`."""
    host_tokens: WholeNumber | None = None
    """The part of `cached_tokens` that came back from host memory. None as `completion_tokens`."""
    disk_tokens: WholeNumber | None = None
    """The part that came from disk. None as `completion_tokens`."""
    reasoning_tokens: WholeNumber | None = None
    """The part of `completion_tokens` that is reasoning. None as `completion_tokens`."""
    calls: WholeNumber | None = None
    """Calls of functions in all answers. None as `completion_tokens`."""
    drafted_tokens: WholeNumber | None = None
    """Tokens that were guessed and verified beside others. None where none was."""
    accepted_tokens: WholeNumber | None = None
    """The part of `drafted_tokens` that was right: so many steps of its sequences were saved."""
    accepted_prediction_tokens: WholeNumber | None = None
    """Tokens of the answers that were taken from what the caller predicted. This and the next are None where
    it predicted nothing, or nothing was tried of it."""
    rejected_prediction_tokens: WholeNumber | None = None
    """The part of `completion_tokens` that was tried from there, and is in no answer."""
    causes: Annotated[tuple[Cause, ...], Meta(max_length=CAUSES_MAX)] | None = None
    """The causes of the request's waits, as the engine found them. None where there is nothing to tell."""
    body_ms: Milliseconds | None = None
    """Stage: reading the request's body."""
    validate_ms: Milliseconds | None = None
    """Stage: checking the body."""
    tokenize_ms: Milliseconds | None = None
    """Stage: the gateway counts the tokens; the engine makes sequences, and trusts the gateway's tokens."""


class FailedAttempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that was asked, and failed: which, how, and when on the request's own axis."""

    replica: str
    code: str
    """The `code` of the error."""
    detail: Annotated[str, Meta(max_length=DETAIL_LEN_MAX)] | None = None
    """The beginning of the error's text for the operator. None where it says no more than its code."""
    from_ms: Milliseconds
    """From the request's headers to the attempt's beginning."""
    takes_ms: Milliseconds
    connect_ms: Milliseconds | None = None
    """The part of it until the connection was there. None where none was made."""


class BlockedTime(Struct, frozen=True, array_like=True):
    """A time in which the client was behind in reading, in milliseconds on the request's own axis."""

    from_ms: Milliseconds
    takes_ms: Milliseconds
    """All that was waited in it for room, without the moments in which there was some."""


class GatewayLine(CompletedLine, kw_only=True):
    """The completed line of the gateway."""

    service: Literal["gateway"]
    key_id: str | None = None
    """The public part of the caller's key. None without a valid one."""
    session: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None
    """A hash of the session that the caller names; the name itself is the caller's own text. None where it
    names none, and as long as the body was not read."""
    service_tier: Literal["flex", "priority"] | None = None
    """The class in which engines of ours take it. None for the default, and as long as it is not known."""
    replica: str | None = None
    """The engine that was asked last. None where none was."""
    attempts: WholeNumber
    """Engines that were asked, one after the other."""
    failed_attempts: Annotated[tuple[FailedAttempt, ...], Meta(max_length=FAILURES_SHOWN_MAX)] | None = None
    """The attempts that failed, as far as they are the first eight. None where none did."""
    retry: WholeNumber | None = None
    """The number of tries that the caller's SDK counts before this one. None for the first, and where it
    tells nothing."""
    idempotency: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None
    """A hash of the caller's `idempotency-key`, of a request that failed or is a retry, by which the tries of
    one request are found. None without that header, and for any other request."""
    route: Literal["affinity", "load", "retry", "panic", "fallback"] | None = None
    """Why the one that answered, or the last, was chosen: the conversation's home, the lower load, because
    another had failed, from a pool whose engines all failed lately, or from another pool."""
    lost_home: str | None = None
    """The engine that had the history of the conversation, of which the one that answered had less than half.
    This and the next two are None where none was lost."""
    lost_reason: Literal["drains", "restarted", "failed", "busy", "moved"] | None = None
    """Why it was not computed there: that engine drains or is gone, is another process now, had failed
    lately, had too much to do, or is its home no more since others came."""
    lost_tokens: WholeNumber | None = None
    """The prompt tokens that were computed again for it, about."""
    prompt_exact: bool
    """True if `prompt_tokens` was counted, by the engine or with the model's tokenizer; False for an
    estimate."""
    reserved_tokens: WholeNumber
    """Tokens that the quotas granted before dispatch."""
    settled_tokens: WholeNumber
    """Tokens that the tenant was charged in the end."""
    events: WholeNumber
    """Events that were passed on to the client: about the tokens that it was sent."""
    body_len: WholeNumber
    """Bytes of the answer's body that were passed on."""
    first_byte_ms: Milliseconds | None = None
    """From the request's headers to the first byte of its answer's body. None where there was none."""
    blocked_ms: Milliseconds | None = None
    """The part of `relay_ms` in which nothing could be written, since the client did not read. No stage. None
    where all could be written at once."""
    blocked: Annotated[tuple[BlockedTime, ...], Meta(max_length=BLOCKED_SHOWN_MAX)] | None = None
    """When that was. None as `blocked_ms`."""
    stored: Keeping | None = None
    """The fate of the response that was to be kept. None where none was, and for an answer that has not
    come to its end."""
    store_ms: Milliseconds | None = None
    """Time that the store of responses took: of `validate_ms` to read the conversation that the request goes
    on with, and of `relay_ms` to keep the answer. No stage. None where it was not asked."""
    quota_meter: str | None = None
    """The quota that refused the request: `requests`, `tokens`, `concurrency`, `budget`, `day_budget`,
    `month_budget`. None where none did."""
    quota_scope: str | None = None
    """Whose quota it was: `key`, `tenant`, `key_model`, `tenant_model` or `model`. None as `quota_meter`."""
    engine_end_reason: str | None = None
    """The engine's own `end_reason`; empty from an engine of another make. This and the following are copies
    of the engine's line, and None where the engine told nothing."""
    engine_edge_ms: Milliseconds | None = None
    engine_body_ms: Milliseconds | None = None
    engine_validate_ms: Milliseconds | None = None
    engine_tokenize_ms: Milliseconds | None = None
    engine_grammar_ms: Milliseconds | None = None
    engine_masks_ms: Milliseconds | None = None
    engine_handover_ms: Milliseconds | None = None
    engine_first_byte_ms: Milliseconds | None = None
    """From the request's headers to the answer's first byte, at the engine."""
    engine_queue_ms: Milliseconds | None = None
    engine_prefill_ms: Milliseconds | None = None
    engine_decode_ms: Milliseconds | None = None
    engine_preempted_ms: Milliseconds | None = None
    engine_preemptions: WholeNumber | None = None
    engine_swaps: WholeNumber | None = None
    engine_stalled_ms: Milliseconds | None = None
    edge_ms: Milliseconds | None = None
    """Stage: from the headers to authentication."""
    auth_ms: Milliseconds | None = None
    """Stage: looking up the key."""
    answer_ms: Milliseconds | None = None
    """Stage: answering what needs no engine, such as the list of models."""
    seat_ms: Milliseconds | None = None
    """Stage: taking one of the concurrent requests of key and tenant."""
    tenant_ms: Milliseconds | None = None
    """Stage: which model and which limits the key may use."""
    quota_ms: Milliseconds | None = None
    """Stage: reserving tokens."""
    route_ms: Milliseconds | None = None
    """Stage: choosing an engine."""
    connect_ms: Milliseconds | None = None
    """Stage: getting a connection to the engine."""
    wait_ms: Milliseconds | None = None
    """Stage: from dispatch to the answer's first byte."""
    relay_ms: Milliseconds | None = None
    """Stage: passing the answer on."""
    settle_ms: Milliseconds | None = None
    """Stage: charging what was computed."""


class EngineLine(CompletedLine, kw_only=True):
    """The completed line of the engine. Where the request has several sequences, the times from `queue_ms` to
    `stalled_ms` are those of the one that ended last."""

    service: Literal["engine"]
    sequences: WholeNumber | None = None
    """Choices of all prompts. This, `preemptions` and `swaps` are None for a request that was not submitted
    to the core."""
    preemptions: WholeNumber | None = None
    """How often a sequence gave its pages back."""
    swaps: WholeNumber | None = None
    """How often its pages were kept in host memory then. None as `preemptions`."""
    queue_ms: Milliseconds | None = None
    """Stage: waiting for the first admission."""
    prefill_ms: Milliseconds | None = None
    """Stage: computing the prompt."""
    decode_ms: Milliseconds | None = None
    """Stage: computing the answer."""
    preempted_ms: Milliseconds | None = None
    """Stage: waiting without pages on the device for others that go first."""
    stalled_ms: Milliseconds | None = None
    """Stage: paused, because the client was behind in reading."""
    grammar_ms: Milliseconds | None = None
    """Stage: making the grammar that the answer follows, and trying to compile it."""
    masks_ms: Milliseconds | None = None
    """Time that the core took for the grammars of all sequences, beside the steps: to compile them, and for
    the masks by which they follow them. No stage. None for a request without a grammar."""
    detokenize_ms: Milliseconds | None = None
    """Stage: making text from the tokens of a `/detokenize` request."""
    edge_ms: Milliseconds | None = None
    """Stage: what lies between the others: from the headers to the body, and answers without a model."""
    handover_ms: Milliseconds | None = None
    """Stage: the ways from the API process to the core and back, and making text of tokens."""
    flush_ms: Milliseconds | None = None
    """Stage: sending what is left of the answer, once its last token was there."""


GATEWAY_STAGES: Final = (
    *("edge", "auth", "answer", "seat", "body", "validate", "tenant", "tokenize"),
    *("quota", "route", "connect", "wait", "relay", "settle"),
)
"""In the order of a request's way. A gateway's request is in one of them at every moment: they add up to
`total_ms`."""
ENGINE_STAGES: Final = (
    *("edge", "body", "validate", "tokenize", "grammar", "detokenize", "queue", "prefill", "decode"),
    *("preempted", "stalled", "handover", "flush"),
)
"""In the order of a request's way, but for `preempted`, `stalled` and `handover`, which come in between. They
add up to `total_ms`."""

Line = GatewayLine | EngineLine

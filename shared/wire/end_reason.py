"""The end of a request: one word for both services' completed lines, metrics and closing comments.

The word says what ended the request, and the status says what its client was told; the two differ where an
answer had begun before the request failed. A request that is refused, and one whose client leaves, has the
same word in both services. What only one of them can know (a timeout of the gateway's, a failure of the
engine's core) is a word that only its line has; the other's line then says how it looked from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from shared.wire import errors
from shared.wire.errors import ApiError


class EndReason(StrEnum):
    """The values of `end_reason`. `MEANINGS` has a sentence for each."""

    __hash__ = str.__hash__  # requests are counted by it, and Enum's own hash is slow

    OK = "ok"
    REFUSED = "refused"
    CLIENT_CANCEL = "client_cancel"
    ABORTED = "aborted"
    KEY_REVOKED = "key_revoked"
    SLOW_CLIENT = "slow_client"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    DRAIN = "drain"
    INTERNAL_ERROR = "internal_error"
    ENGINE_FAILED = "engine_failed"
    GRAMMAR_FAILED = "grammar_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 -- a reason, not a secret
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105
    TOTAL_TIMEOUT = "total_timeout"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_FAILED = "upstream_failed"


MEANINGS: Final[Mapping[EndReason, str]] = {
    EndReason.OK: "the client has its whole answer",
    EndReason.REFUSED: "a mistake of the caller's, a quota, or no room for it",
    EndReason.CLIENT_CANCEL: "the client left before its answer was complete",
    EndReason.ABORTED: "the caller ended it with DELETE /v1/requests/{id}",
    EndReason.KEY_REVOKED: "its key was revoked, and the tenant's on_revoke is end",
    EndReason.SLOW_CLIENT: "the client did not read its answer for too long",
    EndReason.QUEUE_TIMEOUT: "the engine did not begin within the caller's x-queue-timeout",
    EndReason.REQUEST_TIMEOUT: "the answer was not complete within the caller's x-request-timeout",
    EndReason.DRAIN: "still running when the service's time to drain was over",
    EndReason.INTERNAL_ERROR: "the service has a bug; its log has the traceback",
    EndReason.ENGINE_FAILED: "the engine's core failed, died or hung",
    EndReason.GRAMMAR_FAILED: "the answer could not follow the request's schema, grammar or tools",
    EndReason.CONNECT_TIMEOUT: "no engine accepted a connection in time",
    EndReason.FIRST_TOKEN_TIMEOUT: "the engine produced no first token in time",
    EndReason.INTER_TOKEN_TIMEOUT: "the engine produced no further token in time",
    EndReason.TOTAL_TIMEOUT: "the answer was not complete within the gateway's total_s",
    EndReason.UPSTREAM_UNREACHABLE: "no engine could be connected to",
    EndReason.UPSTREAM_FAILED: "the engine broke off, or answered what is not an answer",
}
"""The meaning of each reason, in a phrase."""

_OF_ERROR: Final[Mapping[type[ApiError], EndReason]] = {
    errors.ApiError: EndReason.REFUSED,
    errors.RequestAborted: EndReason.ABORTED,
    errors.KeyRevoked: EndReason.KEY_REVOKED,
    errors.SlowClient: EndReason.SLOW_CLIENT,
    errors.QueueTimeout: EndReason.QUEUE_TIMEOUT,
    errors.RequestTimeout: EndReason.REQUEST_TIMEOUT,
    errors.CoreHangs: EndReason.ENGINE_FAILED,
    errors.GatewayStopped: EndReason.DRAIN,
    errors.InternalError: EndReason.INTERNAL_ERROR,
    errors.EngineFailed: EndReason.ENGINE_FAILED,
    errors.GrammarFailed: EndReason.GRAMMAR_FAILED,
    errors.ConnectTimeout: EndReason.CONNECT_TIMEOUT,
    errors.FirstTokenTimeout: EndReason.FIRST_TOKEN_TIMEOUT,
    errors.InterTokenTimeout: EndReason.INTER_TOKEN_TIMEOUT,
    errors.TotalTimeout: EndReason.TOTAL_TIMEOUT,
    errors.UpstreamUnreachable: EndReason.UPSTREAM_UNREACHABLE,
    errors.UpstreamFailed: EndReason.UPSTREAM_FAILED,
}


def end_reason_of(error: ApiError) -> EndReason:
    """The reason that an error stands for: that of its own class, or of the nearest one that it derives
    from."""
    return next(_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _OF_ERROR)

"""The error tree.

Every operating error that a client can see is an `ApiError`. It carries two messages: `message` tells the
client what to change, and `detail` tells the operator what happened; `detail` goes to the log and never over
the wire. Neither ever holds prompt text.

The body is OpenAI's envelope `{"error": {message, type, param, code}}`, so that the SDKs raise the
exception class that belongs to the status. `retryable` becomes `x-should-retry`, which the SDKs
obey before they look at the status.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import ClassVar, Final

STATUS_CLIENT_GONE: Final = 499
"""The status of a request whose client left, as nginx numbers it. It is logged and never sent."""


class ApiError(Exception):
    """The base of all errors that a client can see, with one class per status and code. Subclasses only set
    the class variables."""

    status: ClassVar[int] = HTTPStatus.INTERNAL_SERVER_ERROR
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    """The class's, except where an engine of another make has called a mistake of its caller's by a code of
    its own."""
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        detail: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.detail = detail
        self.retry_after_s = retry_after_s


def status_of(kind: type[ApiError]) -> int:
    """The status of errors of a class, where an API has none of its own for it."""
    return int(kind.status)


def error_headers(error: ApiError) -> dict[str, str]:
    """The headers that an error's answer has beside its body.

    `retry-after` is in whole seconds, rounded up: a client that waits as long as it says never comes too
    early. `retry-after-ms`, which the SDKs prefer, is exact. Neither is ever 0, after which a client would
    not wait at all.
    """
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1e3)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers["allow"] = error.allow
    return headers


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of `error` and of the errors that led to it.

    A traceback holds every frame that the error went through, and a frame its variables, the request's body
    among them. Where one of these variables leads back to the error, all of it stays until the next full
    garbage collection. An error that was answered and logged has no use for its traceback.
    """
    if error is None:
        return
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += (found.__cause__, found.__context__)


class InternalError(ApiError):
    """A bug of ours. The message says nothing about it; the detail and the log do."""


class TokenizerFailed(InternalError):
    """The tokenizers library panicked. Its message may hold the text, and is not passed on."""


# -- the caller's mistakes ------------------------------------------------------------------------


class InvalidRequest(ApiError):
    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    code = "invalid_value"


class NotInPlace(InvalidRequest):
    """A short prompt is not to be rendered or encoded where it was tried, but elsewhere."""


class TooMuch(InvalidRequest):
    """A chat needs more time or memory than the process has that renders it."""


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """A known field asks for something that this server cannot do. It is never silently ignored."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class NeverFits(InvalidRequest):
    """The request is larger than the whole KV pool, and within the context length as far as it is known."""

    code = "kv_capacity_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request goes on with, or one before it, is not kept, or not any more."""

    code = "previous_response_not_found"


class Unauthenticated(ApiError):
    status = HTTPStatus.UNAUTHORIZED
    type = "invalid_request_error"
    code = "invalid_api_key"


class KeyRevoked(Unauthenticated):
    """The caller's key was revoked while its request was in progress."""

    code = "key_revoked"


class PermissionDenied(ApiError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    code = "permission_denied"


class NotFound(ApiError):
    """A thing of this id does not exist."""

    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "not_found"


class Conflict(ApiError):
    """The state of a thing, or the way in which it is kept, does not allow the change."""

    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"
    code = "conflict"


class PreconditionFailed(ApiError):
    """The thing has changed since the caller read it."""

    status = HTTPStatus.PRECONDITION_FAILED
    type = "invalid_request_error"
    code = "changed_meanwhile"


class PreconditionRequired(ApiError):
    """The change would replace something that the caller has not said to have read."""

    status = HTTPStatus.PRECONDITION_REQUIRED
    type = "invalid_request_error"
    code = "precondition_required"


class ModelNotFound(ApiError):
    """The model does not exist. OpenAI's SDKs map this 404 to NotFoundError."""

    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "model_not_found"


class RouteNotFound(ApiError):
    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowed(ApiError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str = "") -> None:
        """`allow`: the methods that the path has, with commas between, for the header of that name."""
        super().__init__(message)
        self.allow = allow


class BodyTimeout(ApiError):
    """The request body did not arrive in time."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    code = "request_body_timeout"


class BodyTooLarge(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimited(ApiError):
    """A quota of the caller's is used up for now."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "requests"
    code = "rate_limit_exceeded"
    retryable = True


class NothingAllowed(RateLimited):
    """A quota of the caller's is zero: waiting cannot help."""

    retryable = False


class TokensRateLimited(RateLimited):
    type = "tokens"


class RequestExceedsQuota(TokensRateLimited):
    """One request is larger than the tokens of a whole minute, day or month: waiting cannot help, asking for
    less can."""

    code = "request_exceeds_quota"
    retryable = False


class BudgetExhausted(ApiError):
    """A token budget is spent. One for a day or a month says with `Retry-After` when it begins anew; that is
    longer than a client waits."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "insufficient_quota"
    code = "insufficient_quota"


class RequestAborted(ApiError):
    """The request was ended by `DELETE /v1/requests/{id}` before it was done."""

    status = STATUS_CLIENT_GONE
    type = "invalid_request_error"
    code = "request_aborted"


# -- the service's troubles -----------------------------------------------------------------------


class Overloaded(ApiError):
    """A queue, or another bounded resource, is full. Sent at once, with Retry-After."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "overloaded_error"
    code = "queue_full"
    retryable = True


class FirstTokenDeadline(Overloaded):
    """The first token could not come while it was of use. Told at once where that is known beforehand."""

    code = "first_token_deadline"


class NotReady(ApiError):
    """The service starts or drains, or no replica is healthy."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "not_ready"
    retryable = True


class CoreHangs(NotReady):
    """The engine's core has stopped answering, and had begun nothing of this request."""


class GatewayStopped(NotReady):
    """The gateway stopped before the request was done."""

    code = "gateway_stopped"


class QuotaUnavailable(NotReady):
    """The store of quotas does not answer, so nothing can be reserved."""

    code = "quota_unavailable"


class IdentityUnavailable(NotReady):
    """The identity provider did not answer in time, so the caller cannot be identified."""

    code = "identity_unavailable"


class ResponsesUnavailable(NotReady):
    """The store of responses does not answer, so none that is kept can be told or referred to."""

    code = "responses_unavailable"


class DirectoryUnavailable(NotReady):
    """The store of keys and tenants does not answer, so nothing in it can be changed."""

    code = "directory_unavailable"


class ChangeUnknown(DirectoryUnavailable):
    """The store of keys and tenants does not say whether it has made a change. To try again without a look at
    it could make another one."""

    code = "change_unknown"
    retryable = False


class EngineFailed(ApiError):
    """The engine's core died, failed or hung while it held this request."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "engine_failed"
    retryable = True


class GrammarFailed(ApiError):
    """The answer could not follow the request's schema, grammar or tools. It says nothing about the engine:
    another one would fail as well."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "grammar_failed"


class UpstreamUnreachable(ApiError):
    """No connection to the engine was made. Nothing was dispatched, so a retry is safe."""

    status = HTTPStatus.BAD_GATEWAY
    code = "upstream_unreachable"
    retryable = True


class UpstreamFailed(ApiError):
    """The engine went away, or broke the protocol, after the request was dispatched."""

    status = HTTPStatus.BAD_GATEWAY
    code = "upstream_failed"


class UpstreamLost(UpstreamFailed):
    """The connection or the stream broke after the request was dispatched: the engine no longer works on it,
    and another may be asked as long as the client was sent nothing."""


class UpstreamLostTwice(UpstreamLost):
    """Two connections broke after the request was sent on them. Both engines may have died of it, and no
    third is asked."""


class UpstreamRefused(UpstreamFailed):
    """The engine, or what is before it, does not take what the gateway sends (its path, its method, its
    type), which another would not take either."""


class PathNotServed(ApiError):
    """The model's engine, one of another make, has no such path: it speaks other APIs than this one."""

    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "path_not_served"


class UpstreamDenied(UpstreamFailed):
    """The engine does not take the gateway's own key, or its account is not paid."""


class UpstreamDeferred(UpstreamFailed):
    """The engine, or what is before it, did not take the request this time, and is well."""


class ConnectTimeout(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "connect_timeout"
    retryable = True


class FirstTokenTimeout(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "first_token_timeout"


class InterTokenTimeout(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "inter_token_timeout"


class TotalTimeout(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "total_timeout"


class QueueTimeout(ApiError):
    """The engine did not begin within the caller's bound on waiting."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "queue_timeout"
    retryable = True


class RequestTimeout(ApiError):
    """The answer was not complete within the caller's own bound."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "timeout_error"
    code = "request_timeout"


class SlowClient(ApiError):
    """The client stopped reading its stream for longer than the slow-client deadline."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "timeout_error"
    code = "slow_client"

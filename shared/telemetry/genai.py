"""The names of span attributes, after OpenTelemetry's semantic conventions: those for HTTP, which are stable,
and of those for generative models the ones that a server tells (v1.38). Penstock's own begin with
`penstock.`.
"""

from __future__ import annotations

from typing import Final

REQUEST_METHOD: Final = "http.request.method"
ROUTE: Final = "http.route"
STATUS_CODE: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

PROVIDER_NAME: Final = "penstock"
ATTRIBUTES: Final = {
    "method": REQUEST_METHOD,
    "endpoint": ROUTE,
    "status": STATUS_CODE,
    "error_code": ERROR_TYPE,
    "model": REQUEST_MODEL,
    "prompt_tokens": INPUT_TOKENS,
    "completion_tokens": OUTPUT_TOKENS,
}
"""The attribute for each field of a completed line that the conventions name."""
OWN: Final = (
    "request_id",
    "end_reason",
    "tenant",
    "stream",
    "key_id",
    "replica",
    "attempts",
    "route",
    "cached_tokens",
    "reasoning_tokens",
    "calls",
    "reserved_tokens",
    "settled_tokens",
    "events",
    "sequences",
    "preemptions",
    "swaps",
)
"""Fields that become attributes of Penstock's own."""

"""Requests that generate: what they and their answers have in common, whichever API they came by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Raw, Struct

from shared.apis.prompt import PromptForm
from shared.apis.request import Request
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import (
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    STOP_LEN_MAX,
    STOP_MAX,
    STOP_TOKEN_IDS_MAX,
    TOKEN_ID_MAX,
    TOKENS_MAX,
    TokenId,
    Unshown,
)

_SEED_MAX: Final = 2**63 - 1
_PRIORITY_MAX: Final = 2**31 - 1

_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_StopString = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]


class StreamOptions(Struct):
    include_usage: bool | None = None


class PromptExtension(Unshown):
    """Token ids that the gateway counted and sends along, so that no text is tokenized twice.

    Trusted only when `tokenizer` is the hash of the engine's own tokenizer.
    """

    tokenizer: str
    prompt_ids: list[list[int]]
    """One list per prompt; a chat has one prompt."""


class GenerationRequest(Request, kw_only=True):
    """The fields that all of them have, and properties that each API computes from its own."""

    operation: ClassVar[str]
    """What it asks for, as OpenTelemetry names it (`gen_ai.operation.name`)."""
    prompt_param: ClassVar[str]
    """The name of the field that holds the prompt."""

    model: str
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | None = None
    """The number of likeliest tokens to sample from; 0 and -1 are off."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-_SEED_MAX - 1, le=_SEED_MAX)] | None = None

    stop: _StopString | Annotated[list[_StopString], Meta(max_length=STOP_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    ignore_eos: bool | None = None

    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """A salt that narrows prefix sharing within the tenant; it never widens it."""

    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """The urgency: `priority` before `default` before `flex`. `auto` and `scale` are `default`."""
    priority: Annotated[int, Meta(ge=-_PRIORITY_MAX, le=_PRIORITY_MAX)] | None = None
    """vLLM's extension, lower is sooner: below 0 is `priority`, 0 `default`, above 0 `flex`. It counts when
    `service_tier` is absent or leaves it open."""

    # accepted, without effect on the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    penstock: PromptExtension | None = None
    """Set by the gateway; the gateway refuses it from clients."""

    @property
    @abstractmethod
    def prompt_form(self) -> PromptForm:
        """The prompt in one of the two forms."""

    def check(self, fields: Mapping[str, Raw]) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias, fields["logit_bias"])
        self.check_own()
        limit = self.output_tokens_max
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            message = f"min_tokens must be at most max_tokens, which is {limit}."
            raise InvalidRequest(message, param="min_tokens")

    def check_own(self) -> None:
        """Check the relations between the fields that its API alone has. Raises InvalidRequest."""

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_tokens_max(self) -> int | None:
        """The most tokens of each choice; None leaves it to the context length."""
        return None

    @property
    def stated_tokens_max(self) -> int | None:
        """The `output_tokens_max` that the caller stated. None where it is a default."""
        return self.output_tokens_max

    @property
    def max_tokens_param(self) -> str:
        """The name of the field that states `output_tokens_max`, or could state it."""
        return "max_tokens"

    @property
    def logprobs_asked(self) -> int | None:
        """The number of likeliest tokens to report with each token; None for no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """True if the prompt is repeated in the answer."""
        return False


def _check_logit_bias(bias: dict[str, float], raw: Raw) -> None:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= TOKEN_ID_MAX):
            raise InvalidRequest("The keys of logit_bias must be token ids.", param="logit_bias")
    names = bytes(raw).count(b":")  # there is none in token ids and numbers
    if len({int(key) for key in bias}) < names:
        raise InvalidRequest("logit_bias names a token twice.", param="logit_bias")


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReasonName = Literal["stop", "length"]

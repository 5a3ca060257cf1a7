"""What OpenAI's two APIs have in common whose answers are lists of choices: chat and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Raw, Struct

from shared.apis.generation import GenerationRequest
from shared.apis.structure import (
    ResponseFormat,
    Structure,
    StructuredOutputs,
    check_format,
    check_outputs,
)
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
)

_SEED_MAX: Final = 2**63 - 1

_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_StopString = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]


class StreamOptions(Struct):
    include_usage: bool | None = None


class ChoicesRequest(GenerationRequest, kw_only=True):
    """The fields that both have beside those of `GenerationRequest`."""

    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream_options: StreamOptions | None = None

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

    response_format: ResponseFormat | None = None
    """The form of the answer: text, any JSON object, or JSON that follows a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's extension: the form of the answer, by a schema, a regular expression, texts or a grammar."""

    return_token_ids: bool | None = None

    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """The urgency: `priority` before `default` before `flex`. `auto` and `scale` are `default`."""

    # accepted, without effect on the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None

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

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        if self.response_format is not None:
            check_format(self.response_format, fields["response_format"])
        if self.structured_outputs is not None:
            check_outputs(self.structured_outputs, fields["structured_outputs"])
            asked = self.structured_outputs.structure, self.response_format and self.response_format.structure
            if None not in asked:
                message = "structured_outputs and response_format exclude each other."
                raise InvalidRequest(message, param="structured_outputs")
        super().check_for_ours(fields)

    @property
    def structure(self) -> Structure | None:
        """The structure of the answer's text. None where it is free."""
        if self.structured_outputs is not None and (asked := self.structured_outputs.structure) is not None:
            return asked
        return None if self.response_format is None else self.response_format.structure

    @property
    def stop_strings(self) -> Sequence[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _check_logit_bias(bias: dict[str, float], raw: Raw) -> None:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= TOKEN_ID_MAX):
            raise InvalidRequest("The keys of logit_bias must be token ids.", param="logit_bias")
    names = bytes(raw).count(b":")  # there is none in token ids and numbers
    if len({int(key) for key in bias}) < names:
        raise InvalidRequest("logit_bias names a token twice.", param="logit_bias")

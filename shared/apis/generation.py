"""Requests that generate: what they and their answers have in common, whichever API they came by; and those
of OpenAI's two APIs whose answers are lists of choices, chat and completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.prompt import PromptForm
from shared.apis.request import Request
from shared.apis.structure import (
    ResponseFormat,
    Structure,
    StructuredOutputs,
    check_format,
    check_outputs,
)
from shared.apis.tools import NO_CALLS, Tool, ToolChoice, ToolMode
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

_PRIORITY_MAX: Final = 2**31 - 1
_SEED_MAX: Final = 2**63 - 1

_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_StopString = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]


class PromptExtension(Unshown):
    """Token ids that the gateway counted and sends along, so that no text is tokenized twice.

    Trusted only when `tokenizer` is the hash of the engine's own tokenizer.
    """

    tokenizer: str
    prompt_ids: list[list[int]]
    """One list per prompt; a chat has one prompt."""
    predicted_ids: list[int] | UnsetType = UNSET
    """The ids of the text that the caller predicts, where it predicts one."""


class GenerationRequest(Request, kw_only=True):
    """The fields that all of them have, and properties that each API computes from its own."""

    operation: ClassVar[str]
    """The operation that it asks for, as OpenTelemetry names it (`gen_ai.operation.name`)."""
    prompt_param: ClassVar[str]
    """The name of the field that holds the prompt."""
    answers: ClassVar[bool] = True
    """False if nothing is generated behind its prompts."""
    ability: ClassVar[str] = "generation"
    """The field of `shared.apis.models.Capabilities` that says whether a model serves it."""
    keeps_answer: ClassVar[bool] = False
    """True if the end of a stream tells the whole answer again, so that it is held until then."""
    prompt_beside: ClassVar[frozenset[str]] = frozenset()
    """The names of other fields whose text is in the prompt."""
    thinking_param: ClassVar[str] = "thinking_token_budget"
    """The name of the field that bounds the reasoning."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | None = None
    """The number of likeliest tokens to sample from; 0 and -1 are off."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """A salt that narrows prefix sharing within the tenant; it never widens it."""
    priority: Annotated[int, Meta(ge=-_PRIORITY_MAX, le=_PRIORITY_MAX)] | None = None
    """vLLM's extension, lower is sooner: below 0 is `priority`, 0 `default`, above 0 `flex`. It counts when
    `service_tier` is absent or leaves it open."""
    prompt_cache_key: str | None = None
    """A name of the conversation, by which turns find what is cached of those before them."""

    penstock: PromptExtension | None = None
    """Set by the gateway; the gateway refuses it from clients."""

    @property
    @abstractmethod
    def prompt_form(self) -> PromptForm:
        """The prompt in one of the two forms."""

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        if self.structure is not None or self.tool_choice_asked.mode is not ToolMode.NONE:
            self._check_free_end()

    def _check_free_end(self) -> None:
        """Where a structure or a call is complete, nothing but the answer's end is left to choose. So no
        answer can be made longer than that. Raises InvalidRequest."""
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                message = f"{name} cannot hold beside tools, or where an answer has a structure."
                raise InvalidRequest(message, param=name)

    @property
    def tools_asked(self) -> Sequence[Tool]:
        """The tools that the model is told of."""
        return ()

    @property
    def tool_places(self) -> Sequence[str]:
        """The places in the request of the schemas of `tools_asked`. Empty for those of chats."""
        return ()

    @property
    def tool_choice_asked(self) -> ToolChoice:
        """Which of them the answer calls."""
        return NO_CALLS

    @property
    def calls_in_parallel(self) -> bool:
        """True if an answer may call several."""
        return True

    @property
    def thinking_tokens_max(self) -> int | None:
        """The most tokens of each choice's reasoning. None leaves it to the model."""
        return None

    @property
    def predicted_text(self) -> str | None:
        """The text that each choice is expected to be. None where the caller predicts none."""
        return None

    @property
    def needs_reasoning(self) -> bool:
        """True if a bound on reasoning is refused where it is not known how the model reasons. Else such a
        model keeps within any."""
        return True

    @property
    def shows_reasoning(self) -> bool:
        """True if the answer tells the model's reasoning."""
        return True

    @property
    def hides_reasoning(self) -> bool:
        """True if the answer tells that there was reasoning, and for the next turn what it was."""
        return False

    @property
    def reasoning_kept_tokens(self) -> int:
        """The tokens of reasoning for which there is to be room until it is told, where that is at its end
        alone."""
        return 0

    @property
    def output_tokens_max(self) -> int | None:
        """The most tokens of each choice; None leaves it to the context length."""
        return None if self.answers else 0

    @property
    def stated_tokens_max(self) -> int | None:
        """The `output_tokens_max` that the caller stated. None where it is a default."""
        return self.output_tokens_max if self.answers else None

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

    # -- what not every API has a field for ---------------------------------------------------------

    @property
    def n(self) -> int | None:
        """The number of choices. None for one."""
        return None

    @property
    def min_p(self) -> float | None:
        return None

    @property
    def presence_penalty(self) -> float | None:
        return None

    @property
    def frequency_penalty(self) -> float | None:
        return None

    @property
    def repetition_penalty(self) -> float | None:
        return None

    @property
    def logit_bias(self) -> dict[str, float] | None:
        return None

    @property
    def seed(self) -> int | None:
        return None

    @property
    def stop_strings(self) -> Sequence[str]:
        return ()

    @property
    def stop_token_ids(self) -> list[int] | None:
        return None

    @property
    def min_tokens(self) -> int | None:
        return None

    @property
    def ignore_eos(self) -> bool | None:
        return None

    @property
    def return_token_ids(self) -> bool | None:
        return None

    @property
    def service_tier(self) -> str | None:
        """The urgency as the API names it: of `flex`, `default` and `priority`, or a name that leaves it
        open."""
        return None

    @property
    def include_usage(self) -> bool:
        """True if a stream tells its usage in an event of its own."""
        return False

    @property
    def structure(self) -> Structure | None:
        """The structure of the answer's text. None where it is free."""
        return None


# -- lists of choices -----------------------------------------------------------------------------


class StreamOptions(Struct):
    include_usage: bool | None = None


class ChoicesRequest(GenerationRequest, kw_only=True):
    """The fields that chat and completions have beside those of `GenerationRequest`."""

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


# -- answers --------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Where the caller predicted the answer: the tokens of it that were taken from there."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """The tokens that were tried from there, and are not in the answer. They are counted among
    `completion_tokens`, too, as OpenAI does."""


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """The parts of `completion_tokens`, of models that reason and where the caller predicted the answer."""


FinishReasonName = Literal["stop", "length", "tool_calls"]

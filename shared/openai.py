"""OpenAI's request, response, chunk and error shapes: the only copy, used by both services.

Policy for fields, as API.md documents it:

- A field that is honoured is typed and bounded here, and a bad value is a 400 that names it.
- A field that asks for something that no engine of ours can do (`tools`, a JSON `response_format`, audio,
  other engines' extensions) is refused, by the tables of `shared.fields`; it is never silently ignored.
- Fields that change nothing about the answer (`metadata`, `user`, `store`, ...) are accepted.
- Unknown fields are accepted too, passed on, and named in the `x-penstock-ignored-fields` answer
  header, so that a misspelt name can be seen.

Beyond OpenAI, the common extensions of open engines: `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `min_tokens`, `ignore_eos`, `return_token_ids`, `cache_salt`, a message's
`reasoning_content`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.errors import ApiError
from shared.room import Room

BODY_LEN_MAX: Final = 8 * 1024 * 1024
MESSAGES_MAX: Final = 2048
IMAGES_MAX: Final = 64
"""Bound on the images of a chat."""
PROMPTS_MAX: Final = 256
"""Bound on the number of prompts, and on `n` times it, which is the number of sequences of one request."""
CHOICES_MAX: Final = 64
"""Bound on `n`."""
STOP_MAX: Final = 16
STOP_LEN_MAX: Final = 256
STOP_TOKEN_IDS_MAX: Final = 64
LOGPROBS_MAX: Final = 20
LOGIT_BIAS_MAX: Final = 1024
TOKEN_ID_MAX: Final = 2**31 - 1
"""Bound on token ids, above those of any model. The engine knows how many its model has."""
TOKENS_MAX: Final = 2**24
"""Bound on any count of tokens, far above any context length."""
USED_TOKENS_MAX: Final = PROMPTS_MAX * TOKENS_MAX
"""Bound on the tokens of a request's prompts, and on those of its answers. An engine that tells more is not
believed."""

COMPLETION_TOKENS_DEFAULT: Final = 16
"""The `max_tokens` of completions (never of chat) when it is absent, as OpenAI has it."""

_SEED_MAX: Final = 2**63 - 1
_PRIORITY_MAX: Final = 2**31 - 1

_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
_StopString = Annotated[str, Meta(min_length=1, max_length=STOP_LEN_MAX)]
_TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]


class Unshown(Struct):
    """A base of shapes that hold text of prompts or answers: none of it is in their `repr`, which may end up
    in a log or in a traceback."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


# -- requests -------------------------------------------------------------------------------------


class TextPart(Unshown, tag_field="type", tag="text"):
    text: str


class RefusalPart(Unshown, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(Unshown, omit_defaults=True):
    url: str
    detail: Annotated[str, Meta(max_length=16)] | None = None


class ImagePart(Unshown, tag_field="type", tag="image_url"):
    image_url: ImageUrl


ContentPart = TextPart | ImagePart | RefusalPart


class FunctionCall(Unshown):
    name: str
    arguments: str


class CustomCall(Unshown):
    name: str
    input: str


class FunctionToolCall(Unshown, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class CustomToolCall(Unshown, tag_field="type", tag="custom"):
    id: str
    custom: CustomCall


ToolCall = FunctionToolCall | CustomToolCall


class ChatMessage(Unshown, omit_defaults=True):
    """A message of any of OpenAI's shapes. Which of them a model's engine takes is another question."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MESSAGES_MAX)] | UnsetType | None = UNSET
    """Null, or left out, where the assistant called tools or refused."""
    name: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning, for templates that repeat it. An extension that open engines share."""
    reasoning: str | None = None
    """The newer name of the same."""
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MESSAGES_MAX)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None

    @property
    def text(self) -> str:
        content = self.content
        if isinstance(content, str):
            return content
        return "".join([part.text for part in content or () if isinstance(part, TextPart)])

    @property
    def printable(self) -> tuple[str, ...]:
        """The texts that a chat template of ours may print."""
        if self.name is None and self.reasoning_content is None:
            return (self.text,)
        return self.text, self.name or "", self.reasoning_content or ""

    @property
    def texts(self) -> list[str]:
        """All texts in it, but for the addresses and bytes of images."""
        more = self.name, self.reasoning_content, self.reasoning, self.refusal, self.tool_call_id
        texts = [self.text, *filter(None, more)]
        if isinstance(self.content, list):
            texts += [part.refusal for part in self.content if isinstance(part, RefusalPart)]
        if self.tool_calls is None and self.function_call is None:  # as in most messages
            return texts
        calls: list[FunctionCall | CustomCall] = []
        for call in self.tool_calls or ():
            texts.append(call.id)
            calls.append(call.function if isinstance(call, FunctionToolCall) else call.custom)
        if self.function_call is not None:
            calls.append(self.function_call)
        for one in calls:
            texts += one.name, one.arguments if isinstance(one, FunctionCall) else one.input
        return texts

    @property
    def parts(self) -> Sequence[ContentPart]:
        """The parts of its content. Empty where that is a text or none."""
        content = self.content
        return content if isinstance(content, list) else ()


class StreamOptions(Struct):
    include_usage: bool | None = None


class ResponseFormat(Struct):
    type: str


class PromptExtension(Unshown):
    """Token ids that the gateway counted and sends along, so that no text is tokenized twice.

    Trusted only when `tokenizer` is the hash of the engine's own tokenizer.
    """

    tokenizer: str
    prompt_ids: list[list[int]]
    """One list per prompt; a chat has one prompt."""


class GenerationRequest(Unshown, kw_only=True):
    """The common part of chat and completions: shared fields, and properties that each computes from its own
    fields."""

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
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
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


_NULL: Final = Raw(b"null")


class ChatRequest(GenerationRequest, kw_only=True):
    prompt_param: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    """The newer name of `max_tokens`, over which it wins."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None

    # accepted when they ask for nothing; `shared.fields` says when they do
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    parallel_tool_calls: bool | None = None
    functions: Raw = _NULL
    function_call: Raw = _NULL
    response_format: ResponseFormat | None = None
    modalities: Raw = _NULL
    audio: Raw = _NULL
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Prompt = str | list[str | int | list[int]]


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt_param: ClassVar[str] = "prompt"

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    """The most tokens of each choice. 0 is allowed with `echo`: it scores the prompt."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None

    @property
    def output_tokens_max(self) -> int:
        return COMPLETION_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens

    @property
    def stated_tokens_max(self) -> int | None:
        return self.max_tokens

    @property
    def logprobs_asked(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


PromptRequest = ChatRequest | CompletionRequest
"""The requests that engines make sequences of."""


class TokenizeRequest(Unshown, kw_only=True):
    """A request to tokenize either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    """True to give a prompt the special tokens that the tokenizer adds, as a completion's has them; the
    default. A chat has those that its template writes."""


class DetokenizeRequest(Unshown, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[_TokenId], Meta(max_length=TOKENS_MAX)]


# -- responses ------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Unshown):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Unshown):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


FinishReasonName = Literal["stop", "length"]


class AssistantMessage(Unshown):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    finish_reason: FinishReasonName
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Unshown):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReasonName | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    """The usage, with `include_usage`: null on every chunk but the last, which has no choices."""
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Unshown):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Unshown):
    """A choice of a completion, and of a chunk, where `finish_reason` is null until the last."""

    index: int
    text: str
    finish_reason: FinishReasonName | None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, and a chunk of one: the completions API streams its own response shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int | None = None
    """The most tokens that a prompt and its answer may have together."""
    context_len: int | UnsetType = UNSET
    """The tokens that the model's context holds, where the engine's KV cache holds fewer. Left out where
    `max_model_len` is that number."""

    @classmethod
    def of(cls, name: str, created: int, room: Room | None) -> Self:
        """The model as it is listed. `room` is None while that is unknown."""
        if room is None:
            return cls(id=name, created=created)
        is_less = room.most < room.context_len
        context_len = room.context_len if is_less else UNSET
        return cls(id=name, created=created, max_model_len=room.most, context_len=context_len)


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(Unshown):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(Unshown):
    prompt: str


class AbortResponse(Struct):
    id: str
    aborted: int
    """The number of live requests that had this id. 0 is no error: an abort is idempotent."""


# -- errors ---------------------------------------------------------------------------------------


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct):
    error: ErrorBody


def error_envelope(error: ApiError) -> bytes:
    """The JSON body of an error, as OpenAI's SDKs expect it; also the data of an SSE error event."""
    body = ErrorBody(message=error.message, type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorEnvelope(body))

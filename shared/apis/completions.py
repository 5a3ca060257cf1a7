"""OpenAI's completions: `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.generation import ChoicesRequest, FinishReasonName, Usage
from shared.apis.nothing import CHAT, EXTENSIONS, LOOKED_INTO, Nothing
from shared.apis.prompt import Prompt, TextPrompt
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import CHOICES_MAX, LOGPROBS_MAX, PROMPTS_MAX, TOKENS_MAX, Unshown

MAX_TOKENS_DEFAULT: Final = 16
"""The `max_tokens` of completions (never of chat) when it is absent, as OpenAI has it."""


class CompletionRequest(ChoicesRequest, kw_only=True):
    path: ClassVar[str] = "/v1/completions"
    operation: ClassVar[str] = "text_completion"
    prompt_param: ClassVar[str] = "prompt"
    taken_from: ClassVar[str | None] = "best_of"
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **EXTENSIONS,
        **CHAT,
        "suffix": LOOKED_INTO,
        "add_special_tokens": (True,),
    }

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    """The most tokens of each choice. 0 is allowed with `echo`: it scores the prompt."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    suffix: str | None = None
    """The text behind the one that is asked for, of models that fill in the middle."""
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None

    @property
    def prompt_form(self) -> TextPrompt:
        return TextPrompt(self.prompt, suffix=self.suffix or None)

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        super().check_for_ours(fields)
        if not self.suffix:
            return
        if not isinstance(self.prompt, str):
            raise InvalidRequest("suffix needs a prompt that is one string.", param="suffix")
        if self.echo:
            raise InvalidRequest("suffix and echo exclude each other.", param="suffix")

    def check_own(self) -> None:
        choices = self.n or 1
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, unless echo is true.", param="max_tokens")
        prompts = self.prompt_form.count()
        if prompts > PROMPTS_MAX:
            raise InvalidRequest(f"prompt must have at most {PROMPTS_MAX} items.", param="prompt")
        if choices * prompts > PROMPTS_MAX:
            raise InvalidRequest(f"n times the number of prompts must be at most {PROMPTS_MAX}.", param="n")

    @property
    def output_tokens_max(self) -> int:
        return MAX_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens

    @property
    def stated_tokens_max(self) -> int | None:
        return self.max_tokens

    @property
    def logprobs_asked(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


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

"""Text to token ids and back, as vLLM has it: `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from shared.apis.messages import ChatMessage
from shared.apis.nothing import FALSE, PROMPT, Nothing
from shared.apis.prompt import ChatPrompt, PromptForm, TextPrompt
from shared.apis.request import Request
from shared.wire.shapes import MESSAGES_MAX, TOKENS_MAX, TokenId, Unshown


class TokenizeRequest(Request, kw_only=True):
    """A request to tokenize either `prompt` or `messages`."""

    path: ClassVar[str] = "/tokenize"
    has_messages: ClassVar[bool] = True
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **PROMPT,
        "add_generation_prompt": (True,),
        "return_token_strs": FALSE,
    }

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    """True to give a prompt the special tokens that the tokenizer adds, as a completion's has them; the
    default. A chat has those that its template writes."""

    @property
    def prompt_form(self) -> PromptForm | None:
        """What is to be tokenized. None where neither is given."""
        if self.messages is not None:
            return ChatPrompt(self.messages)
        return None if self.prompt is None else TextPrompt(self.prompt)


class DetokenizeRequest(Request, kw_only=True):
    path: ClassVar[str] = "/detokenize"
    nothing: ClassVar[Mapping[str, Nothing]] = {"skip_special_tokens": FALSE}

    tokens: Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)]


class TokenizeResponse(Unshown):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(Unshown):
    prompt: str

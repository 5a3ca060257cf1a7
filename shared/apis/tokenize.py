"""Text to token ids and back, as vLLM has it: `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw

from shared.apis.chat_form import chat_prompt, check_chat
from shared.apis.chat_messages import ChatMessage
from shared.apis.nothing import FALSE, LOOKED_INTO, NONE, PROMPT, Nothing
from shared.apis.prompt import PromptForm, TextPrompt
from shared.apis.request import Request
from shared.apis.tools import Tools, known_tools
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import MESSAGES_MAX, TOKENS_MAX, TokenId, Unshown


class TokenizeRequest(Request, kw_only=True):
    """A request to tokenize either `prompt` or `messages`."""

    path: ClassVar[str] = "/tokenize"
    has_messages: ClassVar[bool] = True
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **PROMPT,
        **dict.fromkeys(("tools", "chat_template_kwargs", "continue_final_message"), LOOKED_INTO),
        "include_reasoning": NONE,
        "return_token_strs": FALSE,
    }

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    """True to give a prompt the special tokens that the tokenizer adds, as a completion's has them; the
    default. A chat has those that its template writes."""
    tools: Tools | None = None
    """The functions that the chat's template is told of."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, those that the model's operator lets requests set."""
    continue_final_message: bool | None = None
    """True for a prompt that ends where the last message, one of the assistant's, does."""
    add_generation_prompt: bool | None = None
    """False for a prompt that ends without the beginning of an assistant's message."""

    @property
    def prompt_form(self) -> PromptForm | None:
        """The prompt that is to be tokenized. None where neither is given."""
        if self.messages is not None:
            return chat_prompt(self, self.messages)
        return None if self.prompt is None else TextPrompt(self.prompt)

    def check_for_ours(self, fields: Mapping[str, Raw]) -> None:
        if self.messages is not None:
            check_chat(self, self.messages, fields.get("chat_template_kwargs"))
            return
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} needs messages.", param=name)

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        return known_tools(self.tools, fields["tools"])[1] if self.tools else []


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

"""The prompt of a request in one of two forms, a chat or texts: what is counted, rendered, tokenized and
hashed, whichever API it came by."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Final

from shared.apis.chat_messages import ChatMessage
from shared.apis.tools import Tool
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import Unshown

CUT_TO_ROOM: Final = -1

Prompt = str | list[str | int | list[int]]
"""A text, several of them, the token ids of one, or those of several."""


class ChatPrompt(Unshown):
    """A chat: one prompt, as the model's template writes it."""

    messages: list[ChatMessage]
    param: str = "messages"
    """The name of the request's field that holds it."""
    tools: tuple[Tool, ...] = ()
    arguments: dict[str, Any] = {}  # noqa: RUF012  msgspec copies it
    """The template's variables that the request sets (`chat_template_kwargs`), `reasoning_effort` among
    them."""
    wishes: dict[str, Any] = {}  # noqa: RUF012  as above
    """Variables that the template is given where it may be: one that has none of the name goes without."""
    continues_final: bool = False
    """True where the answer continues the last message, which the prompt leaves open."""
    opens_answer: bool = True
    """True where the prompt ends with what begins an assistant's message."""
    places: tuple[str, ...] = ()
    """The caller's own name of each message, where it is not the message of that number in `param`."""
    effort_param: str = "reasoning_effort"
    """The name of the field that holds the variable of that name."""
    continues_param: str = "continue_final_message"
    """The name of the field that has the answer continue the last message."""

    def place(self, index: int, field: str = "") -> str:
        """The name of a message in errors, and behind it that of a field in it, where the caller sent it as
        a message."""
        return self.places[index] if self.places else f"{self.param}[{index}]{field}"

    def count(self) -> int:
        """Count the prompts."""
        return 1


class TextPrompt(Unshown):
    """Prompts as they are given, as texts or as token ids."""

    prompt: Prompt
    param: str = "prompt"
    """The name of the request's field that holds them."""
    suffix: str | None = None
    """The text behind the one that is asked for."""
    cut: int | None = None
    """The tokens that each is cut to where it has more; `CUT_TO_ROOM` for as many as there is room for. None
    where one that is too long is an error."""
    is_answered: bool = True
    """False if nothing is generated behind a prompt, so that it may take all of the room."""

    def place(self, index: int) -> str:
        """The name of a prompt in errors."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return self.param if is_one else f"{self.param}[{index}]"

    def count(self) -> int:
        """Count the prompts. Raises InvalidRequest when there is none, or kinds are mixed."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return 1
        kinds = set(map(type, prompt))  # in C: a prompt may have a million ids
        if not kinds:
            raise InvalidRequest(f"{self.param} must not be empty.", param=self.param)
        if len(kinds) > 1:
            message = f"{self.param} must not mix strings, token ids and lists of token ids."
            raise InvalidRequest(message, param=self.param)
        return 1 if kinds == {int} else len(prompt)


class RerankPrompt(Unshown):
    """A query and documents: a prompt for each document, which all begin alike."""

    query: str
    documents: list[str]
    instruction: str | None = None
    """A sentence on what makes a document relevant. None for the one that the model was trained on."""
    document_tokens_max: int | None = None
    """The tokens that each document is cut to. None where none is cut."""
    prompt_tokens_max: int | None = None
    """The tokens that each prompt is cut to, at its document's end; `CUT_TO_ROOM` for as many as there is
    room for. None where one that is too long is an error."""
    param: str = "documents"
    """The name of the request's field that holds the documents."""

    @property
    def beginning(self) -> str:
        """The text of the request with which all prompts begin."""
        return f"{self.instruction or ''}{self.query}"

    @property
    def is_cut(self) -> bool:
        """True if a prompt that is too long is cut."""
        return self.prompt_tokens_max is not None

    @property
    def own(self) -> list[str]:
        """The text of the request that each prompt has behind that."""
        return self.documents

    def place(self, index: int) -> str:
        """The name in errors of what a prompt has of its own."""
        return f"{self.param}[{index}]"

    def count(self) -> int:
        """Count the pieces of the prompts: what they share, and what each has behind that."""
        return 1 + len(self.documents)


class QuestionKind(Enum):
    """The kind of answer that a question asks for."""

    PREDICATE = "predicate"
    """The question is whether something is true."""
    CHOICE = "choice"
    SCORE = "score"


class AskedOption(Unshown):
    name: str
    description: str = ""


class AskedQuestion(Unshown):
    """A question about an input."""

    kind: QuestionKind
    instructions: str
    options: tuple[AskedOption, ...] = ()
    """The options to choose from, or the levels of a score. Empty for a predicate."""

    @property
    def text(self) -> str:
        """All that it says."""
        return "\n".join((self.instructions, *(f"{one.name} {one.description}" for one in self.options)))


class DecisionPrompt(Unshown):
    """Questions about one input: a prompt for each, which all begin with the input."""

    said: str
    """The input."""
    questions: list[AskedQuestion]
    param: str = "questions"
    """The name of the request's field that holds the questions."""

    is_cut: ClassVar[bool] = False

    @property
    def beginning(self) -> str:
        return self.said

    @property
    def own(self) -> list[str]:
        return [asked.text for asked in self.questions]

    def place(self, index: int) -> str:
        """The name in errors of what a prompt has of its own."""
        return f"{self.param}[{index}]"

    def count(self) -> int:
        """Count the pieces of the prompts: what they share, and what each has behind that."""
        return 1 + len(self.questions)


BranchedPrompt = RerankPrompt | DecisionPrompt
"""Prompts that begin alike. Their ids are those of the beginning, and of what each prompt has behind it. What
is asked for are log-probabilities of a few tokens behind each."""
PromptForm = ChatPrompt | TextPrompt | BranchedPrompt

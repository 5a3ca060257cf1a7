"""Answers as bytes: OpenAI's shapes for chat and for completions, whole and as events.

Nearly every event of a stream differs from the one before it in its text alone. So the bytes around
the text are made once per choice, by encoding the very Struct of `shared.openai` with a marker where
the text goes and cutting there; an event is then one small JSON string between two constants.
Whatever else a chunk can hold (log-probabilities, token ids, the end) takes the plain way through
the Structs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.outputs import ChoiceOutput, Delta, Entry
from engine.core.messages import TokenLogprobs
from shared import sse
from shared.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReasonName,
    TokenLogprob,
    TopLogprob,
    Usage,
)

LOGPROB_MIN: Final = -9999.0
"""What stands for the logarithm of zero, as with OpenAI: JSON has no infinity."""

_encode = msgspec.json.Encoder().encode


class Vocabulary(Protocol):
    """What single tokens look like."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    sends_usage: bool
    """`stream_options.include_usage`: usage is null on every chunk but the last."""
    sends_token_ids: bool
    logprobs: int | None

    @property
    def usage(self) -> UnsetType | None:
        return None if self.sends_usage else UNSET


class AnswerEncoder(Protocol):
    """One request's answer, whole or event by event."""

    def events(self, delta: Delta) -> bytes:
        """All events that a delta makes."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes: ...


class _Template:
    """An event with a hole for a JSON string."""

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        marker = secrets.token_hex(16)
        self._head, self._tail = sse.event(_encode(make(marker))).split(_encode(marker))

    def fill(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class ChatEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, prompt_ids: list[int]) -> None:
        self._heading = heading
        self._vocabulary = vocabulary
        self._prompt_ids: list[int] | UnsetType = prompt_ids if heading.sends_token_ids else UNSET
        self._templates: dict[int, _Template] = {}

    def events(self, delta: Delta) -> bytes:
        events = []
        if delta.is_first:
            first = ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))
            events.append(self._event(first, self._prompt_ids))
        if delta.entries:
            events.append(self._event(self._detailed(delta)))
        elif delta.text:
            events.append(self._template(delta.index).fill(delta.text))
        if delta.finish_reason is not None:
            events.append(self._event(ChatChunkChoice(delta.index, ChatDelta(), delta.finish_reason)))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        return sse.event(_encode(self._chunk([], usage, UNSET)))

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [
            ChatChoice(
                delta.index,
                AssistantMessage(delta.text),
                _known(delta.finish_reason),
                self._logprobs(delta.entries),
                self._token_ids(delta.entries),
            )
            for delta in deltas
        ]
        heading = self._heading
        return _encode(
            ChatCompletion(
                id=heading.id,
                created=heading.created,
                model=heading.model,
                choices=choices,
                usage=usage,
                system_fingerprint=heading.system_fingerprint,
                prompt_token_ids=self._prompt_ids,
            )
        )

    def _detailed(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            delta.index,
            ChatDelta(content=delta.text),
            None,
            self._logprobs(delta.entries),
            self._token_ids(delta.entries),
        )

    def _template(self, index: int) -> _Template:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = _Template(
                lambda text: self._chunk(
                    [ChatChunkChoice(index, ChatDelta(content=text))], self._heading.usage, UNSET
                )
            )
        return template

    def _event(self, choice: ChatChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        return sse.event(_encode(self._chunk([choice], self._heading.usage, prompt_ids)))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType,
    ) -> ChatChunk:
        heading = self._heading
        return ChatChunk(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=choices,
            system_fingerprint=heading.system_fingerprint,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def _token_ids(self, entries: list[Entry]) -> list[int] | UnsetType:
        return [entry.token_id for entry in entries] if self._heading.sends_token_ids else UNSET

    def _logprobs(self, entries: list[Entry]) -> ChatLogprobs | None:
        if self._heading.logprobs is None:
            return None
        return ChatLogprobs(
            [self._logprob(e.token_id, e.logprobs) for e in entries if e.logprobs is not None]
        )

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        data = self._vocabulary.token_bytes(token_id)
        top = [
            TopLogprob(*_shown(self._vocabulary.token_bytes(top_id), value))
            for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        return TokenLogprob(*_shown(data, logprobs.logprob), top_logprobs=top)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its completions."""

    text: str
    prompt_ids: list[int]
    starts: list[int] = field(default_factory=list)
    """Position of each prompt token's text in `text`; empty when log-probabilities are not asked for."""


class CompletionEncoder:
    def __init__(
        self,
        heading: Heading,
        vocabulary: Vocabulary,
        outputs: Sequence[ChoiceOutput],
        prompts: Sequence[list[int]],
        echoes: Sequence[Echo | None],
    ) -> None:
        """`prompts` and `echoes` have one entry per choice."""
        self._heading = heading
        self._vocabulary = vocabulary
        self._outputs = outputs
        self._prompts = prompts
        self._echoes = echoes
        self._templates: dict[int, _Template] = {}

    def events(self, delta: Delta) -> bytes:
        events = []
        is_plain = not delta.entries and not (delta.is_first and self._has_preface(delta.index))
        if is_plain:
            if delta.text:
                events.append(self._template(delta.index).fill(delta.text))
        else:
            events.append(self._event(self._detailed(delta, finish_reason=None)))
        if delta.finish_reason is not None:
            events.append(self._event(CompletionChoice(delta.index, "", delta.finish_reason)))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        return sse.event(_encode(self._chunk([], usage)))

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [self._detailed(delta, finish_reason=_known(delta.finish_reason)) for delta in deltas]
        return _encode(self._chunk(choices, usage))

    def _has_preface(self, index: int) -> bool:
        """Whether the first chunk of a choice holds more than its text."""
        return self._heading.sends_token_ids or self._echoes[index] is not None

    def _detailed(self, delta: Delta, *, finish_reason: FinishReasonName | None) -> CompletionChoice:
        echo = self._echoes[delta.index]
        is_echoed = echo is not None and delta.is_first
        sends_ids = self._heading.sends_token_ids
        return CompletionChoice(
            delta.index,
            echo.text + delta.text if echo is not None and is_echoed else delta.text,
            finish_reason,
            self._logprobs(delta, echo, is_echoed=is_echoed),
            [entry.token_id for entry in delta.entries] if sends_ids else UNSET,
            self._prompts[delta.index] if sends_ids and delta.is_first else UNSET,
        )

    def _template(self, index: int) -> _Template:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = _Template(
                lambda text: self._chunk([CompletionChoice(index, text, None)], self._heading.usage)
            )
        return template

    def _event(self, choice: CompletionChoice) -> bytes:
        return sse.event(_encode(self._chunk([choice], self._heading.usage)))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        heading = self._heading
        return Completion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=choices,
            system_fingerprint=heading.system_fingerprint,
            usage=usage,
        )

    def _logprobs(self, delta: Delta, echo: Echo | None, *, is_echoed: bool) -> CompletionLogprobs | None:
        if self._heading.logprobs is None:
            return None
        columns = CompletionLogprobs([], [], [], [])
        if echo is not None and is_echoed:
            known: list[TokenLogprobs | None] = [None, *self._outputs[delta.index].prompt_logprobs]
            for token_id, start, logprobs in zip(echo.prompt_ids, echo.starts, known, strict=True):
                self._append(columns, token_id, start, logprobs)
        base = len(echo.text) if echo is not None else 0
        for entry in delta.entries:
            if entry.logprobs is not None:
                self._append(columns, entry.token_id, base + entry.start, entry.logprobs)
        return columns

    def _append(
        self, columns: CompletionLogprobs, token_id: int, start: int, logprobs: TokenLogprobs | None
    ) -> None:
        """The first token of a prompt has no log-probability."""
        columns.text_offset.append(start)
        columns.tokens.append(self._name(token_id))
        if logprobs is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            return
        columns.token_logprobs.append(max(logprobs.logprob, LOGPROB_MIN))
        top = {
            self._name(top_id): max(value, LOGPROB_MIN)
            for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        }
        if self._heading.logprobs:  # the chosen token is listed too, as with OpenAI
            top.setdefault(self._name(token_id), max(logprobs.logprob, LOGPROB_MIN))
        columns.top_logprobs.append(top or None)

    def _name(self, token_id: int) -> str:
        """A token's text, or its bytes spelt out where it is only a piece of a character."""
        data = self._vocabulary.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _known(reason: FinishReasonName | None) -> FinishReasonName:
    assert reason is not None
    return reason


def _shown(data: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """(token, logprob, bytes) of one token, as chat shows it."""
    return data.decode("utf-8", "replace"), max(logprob, LOGPROB_MIN), list(data)

"""Answers as bytes: OpenAI's shapes for chat and for completions, whole and as events.

Nearly every event of a stream differs from the one before it only in its text. So the bytes around the text
are made once per choice: the Struct of `shared.openai` is encoded with a marker in the place of the text, and
cut there. An event is then one small JSON string between two constants. Whatever else a chunk can hold
(log-probabilities, token ids, the finish reason) is encoded from its Struct each time.

Rules

1. Answers come in pieces, and making one takes a few milliseconds at most: the caller lets other requests run
   in between. The pieces of a whole answer, joined, are what encoding its Struct would give.
2. An event is one line for every client, whatever characters it takes for line ends: U+0085, U+2028 and
   U+2029 are escaped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.outputs import ChoiceOutput, Delta, Entry
from engine.api.rows import Echo, Row, Rows, Sliced
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

T = TypeVar("T")

LOGPROB_MIN: Final = -9999.0
"""The log-probability that stands for minus infinity, which JSON does not have; OpenAI uses the same
number."""
PIECE_ENTRIES: Final = 2048
"""The most tokens and log-probabilities in one piece of an answer; encoding them takes about three
milliseconds."""
PIECE_TEXT_LEN: Final = 256 * 1024
"""The most characters of text in one piece of an answer."""
PIECE_IDS: Final = 16 * 1024
"""The most token ids of a prompt in one piece of an answer."""

_LINE_ENDS: Final = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)
_encode: Final = msgspec.json.Encoder().encode


class Vocabulary(Protocol):
    """The bytes of single tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields that all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    sends_usage: bool
    """True if `stream_options.include_usage` was set. Usage is then null on every chunk but the last."""
    sends_token_ids: bool
    logprobs: int | None

    @property
    def usage(self) -> UnsetType | None:
        return None if self.sends_usage else UNSET

    @property
    def piece_len(self) -> int:
        """The number of tokens in one piece of an answer, at least 1."""
        return max(1, PIECE_ENTRIES // (1 + (self.logprobs or 0)))


class AnswerEncoder(Protocol):
    """The encoder of one request's answer, whole or event by event."""

    def events(self, delta: Delta) -> Iterator[bytes]:
        """The events that a delta makes, in order."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        ...


class _Template:
    """An encoded event with a gap where a JSON string goes."""

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        marker = secrets.token_hex(16)
        self._head, self._tail = _event(make(marker)).split(_encode(marker))

    def fill(self, text: str) -> bytes:
        data = _encode(text)
        return self._head + (data if text.isascii() else _on_one_line(data)) + self._tail


def _event(chunk: msgspec.Struct) -> bytes:
    data = _encode(chunk)
    return sse.event(data if data.isascii() else _on_one_line(data))


def _on_one_line(data: bytes) -> bytes:
    """`data`, JSON, with the characters escaped that some clients take for line ends. They occur only
    within strings."""
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def _cut(data: bytes, before: bytes) -> tuple[bytes, bytes]:
    """`data` in two parts, the first of which ends with the first `before`. `before` is JSON that cannot
    occur within a string, because its quotes would be escaped there."""
    head, found, tail = data.partition(before)
    assert found
    return head + found, tail


def _characters(text: str) -> Iterator[bytes]:
    """The characters of a JSON string, without its quotes, in pieces."""
    for at in range(0, len(text), PIECE_TEXT_LEN):
        yield _encode(text[at : at + PIECE_TEXT_LEN])[1:-1]


def _items(rows: Sliced[T], make: Callable[[T], object], piece_len: int) -> Iterator[bytes]:
    """The items of a JSON array, without its brackets, in pieces."""
    for at in range(0, len(rows), piece_len):
        if at:
            yield b","
        yield _encode([make(row) for row in rows[at : at + piece_len]])[1:-1]


class ChatEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, prompt_ids: list[int]) -> None:
        self._heading = heading
        self._vocabulary = vocabulary
        self._prompt_ids: list[int] | UnsetType = prompt_ids if heading.sends_token_ids else UNSET
        self._templates: dict[int, _Template] = {}

    def events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            first = ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))
            yield self._event(first, self._prompt_ids)
        if delta.entries:
            yield self._event(self._detailed(delta))
        elif delta.text:
            yield self._template(delta.index).fill(delta.text)
        if delta.finish_reason is not None:
            yield self._event(ChatChunkChoice(delta.index, ChatDelta(), delta.finish_reason))

    def usage_event(self, usage: Usage) -> bytes:
        return _event(self._chunk([], usage, UNSET))

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        heading = self._heading
        answer = ChatCompletion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=[],
            usage=usage,
            system_fingerprint=heading.system_fingerprint,
            prompt_token_ids=self._prompt_ids,
        )
        head, tail = _cut(_encode(answer), b'"choices":[')
        yield head
        for number, delta in enumerate(deltas):
            if number:
                yield b","
            yield from self._choice(delta)
        yield tail

    def _choice(self, delta: Delta) -> Iterator[bytes]:
        has_logprobs = self._heading.logprobs is not None
        data = _encode(
            ChatChoice(
                delta.index,
                AssistantMessage(delta.text),
                _known(delta.finish_reason),
                ChatLogprobs([]) if has_logprobs else None,
                self._token_ids(delta.entries),
            )
        )
        if not has_logprobs:
            yield data
            return
        head, tail = _cut(data, b'"logprobs":{"content":[')
        yield head
        yield from _items(_told(delta.entries), self._logprob, self._heading.piece_len)
        yield tail

    def _detailed(self, delta: Delta) -> ChatChunkChoice:
        logprobs = None
        if self._heading.logprobs is not None:
            logprobs = ChatLogprobs([self._logprob(row) for row in _told(delta.entries)])
        content = ChatDelta(content=delta.text)
        return ChatChunkChoice(delta.index, content, None, logprobs, self._token_ids(delta.entries))

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
        return _event(self._chunk([choice], self._heading.usage, prompt_ids))

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

    def _logprob(self, entry: Entry) -> TokenLogprob:
        data, logprobs = self._vocabulary.token_bytes(entry.token_id), entry.logprobs
        assert logprobs is not None
        top = [
            TopLogprob(*_shown(self._vocabulary.token_bytes(top_id), value))
            for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        return TokenLogprob(*_shown(data, logprobs.logprob), top_logprobs=top)


def _told(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that have log-probabilities. A stop token has none."""
    return [entry for entry in entries if entry.logprobs is not None]


class CompletionEncoder:
    def __init__(
        self,
        heading: Heading,
        vocabulary: Vocabulary,
        scored: Sequence[ChoiceOutput],
        prompts: Sequence[list[int]],
        echoes: Sequence[Echo | None],
    ) -> None:
        """Each sequence has one entry per choice: `scored`, the output that has the log-probabilities
        of the choice's prompt; `prompts`, the prompt's ids; `echoes`, the prompt as it is repeated,
        None where it is not."""
        self._heading = heading
        self._vocabulary = vocabulary
        self._scored = scored
        self._prompts = prompts
        self._echoes = echoes
        self._templates: dict[int, _Template] = {}

    def events(self, delta: Delta) -> Iterator[bytes]:
        is_plain = not delta.entries and not (delta.is_first and self._has_preface(delta.index))
        if is_plain:
            if delta.text:
                yield self._template(delta.index).fill(delta.text)
        else:
            yield from map(self._event, self._parts(delta))
        if delta.finish_reason is not None:
            yield self._event(CompletionChoice(delta.index, "", delta.finish_reason))

    def usage_event(self, usage: Usage) -> bytes:
        return _event(self._chunk([], usage))

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        head, tail = _cut(_encode(self._chunk([], usage)), b'"choices":[')
        yield head
        for number, delta in enumerate(deltas):
            if number:
                yield b","
            yield from self._choice(delta)
        yield tail

    def _choice(self, delta: Delta) -> Iterator[bytes]:
        echo = self._echo(delta)
        text = delta.text if echo is None else echo.text + delta.text
        reason = _known(delta.finish_reason)
        has_logprobs = self._heading.logprobs is not None
        columns = CompletionLogprobs([], [], [], []) if has_logprobs else None
        part = self._part(delta.index, "", columns, delta.entries, is_first=delta.is_first, reason=reason)
        parts = [(b'"text":"', _characters(text))]
        if has_logprobs:
            rows, piece_len = self._rows(delta, echo), self._heading.piece_len
            made: tuple[tuple[bytes, Callable[[Row], object]], ...] = (
                (b'"logprobs":{"text_offset":[', lambda row: row.start),
                (b'],"token_logprobs":[', _value),
                (b'],"tokens":[', lambda row: self._name(row.token_id)),
                (b'],"top_logprobs":[', self._top),
            )
            parts += [(name, _items(rows, make, piece_len)) for name, make in made]
        if prompt_ids := part.prompt_token_ids:
            part = msgspec.structs.replace(part, prompt_token_ids=[])
            parts.append((b'"prompt_token_ids":[', _items(prompt_ids, int, PIECE_IDS)))
        data = _encode(part)
        for name, pieces in parts:
            head, data = _cut(data, name)
            yield head
            yield from pieces
        yield data

    def _parts(self, delta: Delta) -> Iterator[CompletionChoice]:
        """The chunks of a delta. A long prompt that is repeated comes first, in chunks of its own."""
        echo, is_first, piece_len = self._echo(delta), delta.is_first, self._heading.piece_len
        rows, text = self._rows(delta, echo), delta.text
        prompt_len = 0 if echo is None else len(echo.starts)
        at = 0
        if echo is not None and prompt_len <= piece_len and len(echo.text) <= PIECE_TEXT_LEN:
            text = echo.text + text
        elif echo is not None:
            starts = echo.starts[piece_len::piece_len] or range(
                PIECE_TEXT_LEN, len(echo.text), PIECE_TEXT_LEN
            )
            ends = [*starts, len(echo.text)]
            for start, end in zip([0, *ends], ends, strict=False):
                part = rows[at : min(at + piece_len, prompt_len)]
                prompt = echo.text[start:end]
                yield self._part(delta.index, prompt, self._columns(part), [], is_first=is_first)
                is_first, at = False, at + len(part)
        columns = self._columns(rows[at:])
        yield self._part(delta.index, text, columns, delta.entries, is_first=is_first)

    def _part(
        self,
        index: int,
        text: str,
        columns: CompletionLogprobs | None,
        entries: Sequence[Entry],
        *,
        is_first: bool,
        reason: FinishReasonName | None = None,
    ) -> CompletionChoice:
        sends_ids = self._heading.sends_token_ids
        return CompletionChoice(
            index,
            text,
            reason,
            columns,
            [entry.token_id for entry in entries] if sends_ids else UNSET,
            self._prompts[index] if sends_ids and is_first else UNSET,
        )

    def _has_preface(self, index: int) -> bool:
        """True if the first chunk of a choice holds more than text."""
        return self._heading.sends_token_ids or self._echoes[index] is not None

    def _echo(self, delta: Delta) -> Echo | None:
        return self._echoes[delta.index] if delta.is_first else None

    def _template(self, index: int) -> _Template:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = _Template(
                lambda text: self._chunk([CompletionChoice(index, text, None)], self._heading.usage)
            )
        return template

    def _event(self, choice: CompletionChoice) -> bytes:
        return _event(self._chunk([choice], self._heading.usage))

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

    def _rows(self, delta: Delta, echo: Echo | None) -> Rows:
        """The rows of a delta, with those of the prompt that it repeats."""
        own = self._echoes[delta.index]
        base = 0 if own is None else len(own.text)
        told = [] if self._heading.logprobs is None else _told(delta.entries)
        if echo is None or self._heading.logprobs is None:
            return Rows(None, [], told, base)
        return Rows(echo, self._scored[delta.index].prompt_logprobs, told, base)

    def _columns(self, rows: Sequence[Row]) -> CompletionLogprobs | None:
        if self._heading.logprobs is None:
            return None
        return CompletionLogprobs(
            text_offset=[row.start for row in rows],
            token_logprobs=[_value(row) for row in rows],
            tokens=[self._name(row.token_id) for row in rows],
            top_logprobs=[self._top(row) for row in rows],
        )

    def _top(self, row: Row) -> dict[str, float] | None:
        if row.logprobs is None:
            return None
        top: dict[str, float] = {}
        for top_id, value in zip(row.logprobs.top_ids, row.logprobs.top_logprobs, strict=True):
            self._list(top, top_id, value)
        if self._heading.logprobs:  # OpenAI lists the chosen token, too
            self._list(top, row.token_id, row.logprobs.logprob)
        return top or None

    def _list(self, top: dict[str, float], token_id: int, value: float) -> None:
        """List a token by its text. Of two that have one text, such as "A" and the byte <0x41>, the likelier
        one counts."""
        name = self._name(token_id)
        top[name] = max(value, LOGPROB_MIN, top.get(name, LOGPROB_MIN))

    def _name(self, token_id: int) -> str:
        """A token's text. A token that is only part of a character appears as `bytes:` and its bytes
        in hexadecimal."""
        data = self._vocabulary.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _value(row: Row) -> float | None:
    return None if row.logprobs is None else max(row.logprobs.logprob, LOGPROB_MIN)


def _known(reason: FinishReasonName | None) -> FinishReasonName:
    assert reason is not None
    return reason


def _shown(data: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """The text, log-probability and bytes of one token, as chat lists them."""
    return data.decode("utf-8", "replace"), max(logprob, LOGPROB_MIN), list(data)

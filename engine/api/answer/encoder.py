"""Answers as bytes, whole and as events: what the encoders of all APIs share.

Nearly every event of a stream differs from the one before it only in its text. So the bytes around the text
are made once per choice: a Struct of the API is encoded with a marker in the place of the text, and cut
there. An event is then one small JSON string between two constants. Whatever else a chunk can hold
(log-probabilities, token ids, the finish reason) is encoded from its Struct each time.

Rules

1. Answers come in pieces, and making one takes a few milliseconds at most: the caller lets other requests run
   in between. The pieces of a whole answer, joined, are what encoding its Struct would give.
2. An event is one line for every client, whatever characters it takes for line ends: U+0085, U+2028 and
   U+2029 are escaped.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.answer.outputs import ChoiceOutput, Delta, Entry
from engine.api.answer.rows import Echo, Sliced
from engine.contract.messages import SamplingParams, ServiceClass
from shared.apis.generation import FinishReasonName, Usage
from shared.process.clock import SYSTEM_CLOCK
from shared.wire import sse

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
C = TypeVar("C", bound=msgspec.Struct)
"""A choice of a chunk."""

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
encode: Final = msgspec.json.Encoder().encode


class Repeated(Protocol):
    """The fields of a request that its answer repeats."""

    @property
    def held_len(self) -> int:
        """The most bytes that it takes at any time, until the answer's end."""
        ...


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
    sends_reasoning: bool = True
    hides_reasoning: bool = False
    """True if the answer tells that there was reasoning, without its text."""

    @property
    def usage(self) -> UnsetType | None:
        return None if self.sends_usage else UNSET

    @property
    def piece_len(self) -> int:
        """The number of tokens in one piece of an answer, at least 1."""
        return max(1, PIECE_ENTRIES // (1 + (self.logprobs or 0)))


@dataclass(frozen=True, slots=True)
class Answered:
    """The facts about a request's choices that an answer may tell, beside what was generated. One entry per
    choice."""

    scored: Sequence[ChoiceOutput] = ()
    """The output that has the log-probabilities of the choice's prompt."""
    prompts: Sequence[list[int]] = ()
    """The ids of its prompt; empty where they are not told."""
    echoes: Sequence[Echo | None] = ()
    """Its prompt as it is repeated; None where it is not."""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """The stop strings that are tokens, by their ids."""
    is_cut_by_context: bool = False
    """True if the context holds less than the answer's maximum."""
    sampling: SamplingParams | None = None
    """How its tokens were drawn: that of the first choice."""
    service_class: ServiceClass = ServiceClass.DEFAULT
    repeated: Repeated | None = None
    """The fields of the request that the answer repeats. None where its API repeats nothing."""
    in_base64: bool = False
    """True if vectors are told in base64."""
    wall: Callable[[], float] = SYSTEM_CLOCK.wall
    """The clock of `Heading.created`."""


class AnswerEncoder(Protocol):
    """The encoder of one request's answer, whole or event by event."""

    def opening(self, usage: Usage) -> bytes:
        """The events of a stream before any that tells of the answer. Asked only of an API that opens its
        streams early; `usage` has the tokens of the prompt and those of them that were cached."""
        ...

    def events(self, delta: Delta) -> Iterator[bytes]:
        """The events that a delta makes, in order."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The events that end a whole answer."""
        ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        """The body of an answer that is not streamed, in pieces."""
        ...


class Unstreamed:
    """The part of an encoder that answers which are never streamed do not have."""

    def opening(self, usage: Usage) -> bytes:
        raise AssertionError("they are not streamed")

    def events(self, delta: Delta) -> Iterator[bytes]:
        raise AssertionError("they are not streamed")

    def ending(self, usage: Usage) -> bytes:
        raise AssertionError("they are not streamed")


class Template:
    """An encoded event with gaps, in each of which the same JSON string goes."""

    __slots__ = ("_pieces",)

    def __init__(
        self,
        make: Callable[[str], msgspec.Struct],
        encoded: Callable[[msgspec.Struct], bytes] | None = None,
    ) -> None:
        """`encoded` makes an event: `encoded_event`, unless events have names."""
        marker = secrets.token_hex(16)
        self._pieces = (encoded or encoded_event)(make(marker)).split(encode(marker))

    def fill(self, text: str) -> bytes:
        data = encode(text)
        return (data if text.isascii() else on_one_line(data)).join(self._pieces)


class NumberedTemplate:
    """An encoded event with a gap for a JSON string, and behind that one for the event's number."""

    __slots__ = ("_format",)

    def __init__(self, make: Callable[[str, int], bytes]) -> None:
        marker, number = secrets.token_hex(16), secrets.randbits(61) | 1 << 61
        made = make(marker, number).replace(b"%", b"%%")
        self._format = made.replace(encode(marker), b"%b").replace(b"%d" % number, b"%d")

    def fill(self, text: str, number: int) -> bytes:
        data = encode(text)
        return self._format % (data if text.isascii() else on_one_line(data), number)


def encoded_event(chunk: msgspec.Struct) -> bytes:
    """An event with `chunk`."""
    return sse.event(encoded(chunk))


def encoded(value: msgspec.Struct) -> bytes:
    """The data of an event."""
    data = encode(value)
    return data if data.isascii() else on_one_line(data)


def on_one_line(data: bytes) -> bytes:
    """`data`, JSON, with the characters escaped that some clients take for line ends. They occur only
    within strings."""
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def cut(data: bytes, before: bytes) -> tuple[bytes, bytes]:
    """`data` in two parts, the first of which ends with the first `before`. `before` is JSON that cannot
    occur within a string, because its quotes would be escaped there."""
    head, found, tail = data.partition(before)
    assert found
    return head + found, tail


def filled(answer: msgspec.Struct, before: bytes, made: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """An answer whose list behind `before` is empty, with items in the list, each made in pieces."""
    head, tail = cut(encode(answer), before)
    yield head
    for number, pieces in enumerate(made):
        if number:
            yield b","
        yield from pieces
    yield tail


def characters(text: str) -> Iterator[bytes]:
    """The characters of a JSON string, without its quotes, in pieces."""
    for at in range(0, len(text), PIECE_TEXT_LEN):
        yield encode(text[at : at + PIECE_TEXT_LEN])[1:-1]


def items(rows: Sliced[T], make: Callable[[T], object], piece_len: int) -> Iterator[bytes]:
    """The items of a JSON array, without its brackets, in pieces."""
    for at in range(0, len(rows), piece_len):
        if at:
            yield b","
        yield encode([make(row) for row in rows[at : at + piece_len]])[1:-1]


class ChoicesEncoder(ABC, Generic[C]):
    """The common part of OpenAI's two APIs whose answers are lists of choices."""

    def __init__(self, heading: Heading, vocabulary: Vocabulary) -> None:
        self._heading = heading
        self._vocabulary = vocabulary
        self._templates: dict[int, Template] = {}

    @abstractmethod
    def _chunk(self, choices: list[C], usage: Usage | UnsetType | None) -> msgspec.Struct:
        """A chunk of a stream."""

    @abstractmethod
    def _with_text(self, index: int, text: str) -> C:
        """A choice of a chunk that has text alone."""

    @abstractmethod
    def _empty(self, usage: Usage) -> msgspec.Struct:
        """An answer that is not streamed, without its choices."""

    @abstractmethod
    def _choice(self, delta: Delta) -> Iterator[bytes]:
        """A choice of an answer that is not streamed, in pieces."""

    def opening(self, usage: Usage) -> bytes:
        raise AssertionError("its streams open with the first event")

    def ending(self, usage: Usage) -> bytes:
        told = encoded_event(self._chunk([], usage)) if self._heading.sends_usage else b""
        return told + sse.DONE

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        return filled(self._empty(usage), b'"choices":[', map(self._choice, deltas))

    def _headed(self, kind: Callable[..., S], **fields: Any) -> S:
        """An answer or a chunk with the heading's fields."""
        heading = self._heading
        return kind(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.system_fingerprint,
            **fields,
        )

    def _event(self, choice: C) -> bytes:
        return encoded_event(self._chunk([choice], self._heading.usage))

    def _text_event(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            usage = self._heading.usage
            template = self._templates[index] = Template(
                lambda marker: self._chunk([self._with_text(index, marker)], usage)
            )
        return template.fill(text)

    def _token_ids(self, entries: Sequence[Entry]) -> list[int] | UnsetType:
        return [entry.token_id for entry in entries] if self._heading.sends_token_ids else UNSET


def told(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that have log-probabilities. A stop token has none."""
    return [entry for entry in entries if entry.logprobs is not None]


def known(reason: FinishReasonName | None) -> FinishReasonName:
    assert reason is not None
    return reason

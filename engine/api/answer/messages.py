"""Anthropic's Messages: an answer is a list of blocks, and a stream tells one block after another.

Rules

1. A block ends where a part of another kind comes, or another call. Its index is its place in the answer. An
   answer without any has one text block, which is empty.
2. A stream begins with `message_start`, before there is a token, and ends with `message_delta`, which says
   why, and `message_stop`.
3. Thoughts are told as they come, or, where the request hides them, as a block without text whose signature
   holds them (`shared.apis.message_chat.sealed`): they are kept until it ends, and dropped where they are
   longer than there is room for. Where the request wants no thinking, none is told.
4. The input of a call is JSON as the model wrote it. In a whole answer it is an object: where the answer was
   cut off within it, or it is none, an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from engine.api.answer.encoder import Answered, Heading, Template, Vocabulary, encode, on_one_line
from engine.api.answer.outputs import Delta
from engine.api.answer.parts import Part, PartKind
from shared.apis.generation import FinishReasonName, Usage
from shared.apis.message_answers import (
    STOP,
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    BlockDelta,
    BlockStart,
    BlockStop,
    DirectCaller,
    InputDelta,
    MessageAnswer,
    MessageChange,
    MessageDelta,
    MessageEvent,
    MessageStart,
    SignatureDelta,
    StopReason,
    TextDelta,
    ThinkingDelta,
    delta_usage,
    message_usage,
)
from shared.apis.message_chat import SIGNATURE, sealed
from shared.wire.sse import named_event
from shared.wire.undecodable import UNDECODABLE

THOUGHTS_LEN_MAX: Final = 256 * 1024
"""The most characters of hidden thoughts that are kept: `REASONING_KEPT_TOKENS` of sixteen."""
_EMPTY: Final = Raw(b"{}")
_decode_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class MessagesEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        self._heading = heading
        self._answered = answered
        self._kind: PartKind | None = None
        """The kind of the block that is open; ARGUMENTS for a call. None without one."""
        self._index = -1
        """The index of the latest block."""
        self._template: Template | None = None
        """The template of the open block's deltas."""
        self._thoughts: list[str] = []
        """The hidden thoughts of the open block, as far as there is room."""
        self._thoughts_len = 0
        self._calls = 0
        self._finish_reason: FinishReasonName | None = None

    def opening(self, usage: Usage) -> bytes:
        return _event(MessageStart(self._answer([], usage, is_begun=False)))

    def events(self, delta: Delta) -> Iterator[bytes]:
        for part in delta.parts:
            if part.kind is PartKind.REASONING and not self._heading.sends_reasoning:
                yield from self._hidden(part.text)
                continue
            if part.kind is not self._kind:
                yield from self._begin(part)
            if part.kind is not PartKind.CALL:
                assert self._template is not None
                yield self._template.fill(part.text)
        self._finish_reason = delta.finish_reason

    def ending(self, usage: Usage) -> bytes:
        events = [*self._end()]
        if self._index < 0:
            events += self._begin(Part(""))
            events += self._end()
        change = MessageChange(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
        return b"".join([*events, _event(MessageDelta(change, delta_usage(usage))), STOP])

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        [delta] = deltas
        self._finish_reason = delta.finish_reason
        yield encode(self._answer([*self._blocks(delta.parts)] or [AnswerText("")], usage))

    # -- a stream's blocks ----------------------------------------------------------------------------

    def _begin(self, part: Part) -> Iterator[bytes]:
        """End the open block, and begin the one of a part."""
        yield from self._end()
        self._index += 1
        index = self._index
        change: type[TextDelta | ThinkingDelta | InputDelta]
        match part.kind:
            case PartKind.TEXT:
                block: AnswerBlock = AnswerText("")
                change = TextDelta
            case PartKind.REASONING:
                block, change = AnswerThinking("", ""), ThinkingDelta
            case _:
                block, change = _call(part, _EMPTY), InputDelta
                self._calls += 1
        self._kind = PartKind.ARGUMENTS if part.kind is PartKind.CALL else part.kind
        self._template = Template(lambda marker: BlockDelta(index, change(marker)), _event)
        yield _event(BlockStart(index, block))

    def _end(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._kind is None:
            return
        if self._kind is PartKind.REASONING:
            yield _event(BlockDelta(self._index, SignatureDelta(self._signature())))
        yield _event(BlockStop(self._index))
        self._kind = None

    def _hidden(self, text: str) -> Iterator[bytes]:
        """Keep thoughts that are not told, in a block that tells that there are some."""
        if not self._heading.hides_reasoning:
            return
        if self._kind is not PartKind.REASONING:
            yield from self._begin(Part("", PartKind.REASONING))
        self._thoughts_len += len(text)
        if self._thoughts_len <= THOUGHTS_LEN_MAX:
            self._thoughts.append(text)
        else:
            self._thoughts.clear()

    def _signature(self) -> str:
        thoughts, self._thoughts, self._thoughts_len = self._thoughts, [], 0
        return sealed("".join(thoughts))

    # -- a whole answer's -----------------------------------------------------------------------------

    def _blocks(self, parts: Sequence[Part]) -> Iterator[AnswerBlock]:
        if not (self._heading.sends_reasoning or self._heading.hides_reasoning):
            parts = [part for part in parts if part.kind is not PartKind.REASONING]
        at = 0
        while at < len(parts):
            part, at = parts[at], at + 1
            texts = [] if part.kind is PartKind.CALL else [part.text]
            inner = PartKind.ARGUMENTS if part.kind is PartKind.CALL else part.kind
            while at < len(parts) and parts[at].kind is inner:
                texts.append(parts[at].text)
                at += 1
            text = "".join(texts)
            match part.kind:
                case PartKind.TEXT:
                    yield AnswerText(text)
                case PartKind.REASONING if self._heading.sends_reasoning:
                    yield AnswerThinking(text, SIGNATURE)
                case PartKind.REASONING:
                    yield AnswerThinking("", sealed(text if len(text) <= THOUGHTS_LEN_MAX else ""))
                case PartKind.CALL:
                    self._calls += 1
                    yield _call(part, _object(text))

    # -- both -----------------------------------------------------------------------------------------

    def _answer(self, content: list[AnswerBlock], usage: Usage, *, is_begun: bool = True) -> MessageAnswer:
        told = message_usage(usage)
        if not is_begun:
            told.output_tokens = 0
        return MessageAnswer(
            id=self._heading.id,
            model=self._heading.model,
            content=content,
            stop_reason=self._stop_reason() if is_begun else None,
            stop_sequence=self._stop_sequence() if is_begun else None,
            usage=told,
        )

    def _stop_reason(self) -> StopReason:
        if self._finish_reason == "length":
            return "model_context_window_exceeded" if self._answered.is_cut_by_context else "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        stopped_by = self._answered.scored[0].stopped_by
        if isinstance(stopped_by, int):
            return self._answered.stop_tokens.get(stopped_by)
        return stopped_by


def _event(value: MessageEvent | Struct) -> bytes:
    tag = value.__struct_config__.tag
    assert isinstance(tag, str)
    data = encode(value)
    return named_event(tag.encode(), data if data.isascii() else on_one_line(data))


def _call(part: Part, arguments: Raw) -> AnswerToolUse:
    return AnswerToolUse(id=part.call_id, name=part.text, input=arguments, caller=DirectCaller())


def _object(arguments: str) -> Raw:
    data = arguments.encode()
    try:
        _decode_object(data)
    except UNDECODABLE:
        return _EMPTY
    return Raw(data)

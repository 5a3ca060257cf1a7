"""Responses: the items of an answer, whole and as they come.

    created, in_progress                                  when the core has admitted the request
    output_item.added
        content_part.added    output_text.delta ...       output_text.done         content_part.done
        content_part.added    reasoning_text.delta ...    reasoning_text.done      content_part.done
        summary_part.added    summary_text.delta ...      summary_text.done        summary_part.done
        function_call_arguments.delta ...                 function_call_arguments.done
        custom_tool_call_input.delta ...                  custom_tool_call_input.done
    output_item.done
    completed | incomplete, [DONE]                        or error, failed

Rules

1. An item is a run of parts of one kind, or one call. One begins where another has ended, so no two are open.
   An answer without any part is a message without text.
2. Reasoning is told as its summary where one was asked for, since clients that ask for one show nothing else,
   and else as the text that it is; never as both.
3. The last events repeat what came before, so a stream holds its whole answer, and
   `GenerationRequest.keeps_answer` says so where memory is reserved.
4. Ids are made of the response's own and of the item's number, so that all events of an item, and the
   response at the end, have the same.
5. A stream that fails tells the error twice. SDKs raise what an `error` event has, and Codex knows
   `response.failed` alone. Both are OpenAI's order.
6. Tokens belong to the part that their text is in, by their positions. Those of marks have none, and are told
   of no part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, cast

import msgspec
from msgspec import UNSET, Raw

from engine.api.answer.chat import token_logprob
from engine.api.answer.custom_input import CustomInput
from engine.api.answer.encoder import (
    Answered,
    AnswerEncoder,
    Heading,
    NumberedTemplate,
    Vocabulary,
    characters,
    cut,
    encode,
    encoded,
    filled,
    items,
    known,
    told,
)
from engine.api.answer.outputs import TEXT_PIECES_MAX, Delta, Entry
from engine.api.answer.parts import Part, PartKind
from shared.apis.chat import TokenLogprob
from shared.apis.generation import FinishReasonName, Usage
from shared.apis.responses.answer import (
    IncompleteDetails,
    ItemStatus,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponseUsage,
    SummaryText,
    outline,
)
from shared.apis.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseIncomplete,
    ResponseInProgress,
    StreamEvent,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    failing_events,
    name_of,
)
from shared.apis.responses.items import REASONING_MARK
from shared.apis.responses.repeated import RepeatedRequest
from shared.apis.responses.tools import Called, CalledAs
from shared.wire import sse
from shared.wire.errors import ApiError


class ResponsesEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        repeated = answered.repeated
        assert isinstance(repeated, RepeatedRequest)
        self._heading, self._vocabulary, self._wall = heading, vocabulary, answered.wall
        self._repeated: Final = repeated
        self._response = _begun(heading, answered, repeated.response)
        self._sequence = 0
        """The number of events so far."""
        self._items: list[OutputItem] = []
        """The items that are done."""
        self._open: _Item | None = None
        self._finish: FinishReasonName | None = None
        self._position = 0
        """The characters of all parts so far."""
        self._late: list[Entry] = []
        """Tokens whose text is still to come."""

    # -- streams ----------------------------------------------------------------------------------

    def opening(self, usage: Usage) -> bytes:
        events = ResponseCreated(response=self._response), ResponseInProgress(response=self._response)
        return b"".join(map(self._event, events))

    def events(self, delta: Delta) -> Iterator[bytes]:
        if self._heading.logprobs is not None:
            yield from self._detailed(delta)
        else:
            for part in delta.parts:
                item = self._open
                if item is None or item.kind is not part.kind or item.call != part.call:
                    item, begun = self._turn_to(part)
                    yield from map(self._event, begun)
                    if part.kind is PartKind.CALL:
                        continue
                if text := item.take(part.text):
                    number = self._sequence
                    self._sequence = number + 1
                    yield item.template.fill(text, number)
        if delta.finish_reason is not None:
            yield from map(self._event, self._end(delta.finish_reason))

    def _detailed(self, delta: Delta) -> Iterator[bytes]:
        """The events of the parts of a delta whose tokens are told."""
        for part, entries in self._assigned(delta):
            item = self._open
            if item is None or item.kind is not part.kind or item.call != part.call:
                item, begun = self._turn_to(part)
                yield from map(self._event, begun)
            if part.kind is not PartKind.CALL and (text := item.take(part.text)):
                logprobs = encode([self._logprob(entry) for entry in entries])
                if entries:
                    item.logprobs.append(logprobs[1:-1])
                yield self._event(item.delta(text, logprobs))

    def ending(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return self._event(kind(response=response)) + sse.DONE

    def failing(self, error: ApiError, request_id: str) -> bytes:
        """The events that end the stream where it fails. They repeat nothing, as nothing more is held."""
        heading = self._heading
        failed = msgspec.structs.replace(
            outline(), id=heading.id, created_at=heading.created, model=heading.model
        )
        return b"".join(map(self._event, failing_events(error, failed, request_id)))

    def _event(self, event: StreamEvent) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return sse.named_event(name_of(event), encoded(event))

    # -- whole answers ----------------------------------------------------------------------------

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        [delta] = deltas
        entries_of: dict[int, list[Entry]] = {}
        for part, entries in self._assigned(delta):
            item = self._open
            if item is None or item.kind is not part.kind or item.call != part.call:
                item, _ = self._turn_to(part)
            if part.kind is not PartKind.CALL:
                item.take(part.text)
                entries_of.setdefault(item.index, []).extend(entries)
        self._end(known(delta.finish_reason))
        response = self._ended(usage)
        made, response.output = response.output, []
        pieces = (self._pieces(one, entries_of.get(index, [])) for index, one in enumerate(made))
        return filled(response, b'"output":[', pieces)

    def _pieces(self, item: OutputItem, entries: list[Entry]) -> Iterator[bytes]:
        """An item in pieces."""
        if not isinstance(item, OutputMessage):
            yield encode(item)
            return
        [content] = item.content
        text, content.text = content.text, ""
        head, rest = cut(encode(item), b'"text":"')
        middle, tail = cut(rest, b'"logprobs":[')
        yield head
        yield from characters(text)
        yield middle
        yield from items(entries, self._logprob, self._heading.piece_len)
        yield tail

    # -- items ------------------------------------------------------------------------------------

    def _turn_to(self, part: Part) -> tuple[_Item, list[StreamEvent]]:
        """End the item that is open, and begin the one that a part belongs to. Returns that, and the events
        of both."""
        events = self._close("completed")
        self._open = item = self._item_of(part)
        added = ItemAdded(output_index=item.index, item=item.told("in_progress"))
        return item, [*events, added, *item.beginning()]

    def _end(self, reason: FinishReasonName) -> list[StreamEvent]:
        """End the last item, which the answer has even where the model said nothing."""
        self._finish = reason
        begun: list[StreamEvent] = []
        if self._open is None and not self._items:
            _, begun = self._turn_to(Part(""))
        return begun + self._close("incomplete" if reason == "length" else "completed")

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        if (item := self._open) is None:
            return []
        self._open = None
        events = item.ending()
        done = item.told(status)
        self._items.append(done)
        return [*events, ItemDone(output_index=item.index, item=done)]

    def _item_of(self, part: Part) -> _Item:
        index, repeated = len(self._items), self._repeated

        def id_(prefix: str) -> str:
            return f"{prefix}_{self._heading.id.partition('_')[2]}{index:02x}"

        match part.kind:
            case PartKind.TEXT:
                return _Message(id_("msg"), index)
            case PartKind.REASONING:
                kind = _Summary if repeated.tells_summary else _Thought
                return kind(id_("rs"), index, repeated.tells_encrypted)
            case PartKind.CALL | PartKind.ARGUMENTS:
                called = repeated.called.get(part.text) or Called(CalledAs.FUNCTION, part.text)
                if called.item is CalledAs.CUSTOM:
                    return _CustomCall(id_("ctc"), index, part, called)
                return _FunctionCall(id_("fc"), index, part, called)

    def _ended(self, usage: Usage) -> ResponseObject:
        is_cut = self._finish == "length"
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(self._wall()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=ResponseUsage.of(usage),
        )

    # -- tokens -----------------------------------------------------------------------------------

    def _assigned(self, delta: Delta) -> Iterator[tuple[Part, list[Entry]]]:
        """The parts of a delta, with the tokens of those that are text (rule 6)."""
        entries, at = [*self._late, *told(delta.entries)], 0
        for part in delta.parts:
            self._position += len(part.text)
            own: list[Entry] = []
            while at < len(entries) and (entry := entries[at]).start < self._position:
                at += 1
                has_text = at == len(entries) or entries[at].start > entry.start
                if part.kind is PartKind.TEXT and (has_text or self._is_partial(entry)):
                    own.append(entry)
            yield part, own
        self._late = entries[at:]

    def _is_partial(self, entry: Entry) -> bool:
        """True for a token that is no more than part of a character, and so has no text of its own either."""
        try:
            self._vocabulary.token_bytes(entry.token_id).decode()
        except UnicodeDecodeError:
            return True
        return False

    def _logprob(self, entry: Entry) -> TokenLogprob:
        return token_logprob(self._vocabulary, entry)


def failing_of(encoder: AnswerEncoder) -> Callable[[ApiError, str], bytes]:
    """The function that makes the last events of a failed stream: its encoder alone knows their numbers."""
    assert isinstance(encoder, ResponsesEncoder)
    return encoder.failing


def _begun(heading: Heading, answered: Answered, response: ResponseObject) -> ResponseObject:
    """A response that has begun, with what is not the request's own."""
    sampling = answered.sampling
    assert sampling is not None
    return msgspec.structs.replace(
        response,
        id=heading.id,
        created_at=heading.created,
        model=heading.model,
        service_tier=answered.service_class.name.lower(),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


# -- the kinds of items ---------------------------------------------------------------------------


class _Item(ABC):
    """An item that the model writes."""

    kind: ClassVar[PartKind]
    """The kind of the parts that go on with it."""
    delta_kind: ClassVar[type[StreamEvent]]
    """The event of a piece of its text."""

    def __init__(self, id_: str, index: int, call: int = -1) -> None:
        """`call` is the number of the call that it is; -1 for any other item."""
        self.id, self.index, self.call = id_, index, call
        self.logprobs: list[bytes] = []
        """The log-probabilities of its tokens, as items of a list."""
        self._texts: list[str] = []
        """Its text, in pieces."""
        self.template = NumberedTemplate(self._numbered)

    def take(self, text: str) -> str:
        """Keep a piece of its text. Returns what is told of it."""
        texts = self._texts
        texts.append(text)
        if len(texts) >= TEXT_PIECES_MAX:
            self._texts = ["".join(texts)]
        return text

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def _event(self, kind: Callable[..., StreamEvent], **fields: Any) -> StreamEvent:
        """An event of this item."""
        return kind(item_id=self.id, output_index=self.index, **fields)

    def _numbered(self, text: str, number: int) -> bytes:
        event = self.delta(text)
        event.sequence_number = number
        return sse.named_event(name_of(event), encoded(event))

    @abstractmethod
    def told(self, status: ItemStatus) -> OutputItem:
        """The item as it is told: without its text as long as it is in progress."""

    def delta(self, text: str, logprobs: bytes = b"[]") -> StreamEvent:
        """The event of a piece of its text."""
        return self._event(self.delta_kind, delta=text)

    def beginning(self) -> list[StreamEvent]:
        """The events between the item and its text."""
        return []

    @abstractmethod
    def ending(self) -> list[StreamEvent]:
        """The events between its text and the item that is done."""


class _Message(_Item):
    kind = PartKind.TEXT

    def told(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self._content()]
        return OutputMessage(id=self.id, status=status, content=content)

    def _content(self) -> OutputText:
        return OutputText(self.text, logprobs=_array(self.logprobs))

    def delta(self, text: str, logprobs: bytes = b"[]") -> StreamEvent:
        return self._event(OutputTextDelta, delta=text, logprobs=Raw(logprobs))

    def beginning(self) -> list[StreamEvent]:
        return [self._event(PartAdded, part=OutputText(""))]

    def ending(self) -> list[StreamEvent]:
        content = self._content()
        done = self._event(OutputTextDone, text=content.text, logprobs=content.logprobs)
        return [done, self._event(PartDone, part=content)]


class _Thought(_Item):
    """Reasoning that is told as it is."""

    kind = PartKind.REASONING
    delta_kind: ClassVar[type[StreamEvent]] = ReasoningDelta
    part_kinds: ClassVar[tuple[Callable[..., Any], ...]] = ReasoningText, PartAdded, ReasoningDone, PartDone
    """Its text, and the events of its part and of the end of both."""

    def __init__(self, id_: str, index: int, tells_encrypted: bool) -> None:
        super().__init__(id_, index)
        self._tells_encrypted = tells_encrypted

    def told(self, status: ItemStatus) -> OutputReasoning:
        item = OutputReasoning(id=self.id, status=status, summary=[], content=[])
        if status != "in_progress":
            text = self.text
            self._put(item, text)
            item.encrypted_content = REASONING_MARK + text if self._tells_encrypted else UNSET
        return item

    def _put(self, item: OutputReasoning, text: str) -> None:
        item.content = [ReasoningText(text)]

    def beginning(self) -> list[StreamEvent]:
        text, added, *_ = self.part_kinds
        return [self._event(added, part=text(""))]

    def ending(self) -> list[StreamEvent]:
        text, _, text_done, part_done = self.part_kinds
        told_ = self.text
        return [self._event(text_done, text=told_), self._event(part_done, part=text(told_))]


class _Summary(_Thought):
    """Reasoning that is told as its summary."""

    delta_kind = SummaryDelta
    part_kinds = SummaryText, SummaryPartAdded, SummaryDone, SummaryPartDone

    def _put(self, item: OutputReasoning, text: str) -> None:
        item.summary = [SummaryText(text)]


class _FunctionCall(_Item):
    kind = PartKind.ARGUMENTS
    delta_kind: ClassVar[type[StreamEvent]] = ArgumentsDelta

    def __init__(self, id_: str, index: int, part: Part, called: Called) -> None:
        super().__init__(id_, index, part.call)
        self._call_id, self._called = part.call_id, called

    def told(self, status: ItemStatus) -> OutputItem:
        return self._called_as(OutputFunctionCall, status, arguments=self.text)

    def _called_as(self, kind: Callable[..., OutputItem], status: ItemStatus, **fields: Any) -> OutputItem:
        name, namespace = self._called.name, self._called.namespace or UNSET
        return kind(
            id=self.id, status=status, call_id=self._call_id, name=name, namespace=namespace, **fields
        )

    def ending(self) -> list[StreamEvent]:
        return [self._event(ArgumentsDone, name=self._called.name, arguments=self.text)]


class _CustomCall(_FunctionCall):
    """A call of a custom tool, whose arguments have its input."""

    delta_kind = CustomInputDelta

    def __init__(self, id_: str, index: int, part: Part, called: Called) -> None:
        super().__init__(id_, index, part, called)
        self._input = CustomInput()

    def take(self, text: str) -> str:
        told_ = self._input.feed(text)
        return super().take(told_) if told_ else ""

    def told(self, status: ItemStatus) -> OutputItem:
        return self._called_as(OutputCustomCall, status, input=self.text)

    def ending(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if rest := self._input.finish():
            events.append(self.delta(super().take(rest)))
        return [*events, self._event(CustomInputDone, input=self.text)]


def _array(pieces: Sequence[bytes]) -> list[TokenLogprob]:
    """A list of log-probabilities, of its items as JSON."""
    return cast("list[TokenLogprob]", Raw(b"[%b]" % b",".join(pieces)))

"""Chat's answers: a message for each choice, and deltas of it in a stream.

Streams are what OpenAI's SDKs put together, which join what comes under one name:

1. A choice begins with its role, behind the choices of lower indices.
2. A call begins with its id, its type, its function's name and empty arguments, each sent once. Pieces of its
   arguments follow, and the next call begins behind all of them.
3. Reasoning is sent under both of its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec import UNSET, UnsetType

from engine.api.answer.encoder import (
    LOGPROB_MIN,
    Answered,
    ChoicesEncoder,
    Heading,
    Template,
    Vocabulary,
    cut,
    encode,
    encoded_event,
    items,
    known,
    told,
)
from engine.api.answer.outputs import Delta, Entry
from engine.api.answer.parts import Part, PartKind
from shared.apis.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)
from shared.apis.chat_messages import FunctionCall, FunctionToolCall
from shared.apis.generation import Usage


class ChatEncoder(ChoicesEncoder[ChatChunkChoice]):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        super().__init__(heading, vocabulary)
        prompts = answered.prompts
        self._prompt_ids = prompts[0] if heading.sends_token_ids and prompts else UNSET
        self._begun = 0
        """The number of choices whose role was sent."""
        self._others: dict[tuple[int, PartKind], tuple[int, Template]] = {}
        """For each choice, the templates of its reasoning and of a call's arguments, with the call's number:
        that of the latest call."""

    def events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            while self._begun <= delta.index:
                yield self._beginning(delta)
                self._begun += 1
        if delta.entries:
            yield from map(self._event, self._detailed(delta))
        else:
            for part in delta.parts:
                if part.kind is PartKind.TEXT:
                    yield self._text_event(delta.index, part.text)
                elif self._shows(part):
                    yield self._other_event(delta.index, part)
        if delta.finish_reason is not None:
            yield self._event(ChatChunkChoice(delta.index, ChatDelta(), delta.finish_reason))

    def _beginning(self, delta: Delta) -> bytes:
        """The event with the role of the next choice. Its content is null where something else comes before
        it, of the choice that `delta` is of."""
        parts = delta.parts if self._begun == delta.index else ()
        content = None if parts and parts[0].kind is not PartKind.TEXT else ""
        first = ChatChunkChoice(self._begun, ChatDelta(role="assistant", content=content))
        return encoded_event(self._chunk([first], self._heading.usage, self._prompt_ids))

    def _shows(self, part: Part) -> bool:
        return part.kind is not PartKind.REASONING or self._heading.sends_reasoning

    def _other_event(self, index: int, part: Part) -> bytes:
        """The event of a part that is no text."""
        if part.kind is PartKind.CALL:
            return self._event(ChatChunkChoice(index, _delta(part)))
        call, template = self._others.get((index, part.kind), (None, None))
        if template is None or call != part.call:
            usage = self._heading.usage
            template = Template(
                lambda marker: self._chunk(
                    [ChatChunkChoice(index, _delta(part._replace(text=marker)))], usage
                )
            )
            self._others[index, part.kind] = part.call, template
        return template.fill(part.text)

    def _empty(self, usage: Usage) -> ChatCompletion:
        return self._headed(ChatCompletion, choices=[], usage=usage, prompt_token_ids=self._prompt_ids)

    def _choice(self, delta: Delta) -> Iterator[bytes]:
        has_logprobs = self._heading.logprobs is not None
        data = encode(
            ChatChoice(
                delta.index,
                self._message(delta),
                known(delta.finish_reason),
                ChatLogprobs([]) if has_logprobs else None,
                self._token_ids(delta.entries),
            )
        )
        if not has_logprobs:
            yield data
            return
        head, tail = cut(data, b'"logprobs":{"content":[')
        yield head
        yield from items(
            told(delta.entries), partial(token_logprob, self._vocabulary), self._heading.piece_len
        )
        yield tail

    def _message(self, delta: Delta) -> AssistantMessage:
        text, reasoning, calls = delta.text, "", list[FunctionToolCall]()
        for part in delta.parts:
            match part.kind:
                case PartKind.REASONING if self._heading.sends_reasoning:
                    reasoning += part.text
                case PartKind.CALL:
                    calls.append(FunctionToolCall(part.call_id, FunctionCall(part.text, "")))
                case PartKind.ARGUMENTS:
                    calls[-1].function.arguments += part.text
        return AssistantMessage(
            None if calls and not text else text,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _detailed(self, delta: Delta) -> Iterator[ChatChunkChoice]:
        """The choices of the chunks of a delta whose tokens are told: with the last of its parts."""
        logprobs = None
        if self._heading.logprobs is not None:
            logprobs = ChatLogprobs([token_logprob(self._vocabulary, row) for row in told(delta.entries)])
        *before, last = [_delta(part) for part in delta.parts if self._shows(part)] or [ChatDelta(content="")]
        for one in before:
            yield ChatChunkChoice(delta.index, one)
        yield ChatChunkChoice(delta.index, last, None, logprobs, self._token_ids(delta.entries))

    def _with_text(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return self._headed(ChatChunk, choices=choices, usage=usage, prompt_token_ids=prompt_ids)


def token_logprob(vocabulary: Vocabulary, entry: Entry) -> TokenLogprob:
    """A token that has log-probabilities, as OpenAI tells them."""
    data, logprobs = vocabulary.token_bytes(entry.token_id), entry.logprobs
    assert logprobs is not None
    top = [
        TopLogprob(*_shown(vocabulary.token_bytes(top_id), value))
        for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    ]
    return TokenLogprob(*_shown(data, logprobs.logprob), top_logprobs=top)


def _delta(part: Part) -> ChatDelta:
    match part.kind:
        case PartKind.TEXT:
            return ChatDelta(content=part.text)
        case PartKind.REASONING:
            return ChatDelta(reasoning_content=part.text, reasoning=part.text)
        case PartKind.CALL:
            call = ToolCallDelta(part.call, part.call_id, "function", FunctionDelta(part.text, ""))
        case PartKind.ARGUMENTS:
            call = ToolCallDelta(part.call, function=FunctionDelta(arguments=part.text))
    return ChatDelta(tool_calls=[call])


def _shown(data: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """The text, log-probability and bytes of one token."""
    return data.decode("utf-8", "replace"), max(logprob, LOGPROB_MIN), list(data)

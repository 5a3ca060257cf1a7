"""Chat's answers: a message for each choice, and deltas of it in a stream."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from engine.api.answer.encoder import (
    LOGPROB_MIN,
    Answered,
    ChoicesEncoder,
    Heading,
    Vocabulary,
    cut,
    encode,
    encoded_event,
    items,
    known,
    told,
)
from engine.api.answer.outputs import Delta, Entry
from shared.apis.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
)
from shared.apis.generation import Usage


class ChatEncoder(ChoicesEncoder[ChatChunkChoice]):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        super().__init__(heading, vocabulary)
        prompts = answered.prompts
        self._prompt_ids = prompts[0] if heading.sends_token_ids and prompts else UNSET

    def events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            first = ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))
            yield encoded_event(self._chunk([first], self._heading.usage, self._prompt_ids))
        if delta.entries:
            yield self._event(self._detailed(delta))
        elif delta.parts:
            yield self._text_event(delta.index, delta.text)
        if delta.finish_reason is not None:
            yield self._event(ChatChunkChoice(delta.index, ChatDelta(), delta.finish_reason))

    def _empty(self, usage: Usage) -> ChatCompletion:
        heading = self._heading
        return ChatCompletion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=[],
            usage=usage,
            system_fingerprint=heading.system_fingerprint,
            prompt_token_ids=self._prompt_ids,
        )

    def _choice(self, delta: Delta) -> Iterator[bytes]:
        has_logprobs = self._heading.logprobs is not None
        data = encode(
            ChatChoice(
                delta.index,
                AssistantMessage(delta.text),
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
        yield from items(told(delta.entries), self._logprob, self._heading.piece_len)
        yield tail

    def _detailed(self, delta: Delta) -> ChatChunkChoice:
        logprobs = None
        if self._heading.logprobs is not None:
            logprobs = ChatLogprobs([self._logprob(row) for row in told(delta.entries)])
        content = ChatDelta(content=delta.text)
        return ChatChunkChoice(delta.index, content, None, logprobs, self._token_ids(delta.entries))

    def _with_text(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
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

    def _logprob(self, entry: Entry) -> TokenLogprob:
        data, logprobs = self._vocabulary.token_bytes(entry.token_id), entry.logprobs
        assert logprobs is not None
        top = [
            TopLogprob(*_shown(self._vocabulary.token_bytes(top_id), value))
            for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        return TokenLogprob(*_shown(data, logprobs.logprob), top_logprobs=top)


def _shown(data: bytes, logprob: float) -> tuple[str, float, list[int]]:
    """The text, log-probability and bytes of one token."""
    return data.decode("utf-8", "replace"), max(logprob, LOGPROB_MIN), list(data)

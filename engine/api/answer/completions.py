"""Completions' answers: a text for each choice, behind its prompt where that is repeated. A stream's chunks
have the shape of the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.answer.encoder import (
    LOGPROB_MIN,
    PIECE_IDS,
    PIECE_TEXT_LEN,
    Answered,
    ChoicesEncoder,
    Heading,
    Vocabulary,
    characters,
    cut,
    encode,
    items,
    known,
    told,
)
from engine.api.answer.outputs import Delta, Entry
from engine.api.answer.rows import Echo, LogprobRow, Rows
from shared.apis.completions import Completion, CompletionChoice, CompletionLogprobs
from shared.apis.generation import FinishReasonName, Usage


class CompletionEncoder(ChoicesEncoder[CompletionChoice]):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        super().__init__(heading, vocabulary)
        self._scored, self._prompts, self._echoes = answered.scored, answered.prompts, answered.echoes

    def events(self, delta: Delta) -> Iterator[bytes]:
        is_plain = not delta.entries and not (delta.is_first and self._has_preface(delta.index))
        if is_plain:
            if delta.parts:
                yield self._text_event(delta.index, delta.text)
        else:
            yield from map(self._event, self._parts(delta))
        if delta.finish_reason is not None:
            yield self._event(CompletionChoice(delta.index, "", delta.finish_reason))

    def _choice(self, delta: Delta) -> Iterator[bytes]:
        echo = self._echo(delta)
        text = delta.text if echo is None else echo.text + delta.text
        reason = known(delta.finish_reason)
        has_logprobs = self._heading.logprobs is not None
        columns = CompletionLogprobs([], [], [], []) if has_logprobs else None
        part = self._part(delta.index, "", columns, delta.entries, is_first=delta.is_first, reason=reason)
        parts = [(b'"text":"', characters(text))]
        if has_logprobs:
            rows, piece_len = self._rows(delta, echo), self._heading.piece_len
            made: tuple[tuple[bytes, Callable[[LogprobRow], object]], ...] = (
                (b'"logprobs":{"text_offset":[', lambda row: row.start),
                (b'],"token_logprobs":[', _value),
                (b'],"tokens":[', lambda row: self._name(row.token_id)),
                (b'],"top_logprobs":[', self._top),
            )
            parts += [(name, items(rows, make, piece_len)) for name, make in made]
        if prompt_ids := part.prompt_token_ids:
            part = msgspec.structs.replace(part, prompt_token_ids=[])
            parts.append((b'"prompt_token_ids":[', items(prompt_ids, int, PIECE_IDS)))
        data = encode(part)
        for name, pieces in parts:
            head, data = cut(data, name)
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
            self._token_ids(entries),
            self._prompts[index] if sends_ids and is_first else UNSET,
        )

    def _has_preface(self, index: int) -> bool:
        """True if the first chunk of a choice holds more than text."""
        return self._heading.sends_token_ids or self._echoes[index] is not None

    def _echo(self, delta: Delta) -> Echo | None:
        return self._echoes[delta.index] if delta.is_first else None

    def _with_text(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text, None)

    def _empty(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return self._headed(Completion, choices=choices, usage=usage)

    def _rows(self, delta: Delta, echo: Echo | None) -> Rows:
        """The rows of a delta, with those of the prompt that it repeats."""
        own = self._echoes[delta.index]
        base = 0 if own is None else len(own.text)
        entries = [] if self._heading.logprobs is None else told(delta.entries)
        if echo is None or self._heading.logprobs is None:
            return Rows(None, [], entries, base)
        return Rows(echo, self._scored[delta.index].prompt_logprobs, entries, base)

    def _columns(self, rows: Sequence[LogprobRow]) -> CompletionLogprobs | None:
        if self._heading.logprobs is None:
            return None
        return CompletionLogprobs(
            text_offset=[row.start for row in rows],
            token_logprobs=[_value(row) for row in rows],
            tokens=[self._name(row.token_id) for row in rows],
            top_logprobs=[self._top(row) for row in rows],
        )

    def _top(self, row: LogprobRow) -> dict[str, float] | None:
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


def _value(row: LogprobRow) -> float | None:
    return None if row.logprobs is None else max(row.logprobs.logprob, LOGPROB_MIN)

"""Answers of engines that are not ours: vLLM, SGLang, anything that speaks OpenAI's API.

They have no closing comment. They are asked for usage (`stream_options.include_usage`), which is looked for
in the last events before `[DONE]`, or in all of a unary answer's body as it passes; a client that did not ask
for it does not see it. Their streams may end lines with CRLF, which is read as LF, so that the relay knows
one kind of boundary. Nothing of this is done per event: the last events are kept as they are, and looked into
when all have come.

What such an engine had cached may be another tenant's: where nothing keeps them apart, the figures that tell
it are blanked on their way, in their place. Those of Messages, which tell of a prompt the part that was not
cached, are added up. The gateway's own books have the true ones.

An event that is one line, alone in its chunk, is passed on as it came, with its framing: `takes` tells which
are. Most events are, and each then costs four slices and three searches for a byte.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from shared.wire.sse import DONE, Closing, TailScanner, UsedTokens
from shared.wire.undecodable import UNDECODABLE

TAIL_LEN: Final = 4096
"""The number of bytes at a stream's end in which its usage is looked for. An event with it takes a few
hundred."""
USAGE_LEN_MAX: Final = 4096
"""Bytes of a usage."""
NAME_LEN_MAX: Final = 64
"""Bytes of the name of the field with it, and of the space behind that."""
KEPT_MAX: Final = 16
"""The pieces in which they are kept: joining them for each event would cost more than all the rest."""
KEPT_LEN_MAX: Final = 1024
"""Bytes of such a piece."""

_BOUNDARY: Final = b"\n\n"
_DATA: Final = b"data:"
_CR: Final = b"\r"
_LF: Final = b"\n"
_END: Final = b"]"
_BEGIN: Final = ord("[")
_EMPTY: Final = b"[]"
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\]')
_NAME: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')
"""No text in a string matches: the quotes in it are escaped."""
_ANSWERS: Final = re.compile(
    rb'"(?:choices|tokens|prompt|content|output|input_tokens|data|results|answers)"\s*:'
)
"""The fields of which an answer of an endpoint's has one."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_FIGURES: Final = b'"prompt_'
"""A part of every event that tells a usage (`prompt_tokens`), or llama.cpp's times (`prompt_n`)."""
_FIGURES_NAMED: Final = b"cached_"
"""A part of every event that tells what was cached, where events have names."""
_CACHED: Final = re.compile(
    rb'"(?:\w{0,40}cache\w{0,40}|prompt_(?!tokens")\w{1,40})"\s{0,4}:\s{0,4}(-?[0-9][-+.0-9eE]{0,39})'
)
"""A figure that tells what was cached: OpenAI's `cached_tokens`, DeepSeek's `prompt_cache_hit_tokens`,
llama.cpp's `cache_n`, `prompt_n`, `prompt_ms`. No text in a string matches here, either."""
FIGURE_LEN_MAX: Final = 192
"""More than the bytes of such a figure and its name."""
_raw_decode: Final = json.JSONDecoder().raw_decode


class _PromptDetails(msgspec.Struct):
    cached_tokens: UsedTokens | None = None


class _Usage(msgspec.Struct):
    """A usage, by the names of OpenAI's older APIs, of its responses or of Anthropic's Messages."""

    prompt_tokens: UsedTokens | None = None
    completion_tokens: UsedTokens | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: UsedTokens | None = None
    """Messages do not count those here that were read from a cache, or written to one."""
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: UsedTokens | None = 0
    cache_creation_input_tokens: UsedTokens | None = 0
    output_tokens: UsedTokens | None = 0


_NO_FIELD: Final = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    choices: msgspec.Raw = _NO_FIELD
    tokens: msgspec.Raw = _NO_FIELD
    prompt: msgspec.Raw = _NO_FIELD
    content: msgspec.Raw = _NO_FIELD
    output: msgspec.Raw = _NO_FIELD
    input_tokens: msgspec.Raw = _NO_FIELD
    data: msgspec.Raw = _NO_FIELD
    results: msgspec.Raw = _NO_FIELD
    """Those of a ranking."""
    answers: msgspec.Raw = _NO_FIELD
    """Those of decisions."""

    @property
    def is_answer(self) -> bool:
        """True if it has one of the fields of which an endpoint's answer has one."""
        texts = self.tokens, self.prompt, self.content, self.output, self.input_tokens
        others = *texts, self.data, self.results, self.answers
        return self.choices != _NO_FIELD or any(one != _NO_FIELD for one in others)


class _Told(msgspec.Struct):
    usage: dict[str, msgspec.Raw] | None = None
    """Believed or not."""


_decode_body: Final = msgspec.json.Decoder(_Body).decode
_decode_told: Final = msgspec.json.Decoder(_Told).decode


def look_into(body: bytes) -> tuple[bool, Closing | None]:
    """Whether a unary body is an answer, and the usage in it. None without one, and for numbers that no
    request can have used."""
    try:
        found = _decode_body(body.removeprefix(_BYTE_ORDER_MARK))
    except UNDECODABLE:  # it has NaN, say, or tokens as 7.0
        return _ANSWERS.search(body) is not None, usage_in(body)
    return found.is_answer, None if found.usage is None else _closing(found.usage)


def usage_in(data: bytes) -> Closing | None:
    """The last usage in a part of an answer, whatever is around it. None without one."""
    for match in reversed(list(_USAGE.finditer(data))):
        if (closing := _usage_at(data, match.end())) is not None:
            return closing
    return None


def _usage_at(data: bytes, start: int) -> Closing | None:
    text = data[start : start + USAGE_LEN_MAX].decode(errors="replace")
    try:
        return _closing(msgspec.convert(_whole(_raw_decode(text)[0]), _Usage))
    except (ValueError, OverflowError, RecursionError):  # it is cut off, or no usage
        return None


def _whole(value: Any) -> Any:
    """The value with its numbers, which some servers write as `7.0`, as whole ones where they are."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _closing(usage: _Usage) -> Closing | None:
    """None for a usage that does not tell the prompt's tokens."""
    read = 0
    if usage.prompt_tokens is not None:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        details = usage.prompt_tokens_details
    elif usage.input_tokens is not None:
        read = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + read + (usage.cache_creation_input_tokens or 0)
        completion = usage.output_tokens
        details = usage.input_tokens_details
    else:
        return None
    return Closing(
        end_reason="",
        prompt_tokens=prompt,
        completion_tokens=completion or 0,
        cached_tokens=read + ((details and details.cached_tokens) or 0),
    )


class UsageFinder:
    """The last usage in a unary answer that is too long to be held, wherever it stands, and however the bytes
    come. It holds no more than a usage and its field's name may take."""

    __slots__ = ("_found", "_held")

    def __init__(self) -> None:
        self._found: Closing | None = None
        self._held = b""
        """The last bytes: the beginning of a usage, perhaps, or of its field's name."""

    def feed(self, chunk: bytes) -> None:
        data = self._held + chunk
        self._held = data[-NAME_LEN_MAX:]
        if data.find(_NAME) < 0:
            return
        for match in _USAGE.finditer(data):
            if len(data) - match.end() < USAGE_LEN_MAX:  # the rest of it may be still to come
                self._held = data[min(match.start(), max(0, len(data) - NAME_LEN_MAX)) :]
                return
            self._found = _usage_at(data, match.end()) or self._found

    @property
    def usage(self) -> Closing | None:
        """The usage, if the answer ends here."""
        return usage_in(self._held) or self._found


class ForeignScanner(TailScanner):
    """The scanner of the event stream of an engine of another make: lines end with LF in what it returns, and
    the last bytes are kept for the usage."""

    __slots__ = ("_cr", "_done", "_ended", "_ends", "_hides_usage", "_kept", "_noted")

    def __init__(self, done: bytes = DONE, *, hides_usage: bool = False, ends: tuple[str, ...] = ()) -> None:
        """`done` is the last event of a whole answer, if it has no event with one of the names `ends`.
        `hides_usage`: the gateway asked for usage and the client did not, so the event with it is not passed
        on."""
        super().__init__(done)
        self._ends = _beginnings(ends) if ends else None
        self._ended = False
        """True once such an event has begun."""
        self._hides_usage = hides_usage
        self._cr = b""
        """A CR at the end of what was read, which an LF may follow; else empty."""
        self._kept: list[bytes] = []
        self._done = _spaceless(_data_of(done))
        self._noted: Closing | None = None
        """The usage in what is not kept any more."""

    def feed(self, chunk: bytes) -> bytes:
        if self._cr or chunk.find(b"\r") >= 0:
            chunk = self._with_line_feeds(chunk)
        if not (data := TailScanner.feed(self, chunk)):
            return data
        if self._ends is not None and self._ends.search(data) is not None:
            self._ended = True
        kept = self._kept
        kept.append(data)
        if len(kept) > KEPT_MAX or len(data) > KEPT_LEN_MAX:
            joined = b"".join(kept)
            if len(data) > KEPT_LEN_MAX:
                self._noted = usage_in(joined) or self._noted
            self._kept = [joined[-TAIL_LEN:]]
        if self._hides_usage and data.find(_EMPTY) >= 0:
            return self._shown(data)
        return data

    def takes(self, event: bytes) -> bool:
        length = len(event)
        if (
            event.find(_CR) >= 0
            or self._cr
            or length > KEPT_LEN_MAX
            or (
                self._hides_usage
                and (event.find(_END) != length - 4 or event[-5:-3] == _EMPTY)  # mostly it ends the choices
                and _has_empty_array(event)
            )
            or not TailScanner.takes(self, event)
        ):
            return False
        kept = self._kept
        kept.append(event)
        if len(kept) > KEPT_MAX:
            self._kept = [b"".join(kept)[-TAIL_LEN:]]
        return True

    def finish(self) -> bytes:
        """See `TailScanner`. A last event whose empty line is lacking is given one: its server has closed the
        connection behind it."""
        held = self._held
        rest = TailScanner.finish(self)
        if not rest and held and _spaceless(_data_of(held)) == self._done:
            rest = held.rstrip(_LF) + _BOUNDARY
            self._kept.append(rest)
        return rest

    @property
    def saw_done(self) -> bool:
        """True if the last event with data was the one that ends a whole answer: servers write it in several
        ways, and comments or empty lines behind it."""
        if self._ended:
            return self.at_boundary
        events = reversed(b"".join(self._kept)[-TAIL_LEN:].split(_BOUNDARY))
        last = next((data for event in events if (data := _data_of(event)) is not None), None)
        return _spaceless(last) == self._done

    @property
    def usage(self) -> Closing | None:
        """The last usage. None until the answer is whole, and where it has none."""
        if not self.saw_done:
            return None
        return usage_in(b"".join(self._kept)[-TAIL_LEN:]) or self._noted

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        data = self._cr + chunk
        self._cr = b"\r" if data.endswith(b"\r") else b""
        return data.removesuffix(b"\r").replace(b"\r\n", b"\n")

    def _shown(self, data: bytes) -> bytes:
        """The events in `data`, without the one to hide."""
        if _NO_CHOICES.search(data) is None:
            return data
        events = data.split(_BOUNDARY)
        return _BOUNDARY.join(event for event in events if not _tells_usage_alone(event))


class Blanks:
    """What makes nothing of the figures of what was cached, in an answer that comes in pieces: each becomes a
    0 and blanks, as long as it was."""

    __slots__ = ("_back",)

    def __init__(self) -> None:
        self._back = b""
        """The end of what came, in which a figure may have begun."""

    @property
    def goes_on(self) -> bool:
        """True if something is held back."""
        return bool(self._back)

    def feed(self, data: bytes, *, ended: bool = False) -> bytes:
        """The bytes that may be passed on. `ended`: no figure goes on behind `data`."""
        if self._back:
            data = self._back + data
        cut = len(data) if ended else max(0, len(data) - FIGURE_LEN_MAX)
        parts: list[bytes] = []
        at = 0
        for match in _CACHED.finditer(data):
            start, end = match.span(1)
            if end > cut and not ended:
                cut = min(cut, match.start())
                break
            parts += data[at:start], b"0".ljust(end - start)
            at = end
        self._back = data[cut:]
        return b"".join([*parts, data[at:cut]])


class Folds:
    """What adds the figures of what was cached to those of the rest, in an answer of Messages that comes in
    pieces."""

    __slots__ = ("_back",)

    def __init__(self) -> None:
        self._back = b""
        """The end of what came, in which a usage may have begun."""

    def feed(self, data: bytes, *, ended: bool = False) -> bytes:
        """The bytes that may be passed on. `ended`: no usage goes on behind `data`."""
        data = self._back + data
        cut = len(data) if ended else max(0, len(data) - NAME_LEN_MAX)
        parts: list[bytes] = []
        at = 0
        for match in _USAGE.finditer(data):
            start = match.end()
            if not ended and len(data) - start < USAGE_LEN_MAX:
                cut = min(cut, match.start())
                break
            if (folded := _folded(data[start : start + USAGE_LEN_MAX])) is not None:
                told, length = folded
                parts += data[at:start], told
                at = start + length
        cut = max(cut, at)
        self._back = data[cut:]
        return b"".join([*parts, data[at:cut]])


def _folded(data: bytes) -> tuple[bytes, int] | None:
    """A usage that `data` begins with, without telling what was cached, and its length there. None where it
    tells nothing of it."""
    try:
        usage, length = _raw_decode(data.decode("latin-1"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(usage, dict) or not isinstance(total := usage.get("input_tokens"), int):
        return None
    for name, value in usage.items():
        if "cache" in name:
            total += value if isinstance(value, int) else 0
            usage[name] = 0 if isinstance(value, int) else None
    usage["input_tokens"] = total
    return msgspec.json.encode(usage), length


class FoldingScanner(ForeignScanner):
    """The scanner of a stream of Messages whose client is not to see what was cached."""

    __slots__ = ()

    def feed(self, chunk: bytes) -> bytes:
        data = ForeignScanner.feed(self, chunk)
        return Folds().feed(data, ended=True) if data.find(_NAME) >= 0 else data

    def finish(self) -> bytes:
        return Folds().feed(ForeignScanner.finish(self), ended=True)


class BlankingScanner(ForeignScanner):
    """The scanner of a stream whose client is not to see what was cached."""

    __slots__ = ("_blanks", "_figures")

    def __init__(self, done: bytes = DONE, *, hides_usage: bool = False, ends: tuple[str, ...] = ()) -> None:
        super().__init__(done, hides_usage=hides_usage, ends=ends)
        self._blanks = Blanks()
        self._figures = _FIGURES_NAMED if ends else _FIGURES

    def feed(self, chunk: bytes) -> bytes:
        data, blanks = ForeignScanner.feed(self, chunk), self._blanks
        is_whole = self.at_boundary  # else it is a part of an event that is too long to be withheld
        if is_whole and not blanks.goes_on and data.find(self._figures) < 0:
            return data
        return blanks.feed(data, ended=is_whole)

    def takes(self, event: bytes) -> bool:
        return event.find(self._figures) < 0 and ForeignScanner.takes(self, event)

    def finish(self) -> bytes:
        return self._blanks.feed(ForeignScanner.finish(self), ended=True)


def _beginnings(names: tuple[str, ...]) -> re.Pattern[bytes]:
    """The beginnings of events with these names, which the data may repeat as its type. No text in a string
    matches: it has neither the line's end nor the quotes."""
    of = "|".join(map(re.escape, names))
    return re.compile(rf'(?:\A|\n\n)(?:event: ?(?:{of})\n|data: ?\{{\s*"type"\s*:\s*"(?:{of})")'.encode())


def _has_empty_array(event: bytes) -> bool:
    """True if `[]` is in the event. To look for one byte takes a tenth of the time."""
    at = event.find(_END)
    while at > 0:
        if event[at - 1] == _BEGIN:
            return True
        at = event.find(_END, at + 1)
    return False


def _data_of(event: bytes) -> bytes | None:
    """The data of an event. None where it has none, as a comment."""
    lines = event.split(_LF)
    data = [line[len(_DATA) :].removeprefix(b" ") for line in lines if line.startswith(_DATA)]
    return b"\n".join(data) if data else None


def _spaceless(data: bytes | None) -> bytes | None:
    """The data of a last event, which servers write with blanks and without."""
    return None if data is None else data.replace(b" ", b"")


def _tells_usage_alone(event: bytes) -> bool:
    data = _data_of(event)
    if data is None or _NO_CHOICES.search(data) is None:
        return False
    try:
        return _decode_told(data).usage is not None
    except UNDECODABLE:
        return False

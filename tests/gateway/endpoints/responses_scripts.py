"""What engines answer to responses: one of ours, as the fake engine plays it, and others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.responses import events
from shared.apis.responses.answer import OutputMessage, OutputText, ResponseObject, ResponseUsage, outline
from shared.wire import sse
from tests.gateway.fake_engine import HEADERS, Script, Step, closing

ID: Final = "resp_1"
USAGE: Final = Usage(10, 3, 13, PromptTokensDetails(4))


def response(*texts: str, status: Any = "completed") -> ResponseObject:
    content = [OutputText("".join(texts))]
    message = OutputMessage(id="msg_1", status="completed", content=content)
    return msgspec.structs.replace(
        outline(),
        id=ID,
        created_at=1,
        model="tiny",
        status=status,
        output=[message] if texts else [],
        usage=ResponseUsage.of(USAGE) if texts else None,
    )


def told(*texts: str, whole: ResponseObject | None = None) -> list[bytes]:
    """The events of a whole stream. `whole`: the response that the last one has, if that is another."""
    return [_event(number, one) for number, one in enumerate(_events(texts, whole or response(*texts)))]


def opening() -> list[bytes]:
    """Those of them that tell nothing of the answer."""
    return told()[:2]


def _events(texts: Sequence[str], whole: ResponseObject) -> Iterator[events.StreamEvent]:
    done = whole.output[-1] if whole.output else OutputMessage(id="msg_1", status="completed", content=[])
    at: Any = {"item_id": done.id, "output_index": 0}
    begun = msgspec.structs.replace(whole, status="in_progress", output=[], usage=None)
    yield events.ResponseCreated(response=begun)
    yield events.ResponseInProgress(response=begun)
    message = OutputMessage(id=done.id, status="in_progress", content=[])
    yield events.ItemAdded(output_index=0, item=message)
    yield events.PartAdded(part=OutputText(""), **at)
    for text in texts:
        yield events.OutputTextDelta(delta=text, **at)
    yield events.OutputTextDone(text="".join(texts), **at)
    yield events.PartDone(part=OutputText("".join(texts)), **at)
    yield events.ItemDone(output_index=0, item=done)
    yield events.ResponseCompleted(response=whole)


def _event(number: int, event: events.StreamEvent) -> bytes:
    event.sequence_number = number
    return sse.named_event(events.name_of(event), msgspec.json.encode(event))


def streamed(*texts: str, before: Sequence[Step] = ()) -> Script:
    """A whole stream of ours. `before` comes behind its opening."""
    first, second, *rest = told(*texts)
    return Script([first + second, *before, *rest, sse.DONE, sse.closing_comment(closing())])


def unary(*texts: str) -> Script:
    headers = {sse.CLOSING_HEADER: sse.encode_closing(closing()).decode()}
    return Script([HEADERS, msgspec.json.encode(response(*texts))], 200, "application/json", headers)


# -- other makes ----------------------------------------------------------------------------------

THEIR_USAGE: Final = {
    "input_tokens": 21,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 25,
}


def theirs(text: str = "one two", *, type_first: bool = True, done: bytes = b"") -> list[bytes]:
    """The events of another make, as OpenAI has them, or with the type last, as vLLM does."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "role": "assistant", "content": content}]
    value = {"id": "resp_x", "output": output, "usage": THEIR_USAGE, "metadata": {}}

    def event(kind: str, **fields: Any) -> bytes:
        fields = {"type": kind, **fields} if type_first else {**fields, "type": kind}
        return sse.named_event(kind.encode(), msgspec.json.encode(fields))

    events_ = [
        event("response.created", response={**value, "output": [], "usage": None}),
        event("response.output_text.delta", delta=text),
        event("response.completed", response=value),
    ]
    return [*events_, *([done] if done else [])]

"""The answers about responses that are kept: their deletion, the items of their input, and their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Raw, Struct

from shared.apis.responses.items import InputItem, InputPart
from shared.apis.responses.request import ID_LEN_MAX, Input
from shared.apis.validation import invalid_value
from shared.wire import sse
from shared.wire.errors import InvalidRequest, NotFound
from shared.wire.shapes import Unshown

LIMIT: Final = 20
LIMIT_MAX: Final = 100
QUERY_FIELDS_MAX: Final = 32
_TEXT_OF: Final = {"assistant": "output_text"}
_ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class RetrieveQuery(Struct, frozen=True):
    """The query of a response that is retrieved."""

    stream: bool = False
    """True to have it as events."""
    starting_after: Annotated[int, Meta(ge=0, le=2**53)] = -1
    """Only events behind the one of this number."""
    include_obfuscation: bool | None = None
    """Accepted. Events are never padded."""


class ItemsQuery(Struct, frozen=True):
    """The query of a page of items."""

    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT
    """Items at most."""
    order: Literal["asc", "desc"] = "desc"
    """`desc`: the newest first."""
    after: Annotated[str, Meta(min_length=1, max_length=ID_LEN_MAX)] | None = None
    """Only items behind the one of this id."""


Query = TypeVar("Query", bound=Struct)


def query_of(text: str, type_: type[Query]) -> Query:
    """A query as it was sent. What it has beside is passed over. Raises InvalidRequest."""
    if text.count("&") >= QUERY_FIELDS_MAX:
        raise InvalidRequest(f"A query has at most {QUERY_FIELDS_MAX} parameters.")
    try:
        return msgspec.convert(dict(parse_qsl(text)), type_, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error), type_) from None


def not_kept(id_: str, why: str = "") -> NotFound:
    """The error of a response that is not kept."""
    return NotFound(f"Response with id {id_[:128]!r} not found{why}.", param="id")


class DeletedResponse(Struct):
    """Says that a response is not kept any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Unshown):
    """A page of the items of which a response's input was made, those of the conversation before it too."""

    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


# -- items ----------------------------------------------------------------------------------------


def kept_items(given: Input, unique: str) -> bytes:
    """An input as it is kept: items with ids, of which `unique` makes those that have none, as JSON. What
    they say is what was said."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    kept = [_kept(item, f"{unique}{at:04x}") for at, item in enumerate(items)]
    return msgspec.json.encode(kept)


def _kept(item: InputItem, unique: str) -> InputItem:
    kind = item.kind
    content = item.content
    if kind == "message" and isinstance(content, str):
        content = [InputPart(_TEXT_OF.get(item.role or "", "input_text"), content)]
    id_ = item.id or f"{_ID_PREFIXES.get(kind, 'item')}_{unique}"
    return msgspec.structs.replace(
        item, type=kind, id=id_, status=item.status or "completed", content=content
    )


_items: Final = msgspec.json.Decoder(list[Raw]).decode
_typed: Final = msgspec.json.Decoder(list[InputItem])
_LOGPROBS: Final = b'"logprobs":[{'


def conversation_of(parts: Sequence[bytes], given: Raw) -> Raw:
    """An input, as it was sent, behind the items of a conversation, in lists."""
    own = bytes(given)
    if own.startswith(b'"'):
        own = b'[{"role":"user","content":%b}]' % own
    inner = [_without_logprobs(part).strip()[1:-1] for part in (*parts, own)]
    return Raw(b"[%b]" % b",".join([one for one in inner if one.strip()]))


def _without_logprobs(part: bytes) -> bytes:
    """The items of an answer without the log-probabilities of its tokens, which are no part of a prompt."""
    if _LOGPROBS not in part:
        return part
    items = _typed.decode(part)
    for item in items:
        for one in item.content if isinstance(item.content, list) else ():
            one.logprobs = msgspec.UNSET
    return msgspec.json.encode(items)


class _Named(Struct):
    id: str = ""


_named: Final = msgspec.json.Decoder(_Named).decode


def page_of(parts: Sequence[bytes], limit: int, after: str | None, is_newest_first: bool) -> bytes:
    """A page of the items of a conversation, as JSON: those behind the one with the id `after`, or the
    first."""
    items = [item for part in parts for item in _items(part)]
    if is_newest_first:
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((at for at, item in enumerate(items, 1) if _named(item).id == after), len(items))
    data = items[begin : begin + limit]
    ids = [_named(item).id for item in (data[:1] + data[-1:])]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return msgspec.json.encode(InputItemList(data, first, last, has_more=begin + limit < len(items)))


# -- events ---------------------------------------------------------------------------------------

_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_Event = dict[str, Any]
_PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "output_text": ("content_part", "output_text"),
    "reasoning_text": ("content_part", "reasoning_text"),
    "summary_text": ("reasoning_summary_part", "reasoning_summary_text"),
}
"""The events of a part of an item, and those of its text."""
_CALLS: Final = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The events of what a call is made with, and the field that has it."""


def replay(response: bytes, last_number: int, starting_after: int) -> bytes:
    """The events of a response that is complete, in which each text comes as one piece. They are numbered
    from 0 on up to the last text; those behind it so that the last of all has the number that it had when
    the response was made. Those up to the number `starting_after` are left out."""
    whole = _object(response)
    events = [*_replayed(whole)]
    behind = 1 + max((at for at, one in enumerate(events) if "delta" in one), default=-1)
    ahead = max(0, last_number - (len(events) - 1))
    told = []
    for at, event in enumerate(events):
        number = at + ahead if at >= behind else at
        if number > starting_after:
            name, fields = event["type"], {"type": event["type"], "sequence_number": number, **event}
            told.append(sse.named_event(name.encode(), msgspec.json.encode(fields)))
    return b"".join([*told, sse.DONE])


def _replayed(whole: _Event) -> Iterator[_Event]:
    begun = {
        **whole,
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        "status": "in_progress",
        "output": [],
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole.get("output") or ()):
        at = {"item_id": item.get("id", ""), "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": _begun(item)}
        for number, part in enumerate(item.get("content") or ()):
            yield from _part(part, {**at, "content_index": number})
        for number, part in enumerate(item.get("summary") or ()):
            yield from _part(part, {**at, "summary_index": number})
        if (call := _CALLS.get(item.get("type", ""))) is not None:
            name, field = call
            yield {"type": f"response.{name}.delta", **at, "delta": item.get(field, "")}
            named = {"name": item.get("name", "")} if field == "arguments" else {}
            yield {"type": f"response.{name}.done", **at, **named, field: item.get(field, "")}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole.get('status', 'completed')}", "response": whole}


def _begun(item: _Event) -> _Event:
    """An item before there is anything of it."""
    begun = {**item, "status": "in_progress"}
    begun |= {name: [] for name in ("content", "summary") if isinstance(item.get(name), list)}
    begun |= {name: "" for name in ("arguments", "input") if name in item}
    begun.pop("encrypted_content", None)
    return begun


def _part(part: _Event, at: _Event) -> Iterator[_Event]:
    kind = part.get("type", "")
    if (names := _PARTS.get(kind)) is None:
        return
    of_part, of_text = names
    text: str = part.get("text", "")
    logprobs: _Event = {"logprobs": []} if kind == "output_text" else {}
    yield {"type": f"response.{of_part}.added", **at, "part": {**part, "text": "", **logprobs}}
    yield {"type": f"response.{of_text}.delta", **at, "delta": text, **logprobs}
    yield {"type": f"response.{of_text}.done", **at, "text": text, **logprobs}
    yield {"type": f"response.{of_part}.done", **at, "part": part}

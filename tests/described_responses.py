"""Responses and their events, held to two descriptions: OpenAI's own types, as its SDK has them, and the
schemas of Open Responses (https://www.openresponses.org), as llm-comply carries them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final, get_args

import jsonschema_rs
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from shared.wire import sse

_SCHEMAS: Final = {
    name: f"Response{name}StreamingEvent"
    for name in (
        *("Created", "InProgress", "Completed", "Failed", "Incomplete", "OutputItemAdded", "OutputItemDone"),
        *("ContentPartAdded", "ContentPartDone", "OutputTextDelta", "OutputTextDone"),
        *("FunctionCallArgumentsDelta", "FunctionCallArgumentsDone"),
        *("ReasoningDelta", "ReasoningDone", "ReasoningSummaryDelta", "ReasoningSummaryDone"),
        *("ReasoningSummaryPartAdded", "ReasoningSummaryPartDone"),
    )
} | {"error": "ErrorStreamingEvent"}
_OTHER_NAMES: Final = {"reasoning_text.delta": "reasoning.delta", "reasoning_text.done": "reasoning.done"}
"""OpenAI's names of events, and what Open Responses has for them."""
_OTHER_SCHEMAS: Final = {
    "reasoning_summary_text.delta": "ReasoningSummaryDelta",
    "reasoning_summary_text.done": "ReasoningSummaryDone",
}
_NOT_THEIRS: Final = ("custom_tool_call", "namespace")
"""What OpenAI has and Open Responses does not."""


def check_response(value: dict[str, Any]) -> None:
    """Raises where a response is not what is described."""
    Response.model_validate(value)
    if not any(f'"{name}"' in json.dumps(value) for name in _NOT_THEIRS):
        _check("ResponseResource", value)


def check_event(event: dict[str, Any]) -> None:
    """Raises where an event of a stream is not what is described."""
    if event["type"] == "error":  # the SDK knows what is within, which it raises
        _check("ErrorStreamingEvent", event)
        return
    _event_types()[event["type"]].model_validate(event)
    name = event["type"].removeprefix("response.")
    if any(f'"{word}"' in json.dumps(event) for word in _NOT_THEIRS) or "custom_tool_call" in name:
        return
    other = _OTHER_NAMES.get(name, name)
    title = "".join(word.title() for word in other.replace(".", "_").split("_"))
    schema = _SCHEMAS[_OTHER_SCHEMAS.get(name, title)]
    _check(schema, event | {"type": f"response.{other}"})


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each named as its type, numbered from 0. What ends it is left out:
    `[DONE]` and the engine's comment."""
    events: list[dict[str, Any]] = []
    for one in data.split(b"\n\n"):
        if not one or one.startswith(b":") or one == sse.DONE.strip():
            continue
        name, body = one.split(b"\n")
        events.append(json.loads(body.removeprefix(b"data: ")))
        assert name == f"event: {events[-1]['type']}".encode()
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the deltas of a stream come to, which must be those of its `done` events."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for event in events:
        kind, at = event["type"].removeprefix("response."), event.get("output_index", -1)
        if kind == "output_item.added":
            assert at == len(items), "items come one after another"
            items[at], texts[at] = event["item"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[at]["id"]
            assert event["delta"], "nothing is told twice, and none is empty"
            texts[at] += event["delta"]
        elif kind in _TEXT_DONE:
            assert event[_TEXT_DONE[kind]] == texts[at]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[at]["id"]
            assert text_of(event["item"]) == texts[at]
            items[at] = event["item"]
    return [items[at] for at in sorted(items)]


_TEXT_DONE: Final = {
    "output_text.done": "text",
    "reasoning_text.done": "text",
    "reasoning_summary_text.done": "text",
    "function_call_arguments.done": "arguments",
    "custom_tool_call_input.done": "input",
}


def text_of(item: dict[str, Any]) -> str:
    """The text of an item, whatever it is."""
    if item["type"] in ("message", "reasoning"):
        return "".join(part["text"] for part in (*item["content"], *item.get("summary", ())))
    return str(item["arguments" if item["type"] == "function_call" else "input"])


def _check(name: str, value: Any) -> None:
    _validator(name).validate(value)


@cache
def _validator(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": _components()})


@cache
def _components() -> dict[str, Any]:
    spec = json.loads(files("llm_comply.specs").joinpath("openresponses.json").read_text())
    components: dict[str, Any] = spec["components"]
    return components


@cache
def _event_types() -> dict[str, type[pydantic.BaseModel]]:
    """The SDK's types of events, by what they are of."""
    types = get_args(get_args(ResponseStreamEvent)[0])
    return {get_args(one.model_fields["type"].annotation)[0]: one for one in types}

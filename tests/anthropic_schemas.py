"""Anthropic's own description of its API, as llm-comply carries it: what answers are held to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jsonschema_rs

from shared.apis.message_answers import PING, STOP

_REF: Final = "#/components/schemas/{name}"


@cache
def _components() -> dict[str, Any]:
    spec = json.loads(files("llm_comply.specs").joinpath("anthropic.json").read_text())
    components: dict[str, Any] = spec["components"]
    return components


@cache
def _validator(name: str) -> Any:
    return jsonschema_rs.validator_for({"$ref": _REF.format(name=name), "components": _components()})


def holds(name: str, value: object) -> None:
    """Assert that a value is of one of its schemas."""
    problems = [f"{error.instance_path}: {error.message}" for error in _validator(name).iter_errors(value)]
    assert not problems, problems


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each of which is as described; pings and comments are left out."""
    events: list[dict[str, Any]] = []
    for one in stream.split(b"\n\n"):
        if not one or one.startswith(b":") or PING.startswith(one):
            continue
        name, data = one.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {event['type']}".encode()
        holds("ErrorResponse" if event["type"] == "error" else "MessageStreamEvent", event)
        events.append(event)
    return events


def put_together(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a whole stream tells, as Anthropic's SDKs put it together."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                _add(message["content"][-1], event["delta"], inputs, event["index"])
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = _input(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert [event["type"] for event in events][-1:] == ["message_stop"]
    return message


def _add(block: dict[str, Any], delta: dict[str, Any], inputs: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            inputs[index] = inputs.get(index, "") + delta["partial_json"]


def _input(text: str) -> dict[str, Any]:
    """The input of a call; nothing of one that was cut off."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


assert STOP.endswith(b"\n\n")

"""Chats in OpenAI's shapes, of every kind that a chat template may be given."""

from __future__ import annotations

from typing import Any, Final

Chat = dict[str, Any]
"""`messages`, and perhaps `tools`, `arguments` and `continues`, as a request has them."""

WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a place, such as "Bad Gögging" <now>.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City and country"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["place"],
        },
    },
}
ORDER: Final = {
    "type": "function",
    "function": {
        "name": "shop.place_order",
        "description": "Place an order.\nReturns its number.",
        "parameters": {
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "description": "What to buy",
                    "items": {
                        "type": "object",
                        "properties": {
                            "sku": {"type": "string", "minLength": 1, "nullable": True},
                            "count": {"type": "integer", "minimum": 1, "maximum": 99},
                            "notes": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["sku", "count"],
                    },
                },
                "express": {"type": "boolean", "default": False},
                "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "to": {"$ref": "#/$defs/address"},
                "tags": {"type": ["array", "null"], "items": {"enum": ["a", 1, None]}},
            },
            "$defs": {"address": {"type": "object", "properties": {"street": {"type": "string"}}}},
            "required": ["items"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
BARE: Final = {"type": "function", "function": {"name": "now"}}
EMPTY: Final = {
    "type": "function",
    "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TOOLS: Final = [WEATHER, ORDER, BARE, EMPTY]


def call(name: str, arguments: str, id_: str = "abcdefghi") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def _assistant(content: Any = "Hello!", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _tool(content: Any, id_: str = "abcdefghi", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content, **more}


def _text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


PARIS: Final = call("get_weather", '{"place": "Paris", "unit": "celsius"}')
ROME: Final = call("get_weather", '{"place":"Rome"}', "jklmnopqr")
NESTED: Final = call(
    "shop.place_order",
    '{"items": [{"sku": "é<1>", "count": 2, "notes": ["a", "b"]}], "express": true, "price": null, '
    '"to": {"street": "x"}, "rate": 1.50, "big": 123456789012345678901, "none": [], "empty": {}}',
)
CHATS: Final[dict[str, Chat]] = {
    "plain": {"messages": [_user()]},
    "system": {"messages": [_system(" Be <kind>. "), _user("What is 2 + 2?  ")]},
    "turns": {"messages": [_system(), _user("a"), _assistant("b"), _user("c"), _assistant("d"), _user("e")]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _user()]},
    "unicode": {
        "messages": [_user("  Größe 🌊\n\r\n"), _assistant("水\u2028"), _user("<b>&amp;</b> '\"{{ 1 }}")]
    },
    "marks": {
        "messages": [_user("<think>a</think><tool_call>"), _assistant("<|im_end|></think>"), _user("[INST]")]
    },
    "no system, then one": {"messages": [_user("a"), _system("late"), _user("b")]},
    "same role": {"messages": [_user("a"), _user("b"), _assistant("c"), _assistant("d"), _user("e")]},
    "ends with assistant": {"messages": [_user("a"), _assistant("b")]},
    "names": {"messages": [{**_user("a"), "name": "ann"}, {**_assistant("b"), "name": "bot"}, _user("c")]},
    "empty": {"messages": [_system(""), _user(""), _assistant(""), _user(" ")]},
    "parts": {
        "messages": [
            _system(_text("Be ", "brief.")),
            _user(_text("a", "b")),
            _assistant(_text("c")),
            _user("d"),
        ]
    },
    "tools": {"messages": [_user()], "tools": TOOLS},
    "one tool and a system": {"messages": [_system(), _user()], "tools": [WEATHER]},
    "a tool without anything": {"messages": [_user()], "tools": [BARE]},
    "a tool with nested schema": {"messages": [_user()], "tools": [ORDER]},
    "call": {
        "messages": [_user(), _assistant(None, tool_calls=[PARIS]), _tool("15 degrees")],
        "tools": [WEATHER],
    },
    "call without content": {
        "messages": [
            _user(),
            {"role": "assistant", "tool_calls": [PARIS]},
            _tool('{"t": 15}'),
            _assistant("15."),
        ],
        "tools": [WEATHER],
    },
    "call with text": {
        "messages": [
            _user(),
            _assistant("Let me see. ", tool_calls=[PARIS]),
            _tool("15"),
            _assistant("15."),
            _user("Why?"),
        ],
        "tools": [WEATHER],
    },
    "calls at once": {
        "messages": [
            _user(),
            _assistant(None, tool_calls=[PARIS, ROME]),
            _tool("15"),
            _tool("21", "jklmnopqr"),
        ],
        "tools": TOOLS,
    },
    "calls after calls": {
        "messages": [
            _system(),
            _user(),
            _assistant("", tool_calls=[PARIS]),
            _tool("15", name="get_weather"),
            _assistant(None, tool_calls=[NESTED]),
            _tool("No. 7"),
            _assistant("Done."),
            _user("Thanks"),
        ],
        "tools": TOOLS,
    },
    "nested arguments": {
        "messages": [_user(), _assistant("", tool_calls=[NESTED]), _tool("ok")],
        "tools": [ORDER],
    },
    "no arguments": {
        "messages": [_user(), _assistant("", tool_calls=[call("now", "{}")]), _tool("12:00")],
        "tools": [BARE],
    },
    "calls and no tools": {
        "messages": [_user(), _assistant("x", tool_calls=[PARIS]), _tool("15"), _user("And?")]
    },
    "no calls": {"messages": [_user(), _assistant("a", tool_calls=[]), _user("b")], "tools": [WEATHER]},
    "tool in parts": {
        "messages": [_user(), _assistant("", tool_calls=[PARIS]), _tool(_text("15", " degrees"))],
        "tools": [WEATHER],
    },
    "reasoning": {"messages": [_user("a"), _assistant("b", reasoning_content="Hm. "), _user("c")]},
    "reasoning by its other name": {"messages": [_user("a"), _assistant("b", reasoning="Hm.\n"), _user("c")]},
    "reasoning last": {"messages": [_user("a"), _assistant("b", reasoning_content="Hm.")]},
    "reasoning before a call": {
        "messages": [_user(), _assistant("", reasoning_content="Look.", tool_calls=[PARIS]), _tool("15")],
        "tools": [WEATHER],
    },
    "no thinking": {"messages": [_user()], "arguments": {"enable_thinking": False}},
    "thinking": {"messages": [_system(), _user()], "arguments": {"enable_thinking": True}},
    "effort": {"messages": [_user()], "tools": [WEATHER], "arguments": {"reasoning_effort": "low"}},
    "continued": {"messages": [_user("a"), _assistant("The answer")], "continues": True},
    "continued with a space": {
        "messages": [_system(), _user("a"), _assistant("The answer is ")],
        "continues": True,
    },
    "continued parts": {"messages": [_user("a"), _assistant(_text("The", " answer"))], "continues": True},
    "continued reasoning": {
        "messages": [_user("a"), _assistant("So", reasoning_content="Hm.")],
        "continues": True,
    },
    "continued user": {"messages": [_user("Once upon")], "continues": True},
    "continued nothing": {"messages": [_user("a"), _assistant(None, tool_calls=[PARIS])], "continues": True},
}

"""The formats of the families of models, as data, and how a family is known.

Each is in the form that `response_template` describes. A family is known by texts of its chat template, in
the order of `FAMILIES`: what a template has the model write is the one thing that its checkpoints share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_Data = Mapping[str, Any]
_CHATML: Final = "<|im_start|>assistant\n"
_DEEPSEEK: Final = "<\uff5cAssistant\uff5c>"
_THINK: Final[_Data] = {"open": "<think>\n", "close": "\n</think>\n\n"}
_JSON_CALL: Final[_Data] = {
    "open": "<tool_call>\n",
    "close": "\n</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_CAPTURED: Final[_Data] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_LISTED: Final[_Data] = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_QWEN_XML: Final[_Data] = {
    "open_pattern": r"(?:<tool_call>\n)?<function=(?P<name>[^\n>]+)>\n",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>\n"},
    "transform": _CAPTURED,
}


def _family(anchor: str, calls: _Data | None = None, thinking: _Data | None = None, **more: Any) -> _Data:
    fields: dict[str, _Data] = {"content": {}}
    if thinking is not None:
        fields["reasoning_content"] = thinking
    if calls is not None:
        fields["tool_calls"] = calls
    return {"start_anchor": anchor, "fields": fields, **more}


_GPT_OSS: Final[_Data] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open_pattern": r"(?:|<\|start\|>assistant)<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
        },
        "tool_calls": {
            "open_pattern": (
                r"(?:(?:|<\|start\|>assistant)<\|channel\|>commentary|<\|start\|>assistant|)"
                r" to=functions\.(?P<name>[^\s<]+)"
                r"(?: <\|constrain\|>json|<\|channel\|>commentary(?: <\|constrain\|>)? json)<\|message\|>"
            ),
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": _CAPTURED,
            "separator": "",
        },
        "content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
            "close": ["<|return|>", "<|end|>"],
        },
    },
}
_GEMMA_4: Final[_Data] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": _CAPTURED,
            "separator": "",
        },
        "content": {},
    },
}


@dataclass(frozen=True, slots=True)
class FormatFamily:
    """A family's format, and the texts of a chat template that is the family's."""

    name: str
    data: _Data
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def wrote(self, template: str) -> bool:
        return all(text in template for text in self.has) and not any(text in template for text in self.lacks)


FAMILIES: Final = (
    FormatFamily("gpt-oss", _GPT_OSS, ("<|channel|>", "<|message|>", "functions.")),
    FormatFamily("gemma-4", _GEMMA_4, ("<|tool_call>call:",)),
    FormatFamily(
        "lfm2",
        _family(
            _CHATML,
            {
                "open": "<|tool_call_start|>[",
                "close": "]<|tool_call_end|>",
                "content": "python-calls",
            },
            {"open": "<think>", "close": "</think>"},
        ),
        ("<|tool_call_start|>",),
    ),
    FormatFamily(
        "minicpm5",
        _family(
            _CHATML,
            {
                "open_pattern": r'<function name="(?P<name>[^"]+)">',
                "close": "</function>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r'<param name="(?P<key>[^"]+)">(?P<value>.*?)</param>'},
                "transform": _CAPTURED,
            },
            _THINK,
        ),
        ("<function name=", "<param name="),
    ),
    FormatFamily(
        "glm-4",
        _family(
            "<|assistant|>",
            {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\n",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": (
                        r"<arg_key>(?P<key>[^<]+)</arg_key>\n<arg_value>(?P<value>.*?)</arg_value>\n"
                    )
                },
                "transform": _CAPTURED,
            },
            {"open": "<think>", "close": "</think>\n"},
            call_ends_reasoning=True,
        ),
        ("<arg_key>", "<tool_call>"),
    ),
    FormatFamily(
        "qwen3.5",
        _family(_CHATML, _QWEN_XML, _THINK, call_ends_reasoning=True),
        ("<tool_call>", "<function=", "<think>"),
    ),
    FormatFamily("qwen3-coder", _family(_CHATML, _QWEN_XML), ("<tool_call>", "<function=")),
    FormatFamily(
        "mistral",
        _family(
            "[/INST]",
            {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[]+)\[ARGS\]",
                "repeats": True,
                "content": "json",
                "transform": _CAPTURED,
                "separator": "",
            },
            {"open": "[THINK]", "close": "[/THINK]"},
        ),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    FormatFamily(
        "mistral-list",
        _family(
            "[/INST]",
            {
                "open": ["[TOOL_CALLS]", "[TOOL_CALLS] "],
                "content": "json",
                "transform": _LISTED,
                "transform_each": True,
            },
        ),
        ("[TOOL_CALLS]",),
    ),
    FormatFamily(
        "granite",
        _family(
            "<|start_of_role|>assistant<|end_of_role|>",
            {
                "open": ["<|tool_call|>", "<tool_call>"],
                "content": "json",
                "transform": _LISTED,
                "transform_each": True,
            },
            {"open": "<think>", "close": "</think>"},
            ignored=["<response>", "</response>"],
        ),
        ("<|start_of_role|>", "<|tool_call|>"),
    ),
    FormatFamily(
        "granite-4",
        _family("<|start_of_role|>assistant<|end_of_role|>", _JSON_CALL),
        ("<tool_call>", "<|start_of_role|>"),
    ),
    FormatFamily("qwen3", _family(_CHATML, _JSON_CALL, _THINK), ("<tool_call>", "<think>")),
    FormatFamily("hermes", _family(_CHATML, _JSON_CALL), ("<tool_call>",)),
    FormatFamily(
        "pythonic",
        _family(
            "<|header_end|>\n\n",
            {"open": ["[", "<|python_start|>["], "close": "]", "content": "python-calls"},
            ignored=["<|python_end|>"],
        ),
        ("func_name1(",),
    ),
    FormatFamily(
        "llama-3",
        _family(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            {
                "open": ["", "<|python_tag|>"],
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
                "separator": "; ",
            },
        ),
        ("<|start_header_id|>", "parameters"),
    ),
    FormatFamily("deepseek-r1", _family(_DEEPSEEK, None, _THINK), (_DEEPSEEK, "</think>")),
    FormatFamily("think", _family(_CHATML, None, _THINK), ("<think>", "</think>")),
)
"""The most telling first: the first one that wrote a template is its family."""


def family_of(template: str) -> FormatFamily | None:
    return next((family for family in FAMILIES if family.wrote(template)), None)


def family_named(name: str) -> FormatFamily | None:
    return next((family for family in FAMILIES if family.name == name), None)

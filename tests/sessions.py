"""Sessions of coding agents in the chat form, with texts of our own: what five agents were seen to send.

An agent sends its whole history with each turn. The histories have the shapes of Codex 0.171, Claude Code
2.1.332, opencode 1.18.33, qwen-code 0.24.4 and cline 3.0.65: roles and their order, content as a text or in
parts, what is null or empty, which ids calls have, how arguments are spelled, what changes from turn to turn.
Texts are random words of like length, from a seed, with what templates and tokenizers trip over among them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Message = dict[str, Any]

_WORDS: Final = (
    *("read", "the", "file", "and", "change", "what", "it", "says", "of", "tests", "that", "fail", "before"),
    *("server.py", "src/app/main.ts", "README.md", "--verbose", "0.5", "42", "1,000", "e.g.", "don't"),
    *(
        "größer",
        "naïve",
        "水",
        "файл",
        "→",
        "🌊",
        "'single'",
        '"double"',
        "`code`",
        "\\n",
        "C:\\tmp",
        "{}",
        "[]",
    ),
    *("<tag>", "</tag>", "<think>", "{{ x }}", "{% if %}", "&amp;", "%s", "$HOME", "a_b", "CamelCase"),
)
_BREAKS: Final = (" ", " ", " ", " ", " ", ", ", ". ", "\n", "\n\n", "\n    ", "  ")
COMMANDS: Final = (
    "ls -la",
    "cat src/main.py",
    'grep -rn "def f" .',
    "pytest -q | tail -3",
    "echo 'größe: 1'",
)


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation: the messages of each request."""

    name: str
    tools: list[dict[str, Any]]
    turns: list[list[Message]] = field(default_factory=list)

    @property
    def without_reasoning(self) -> Session:
        plain = [
            [{k: v for k, v in one.items() if "reasoning" not in k} for one in turn] for turn in self.turns
        ]
        return Session(self.name, self.tools, plain)


class _Writer:
    """Random texts of about a length, shorter by `scale`."""

    def __init__(self, seed: str, scale: float) -> None:
        self._random, self._scale = random.Random(seed), scale

    def text(self, length: int) -> str:
        pieces: list[str] = []
        left = max(12, int(length * self._scale))
        while left > 0:
            pieces.append(self._random.choice(_WORDS) + self._random.choice(_BREAKS))
            left -= len(pieces[-1])
        return "".join(pieces)

    def command(self) -> str:
        return self._random.choice(COMMANDS)

    def id(self, prefix: str) -> str:
        """An id as the engine makes them, behind what the API's own have before them."""
        return prefix + "".join(self._random.choices("abcdefghijkmnpqrstuvwxyz0123456789", k=9))


def _tools(writer: _Writer, *named: tuple[str, int, tuple[str, ...]]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": writer.text(length),
                "parameters": {
                    "type": "object",
                    "properties": {
                        each: {"type": "string", "description": writer.text(60)} for each in properties
                    },
                    "required": list(properties),
                },
            },
        }
        for name, length, properties in named
    ]


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(id_: str, name: str, arguments: dict[str, Any], *, compact: bool = True) -> dict[str, Any]:
    separators = (",", ":") if compact else None
    text = json.dumps(arguments, ensure_ascii=False, separators=separators)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": text}}


def _result(call: dict[str, Any], content: Any) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _growing(history: Sequence[Message | list[Message]]) -> list[list[Message]]:
    """The turns of a history: each ends before an answer, and the last with it all. A message given twice has
    its second form in all turns after the first that it is in."""
    turns: list[list[Message]] = []
    so_far: list[Message] = []
    later: dict[int, Message] = {}
    for each in history:
        forms = each if isinstance(each, list) else [each]
        if forms[0]["role"] == "assistant" and so_far:
            turns.append(list(so_far))
            so_far = [later.get(at, one) for at, one in enumerate(so_far)]
            later = {}
        if len(forms) > 1:
            later[len(so_far)] = forms[1]
        so_far.append(forms[0])
    return [*turns, so_far]


# -- agents -------------------------------------------------------------------------------------------


def codex(scale: float) -> Session:
    """Responses: two `developer` messages before two of the user's, calls with their JSON as it was made,
    reasoning before each call, an instruction that comes with a later turn."""
    writer = _Writer("codex", scale)
    shell = [
        _call(writer.id("call_"), "exec_command", {"cmd": writer.command()}, compact=False) for _ in range(4)
    ]
    goal = _call(writer.id("call_"), "get_goal", {})
    history: list[Message | list[Message]] = [
        {"role": "developer", "content": _parts(writer.text(16979))},
        {"role": "developer", "content": _parts(writer.text(2127), writer.text(362))},
        {"role": "user", "content": _parts(writer.text(355))},
        {"role": "user", "content": _parts("say hi")},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": writer.text(400),
            "tool_calls": [shell[0]],
        },
        _result(shell[0], writer.text(105)),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": writer.text(90),
            "tool_calls": shell[1:3],
        },
        _result(shell[1], writer.text(2400)),
        _result(shell[2], writer.text(800)),
        {"role": "assistant", "content": writer.text(200)},
        {"role": "developer", "content": _parts(writer.text(420))},
        {"role": "user", "content": _parts(writer.text(60))},
        {"role": "assistant", "content": writer.text(80), "reasoning_content": "Hm.", "tool_calls": [goal]},
        _result(goal, "{}"),
        {"role": "assistant", "content": writer.text(60), "tool_calls": [shell[3]]},
        _result(shell[3], writer.text(1500)),
        {"role": "assistant", "content": writer.text(300)},
    ]
    named = ("exec_command", 82, ("cmd",)), ("write_stdin", 80, ("text",)), ("get_goal", 122, ())
    return Session("codex", _tools(writer, *named, ("spawn_agent", 5989, ("task",))), _growing(history))


def claude_code(scale: float) -> Session:
    """Messages: a system of several blocks, and a `system` message behind the user's, first in parts and then
    as a text; inputs that were read and written again; reminders behind results."""
    writer = _Writer("claude-code", scale)
    late, hint = writer.text(9105), writer.text(300)
    bash = [
        _call(writer.id("toolu_"), "Bash", {"command": writer.command(), "description": writer.text(30)})
        for _ in range(3)
    ]
    code = writer.text(900)
    edit = _call(
        writer.id("toolu_"), "Edit", {"file_path": "/a/b.py", "old_string": code, "new_string": "x = 1.5\n"}
    )
    history: list[Message | list[Message]] = [
        {"role": "system", "content": _parts(writer.text(62), writer.text(6759))},
        {"role": "user", "content": _parts(writer.text(576), "say hi")},
        [{"role": "system", "content": _parts(late)}, {"role": "system", "content": late}],
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": writer.text(300),
            "tool_calls": [bash[0]],
        },
        [_result(bash[0], "hi"), _result(bash[0], _parts("hi"))],
        {"role": "assistant", "content": writer.text(90), "tool_calls": [bash[1], bash[2]]},
        _result(bash[1], writer.text(4000)),
        _result(bash[2], ""),
        [{"role": "system", "content": _parts(hint)}, {"role": "system", "content": hint}],
        {"role": "assistant", "content": "", "reasoning_content": writer.text(120), "tool_calls": [edit]},
        _result(edit, writer.text(200)),
        {"role": "user", "content": _parts(writer.text(90))},
        {"role": "assistant", "content": _parts(writer.text(400))},
        {"role": "user", "content": writer.text(70)},
        {"role": "system", "content": writer.text(70)},
        {"role": "assistant", "content": writer.text(40)},
    ]
    named = (
        ("Bash", 2110, ("command", "description")),
        ("Edit", 360, ("file_path", "old_string", "new_string")),
    )
    return Session("claude-code", _tools(writer, *named, ("Workflow", 3496, ("script",))), _growing(history))


def opencode(scale: float) -> Session:
    """Chat: an empty text beside calls, arguments that were read and written again."""
    writer = _Writer("opencode", scale)
    calls = [
        _call(writer.id("call_"), "bash", {"command": writer.command(), "timeout": 120000}) for _ in range(3)
    ]
    write = _call(writer.id("call_"), "write", {"path": "a.json", "content": '{"a": [1, 2.50, "\\u00e9"]}\n'})
    history: list[Message | list[Message]] = [
        {"role": "system", "content": writer.text(9548)},
        {"role": "user", "content": '"say hi"'},
        {"role": "assistant", "content": "", "tool_calls": [calls[0]]},
        _result(calls[0], "hi\n"),
        {"role": "assistant", "content": "", "reasoning_content": writer.text(60), "tool_calls": calls[1:]},
        _result(calls[1], writer.text(1200)),
        _result(calls[2], writer.text(10)),
        {"role": "assistant", "content": writer.text(30), "tool_calls": [write]},
        _result(write, ""),
        {"role": "assistant", "content": writer.text(250)},
        {"role": "user", "content": writer.text(50)},
        {"role": "assistant", "content": writer.text(50)},
    ]
    named = ("bash", 4628, ("command",)), ("write", 623, ("path", "content")), ("task", 3019, ("prompt",))
    return Session("opencode", _tools(writer, *named), _growing(history))


def qwen_code(scale: float) -> Session:
    """Chat: the user's text in five parts, null beside calls, results as lists of parts."""
    writer = _Writer("qwen-code", scale)
    calls = [_call(f"call_{at}", "run_shell_command", {"command": writer.command()}) for at in range(3)]
    nothing = _call("call_9", "list_agents", {})
    history: list[Message | list[Message]] = [
        {"role": "system", "content": writer.text(26895)},
        {"role": "user", "content": _parts(*map(writer.text, (6099, 346, 2625, 226)), "say hi")},
        {"role": "assistant", "content": None, "tool_calls": [calls[0]]},
        _result(calls[0], _parts(writer.text(114))),
        {
            "role": "assistant",
            "content": None,
            "reasoning": writer.text(200),
            "tool_calls": [calls[1], nothing],
        },
        _result(calls[1], _parts(writer.text(900))),
        _result(nothing, _parts(writer.text(20))),
        {"role": "assistant", "content": writer.text(120), "tool_calls": [calls[2]]},
        _result(calls[2], _parts(writer.text(40), writer.text(40))),
        {"role": "assistant", "content": writer.text(60)},
        {"role": "user", "content": _parts(writer.text(120))},
        {"role": "assistant", "content": writer.text(60)},
    ]
    named = (
        ("run_shell_command", 4946, ("command",)),
        ("list_agents", 1019, ()),
        ("agent", 10716, ("prompt",)),
    )
    return Session("qwen-code", _tools(writer, *named), _growing(history))


def cline(scale: float) -> Session:
    """Chat: two messages of the user's in a row, and one more whenever the model stops before the end."""
    writer = _Writer("cline", scale)
    nag = {"role": "user", "content": writer.text(227)}
    calls = [_call(f"call_{at}", "run_commands", {"commands": [writer.command(), "true"]}) for at in range(2)]
    done = _call("call_8", "submit_and_exit", {"result": writer.text(80), "verified": True})
    history: list[Message | list[Message]] = [
        {"role": "system", "content": writer.text(5120)},
        {"role": "user", "content": "say hi"},
        nag,
        {"role": "assistant", "content": None, "tool_calls": [calls[0]]},
        _result(calls[0], '[{"query":"echo hi","result":"hi\\n","success":true}]'),
        {"role": "assistant", "content": "All done."},
        nag,
        {
            "role": "assistant",
            "content": writer.text(30),
            "reasoning_content": "Hm.\n",
            "tool_calls": [calls[1]],
        },
        _result(calls[1], writer.text(300)),
        {"role": "assistant", "content": writer.text(30)},
        nag,
        {"role": "assistant", "content": None, "tool_calls": [done]},
        _result(done, "ok"),
    ]
    named = ("run_commands", 993, ("commands",)), ("submit_and_exit", 786, ("result", "verified"))
    return Session("cline", _tools(writer, *named), _growing(history))


AGENTS: Final[dict[str, Callable[[float], Session]]] = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": opencode,
    "qwen-code": qwen_code,
    "cline": cline,
}

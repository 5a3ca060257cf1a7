"""The script that the model of the agents' tests plays: what it answers to a prompt.

The next step follows from what the prompt holds: the latest order, and the results of calls behind it. So a
request that is sent again is answered the same, and one from beside the session (for a title, or a summary)
gets a text. Which tools an agent has, and how their arguments are called, is read from the prompt too.

A prompt is ChatML with Hermes' marks of tools and results, as the templates of Qwen's models have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.api.formats.format import AnswerFormat
from tests.agents.task import ORDER, TOTAL, Order, told
from tests.answer_texts import written

TURN: Final = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
TOOLS: Final = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
RESULT: Final = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
RECITAL: Final = re.compile(r"Recite (\d+) words( and use no tool)?")
"""A long answer. An agent is asked for it with the words in the brackets: a prompt that has them and no tools
is from beside the session."""
RUNNING: Final = re.compile(r"running with session ID (\d+)")
"""What Codex says of a command that it does not wait for any longer."""
TURNS_MAX: Final = 12
"""The turns behind an order after which the script gives up, since its calls bring nothing."""

Arguments = Mapping[str, Any]
Choice = tuple[str, Arguments]
"""A tool's name, and the arguments to call it with."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says: a thought, a text, a call. Each may be missing."""

    text: str = ""
    thought: str = ""
    call: Choice | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt holds, as far as the script goes by it."""

    tools: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The names of the arguments of each tool."""
    recital: int | None = None
    """The words to recite. None where none were asked for, or not beside these tools."""
    order: Order | None = None
    said: tuple[str, ...] = ()
    """The model's turns behind the order."""
    results: tuple[str, ...] = ()
    """The results of calls behind the order."""

    @staticmethod
    def of(text: str) -> Prompt:
        turns = [(role, content) for role, content in TURN.findall(text)][:-1]
        tools, order, recital, at = _tools(turns), None, None, 0
        for number, (role, content) in enumerate(turns):
            if role == "user" and not RESULT.search(content):
                found = RECITAL.search(content)
                if found is not None and (tools or not found[2]):
                    recital = int(found[1])
                if found := ORDER.search(content):
                    order, at = Order(found[1], int(found[2]), int(found[3]), found[4]), number
        behind = turns[at + 1 :]
        return Prompt(
            tools,
            recital,
            order,
            tuple(content for role, content in behind if role == "assistant"),
            tuple(found for role, content in behind if role == "user" for found in RESULT.findall(content)),
        )

    def holds(self, pattern: str) -> re.Match[str] | None:
        """The last place in the results that has the pattern. None if there is none."""
        return next((found for text in self.results[::-1] if (found := re.search(pattern, text))), None)

    def tool(self, choices: Collection[Choice]) -> Choice | None:
        """The first of the choices that there is a tool for."""
        return next(
            (
                each
                for each in choices
                if each[0] in self.tools and each[1].keys() <= set(self.tools[each[0]])
            ),
            None,
        )


def _tools(turns: list[tuple[str, str]]) -> dict[str, Collection[str]]:
    listed = next(
        (found[1] for role, content in turns if role == "system" if (found := TOOLS.search(content))), ""
    )
    functions = [json.loads(line)["function"] for line in listed.splitlines() if line]
    return {each["name"]: each.get("parameters", {}).get("properties", {}).keys() for each in functions}


def reply(prompt: Prompt) -> Reply:
    """What is said to a prompt."""
    if prompt.recital is not None:
        return Reply(" ".join(f"word {number}" for number in range(prompt.recital)))
    order = prompt.order
    if order is None or not prompt.tools:
        return Reply("A ledger and its total")
    done = prompt.holds(TOTAL.pattern)
    if done is not None:
        return _ending(prompt, told(done[1]))
    for thought, text, choices in _steps(order, prompt):
        call = prompt.tool(choices)
        if call is None:
            return Reply("There is no tool for it.")
        if len(prompt.said) >= TURNS_MAX:
            break
        return Reply(text, thought, call)
    return _ending(prompt, "I could not do it.")


def _steps(order: Order, prompt: Prompt) -> Iterator[tuple[str, str, list[Choice]]]:
    """The steps that are still to be done: what is thought of each, what is said, and the calls to choose
    from."""
    path, old, new = order.path, f"FACTOR = {order.old}", f"FACTOR = {order.new}"
    if not prompt.holds(rf"{old}\b"):
        yield (
            "I have to see what is in the file before I change it.",
            "",
            [
                ("read", {"filePath": path}),
                ("Read", {"file_path": path}),
                ("read_file", {"file_path": path}),
                ("read_files", {"files": [{"path": path}]}),
                ("exec_command", {"cmd": f"cat {path}"}),
            ],
        )
    if not any(new in said for said in prompt.said):
        yield (
            "The factor stands in one line, which I can replace.",
            "I change the factor.",
            [
                ("edit", {"filePath": path, "oldString": old, "newString": new}),
                ("edit", {"file_path": path, "old_string": old, "new_string": new}),
                ("Edit", {"file_path": path, "old_string": old, "new_string": new}),
                ("editor", {"path": path, "old_text": old, "new_text": new}),
                ("exec_command", {"cmd": f"sed -i 's/{old}/{new}/' {path}"}),
            ],
        )
    command = order.command
    runs = prompt.results and RUNNING.search(prompt.results[-1])
    if runs:
        yield ("It is not done yet.", "", [("write_stdin", {"session_id": int(runs[1]), "chars": ""})])
    yield (
        "Now it can be run.",
        "",
        [
            ("bash", {"command": command}),
            ("Bash", {"command": command, "description": "Run the ledger"}),
            ("run_shell_command", {"command": command, "is_background": False}),
            ("run_commands", {"commands": [command]}),
            ("exec_command", {"cmd": command}),
        ],
    )


def _ending(prompt: Prompt, text: str) -> Reply:
    """The last answer of an order; some agents go on until it is a call."""
    call = prompt.tool(
        [("submit_and_exit", {"summary": text, "verified": True}), ("attempt_completion", {"result": text})]
    )
    return (
        Reply(thought="That is all that was asked.", call=call)
        if call
        else Reply(text, "That is all that was asked.")
    )


def played(prompt: str, format_: AnswerFormat) -> str:
    """What the model writes behind a prompt, in its family's format."""
    said = reply(Prompt.of(prompt))
    answer = said.text
    if said.call is not None:
        answer += ("\n\n" if answer else "") + written(format_, [said.call])
    marks = format_.reasoning
    if marks is None or prompt.endswith(marks.closer):
        return answer
    opener = "" if prompt.endswith(marks.opener) else marks.opener
    return f"{opener}{said.thought}{marks.closer}{answer}"

"""What the agents' tests stand on: the script that the model plays, its runner, and what is recorded.

The agents themselves need npm and network namespaces: `python -m tests.agents`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.demo import MODEL_DIR
from tests.agents.recorder import Exchange, Wire, read, recording
from tests.agents.script import TURNS_MAX, played
from tests.agents.scripted_runner import END, ScriptedRunner
from tests.agents.served import FAMILIES
from tests.agents.shapes import expanded, shape
from tests.agents.task import FACTORS, Task, source, told, total
from tests.answer_texts import FORMATS, Answer, answer_of
from tests.answer_texts import read as read_answer
from tests.fake_runner import runner_info

TOOLS: Mapping[str, dict[str, list[str]]] = {
    "opencode": {
        "bash": ["command", "timeout"],
        "read": ["filePath"],
        "edit": ["filePath", "oldString", "newString"],
    },
    "qwen-code": {
        "edit": ["file_path", "old_string", "new_string"],
        "read_file": ["file_path"],
        "run_shell_command": ["command", "is_background"],
    },
    "cline": {
        "read_files": ["files"],
        "editor": ["path", "old_text", "new_text"],
        "run_commands": ["commands"],
        "submit_and_exit": ["summary", "verified"],
    },
    "claude-code": {
        "Bash": ["command", "description"],
        "Read": ["file_path"],
        "Edit": ["file_path", "old_string", "new_string"],
    },
    "codex": {"exec_command": ["cmd"]},
}


class Talk:
    """A chat as the templates of Qwen's models write it, between the script and an agent's tools."""

    def __init__(self, template: str, tools: Mapping[str, list[str]]) -> None:
        self.format = FORMATS[FAMILIES[template]]
        self.opening = "<|im_start|>assistant\n" + ("<think>\n" if template == "qwen3_8" else "")
        schemas: dict[str, dict[str, Any]] = {
            name: {each: {} for each in arguments} for name, arguments in tools.items()
        }
        functions = [
            {"type": "function", "function": {"name": name, "parameters": {"properties": schema}}}
            for name, schema in schemas.items()
        ]
        listed = "\n".join(map(json.dumps, functions))
        self.text = f"<|im_start|>system\nBe useful.\n<tools>\n{listed}\n</tools>{END}\n" if tools else ""

    def hear(self, text: str) -> None:
        self.text += f"<|im_start|>user\n{text}{END}\n"

    def answer(self) -> Answer:
        said = played(self.text + self.opening, self.format)
        assert said == played(self.text + self.opening, self.format)
        made = answer_of(read_answer(self.format, [said], prompt_tail=self.opening))
        self.text += f"{self.opening}{said}{END}\n"
        return made


@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_each_answer_follows_from_the_results_so_far(
    tools: Mapping[str, list[str]], template: str, tmp_path: Path
) -> None:
    task, talk = Task(tmp_path), Talk(template, tools)
    for order in task.orders:
        talk.hear(f"The date is unknown.\n{order.text}")
        calls = []
        for result in (source(order.old), "The file was changed.", f"ledger sum: {total(order.new)}"):
            [(name, arguments)] = talk.answer().calls
            assert json.loads(arguments).keys() <= set(tools[name])
            calls.append(arguments)
            talk.hear(f"<tool_response>\n{result}\n</tool_response>")
        assert all(order.path in each for each in calls)
        assert f"FACTOR = {order.new}" in calls[1]
        end = talk.answer()
        assert str(total(order.new)) in end.text + "".join(arguments for _, arguments in end.calls)


def test_a_prompt_from_beside_the_session_gets_a_text(tmp_path: Path) -> None:
    talk = Talk("qwen3_8", {})
    talk.hear("Make a title.")
    talk.hear(Task(tmp_path).orders[0].text)
    assert talk.answer().calls == []


def test_the_script_gives_up_where_calls_bring_nothing(tmp_path: Path) -> None:
    talk = Talk("qwen3_8", TOOLS["codex"])
    talk.hear(Task(tmp_path).orders[0].text)
    answers = []
    for _ in range(TURNS_MAX + 1):
        answers.append(talk.answer())
        talk.hear("<tool_response>\nno such file\n</tool_response>")
    assert [len(each.calls) for each in answers] == [1] * TURNS_MAX + [0]


def test_a_task_is_done_where_the_file_is_changed_and_its_sum_was_told(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.prepare()
    first, second = task.orders
    assert not task.is_done(first, told(total(first.new)))
    task.file.write_text(source(first.new))
    assert task.is_done(first, told(total(first.new)))
    assert not task.is_done(first, f"{total(first.new)}, but I could not do it")
    assert (first.old, first.new, second.new) == FACTORS


# -- the runner -----------------------------------------------------------------------------------


def runner(said: str) -> ScriptedRunner:
    info = runner_info(vocab_size=2048)
    return ScriptedRunner(info, 64, MODEL_DIR / "tokenizer.json", lambda _: said)


def plan(step: int, position: int, length: int, seated: list[SlotAssignment], *pages: int) -> Plan:
    slot = seated[0].slot if seated else 0
    grown = [(slot, list(pages))] if pages else []
    return Plan(step, [], seated, grown, [slot], [position], [length], [Want.SAMPLE])


def seat(slot: int, tokens: list[int]) -> SlotAssignment:
    return SlotAssignment.of(slot, tokens, len(tokens), SamplingParams(seed=1, max_tokens=50))


def test_the_runner_says_what_the_script_says_and_ends() -> None:
    said = runner("All is well.")
    [token] = said.run(plan(1, 0, 6, [seat(0, [5, 6, 7, 8, 9, 10])], *range(8))).tokens
    tokens = [token]
    while tokens[-1] != 2:
        tokens += said.run(plan(len(tokens) + 1, 5 + len(tokens), 1, [])).tokens
    assert said.text_of(tokens) == f"All is well.{END}"


def test_the_runner_notices_a_page_of_other_tokens() -> None:
    said = runner("All is well.")
    said.run(plan(1, 0, 6, [seat(0, [5, 6, 7, 8, 9, 10])], 0, 1))
    other = plan(2, 4, 2, [seat(1, [5, 6, 7, 9, 9, 10])], 0, 2)
    mixed = Plan(2, [0], other.seated, other.grown, other.slots, other.positions, other.lengths, other.wants)
    with pytest.raises(AssertionError, match="its pages are not those of its tokens"):
        said.run(mixed)


# -- what is recorded -----------------------------------------------------------------------------

REQUEST = b'POST /v1/x HTTP/1.1\r\nhost: h\r\nauthorization: Bearer k\r\ncontent-length: 7\r\n\r\n{"a":1}'
ANSWER = b"HTTP/1.1 200 OK\r\nx-request-id: r1\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n0\r\n\r\n"


def test_a_connection_is_read_as_requests_with_their_answers() -> None:
    wire = Wire()
    for number, piece in enumerate((REQUEST[:20], REQUEST[20:] + REQUEST)):
        wire.sent.append((float(number), piece))
    for piece in (ANSWER[:90], ANSWER[90:] + ANSWER[:-9]):
        wire.received.append((2.0, piece))
    whole, cut = read(wire)
    assert (whole.status, whole.answer, whole.is_whole, whole.request_id) == (200, b"text", True, "r1")
    assert (cut.status, cut.is_whole, cut.json) == (200, False, {"a": 1})
    assert whole.headers["authorization"] == "<set>"


def test_the_recorder_passes_bytes_and_ends_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            there, _ = server.accept()
            with there:
                while piece := there.recv(1000):
                    there.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        with recording(server.getsockname()[1]) as recorder:
            with socket.create_connection(("127.0.0.1", recorder.port)) as own:
                own.sendall(REQUEST)
                own.shutdown(socket.SHUT_WR)
                echoed = b""
                while piece := own.recv(1000):
                    echoed += piece
            thread.join()
    assert echoed == REQUEST
    assert [each.body for each in recorder.exchanges] == [b'{"a":1}']


def test_a_session_without_its_text_is_as_long_and_as_equal() -> None:
    first: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful helper.\n\n  Do what you are told."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "<system-reminder>Go on, then.</system-reminder>"}],
        },
    ]
    second = [*first, {"role": "user", "content": "You are a careful helper.\nAnd kind."}]
    tools = [
        {"function": {"name": "read", "parameters": {"properties": {"title": {"description": "Of it all."}}}}}
    ]
    bodies = [{"model": "m", "messages": messages, "tools": tools} for messages in (first, second)]
    made = shape([_exchange(body) for body in bodies], {"helper": "hand"})
    one, two = (each["body"] for each in expanded(made))
    assert two["messages"][:2] == one["messages"]
    assert two["tools"] == one["tools"]
    text = one["messages"][0]["content"]
    assert text.split("\n")[0] == two["messages"][2]["content"].split("\n")[0]
    assert len(text) == len(first[0]["content"]) - 2
    assert text.split("\n")[2].startswith("  ")
    assert one["messages"][1]["content"][0]["text"].startswith("<system-reminder>")
    assert "title" in one["tools"][0]["function"]["parameters"]["properties"]
    assert not any(word in json.dumps(made) for word in ("careful", "told", "kind", "Go on", "Of it"))


def _exchange(body: dict[str, Any]) -> Exchange:
    return Exchange(0.0, "POST", "/v1/x", {}, json.dumps(body).encode(), 200, {}, b"", True)

"""Says what a chat template takes of a chat, and puts a chat into that form.

Templates differ in what they refuse, lose or move: a system message that comes late, two messages of one role
in a row, more than one call at once. A chat that has what its template does not take is changed where that
keeps its meaning, and as little as does.

Rules:

1. *The law*: what a message becomes depends on the messages before it and, among those of a run of one role,
   on the run. So the ids of a prompt, without what begins an answer, are the beginning of the next turn's,
   whatever is changed here.
2. A message keeps its place. What a template does not take as an instruction there is the user's, between
   `<system-reminder>` and `</system-reminder>`.
3. Only where a template refuses neighbours, they become one: texts of a run, and what the user says behind a
   tool's result, which joins that. A blank line is between them. So does a reminder behind a result, where a
   message of the user's would have the template leave out the reasoning that led to the call.
4. What a template takes is not changed.
5. An effort is a wish: one that the template refuses is the nearest that it takes.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from shared.apis.chat import EFFORTS

Message = dict[str, Any]

EFFORT: Final = "reasoning_effort"
"""The one variable that requests name in a field of its own."""
INSTRUCTIONS: Final = frozenset({"system", "developer"})
"""The roles whose messages instruct the model."""
REASONING: Final = ("thinking", "reasoning_content", "reasoning")
"""The names of an assistant's reasoning: transformers' own, and two of APIs."""
ID_LEN: Final = 9
"""Characters of the ids that all templates take."""
_BETWEEN: Final = "\n\n"
_SHORT_ID: Final = re.compile(rf"[A-Za-z0-9]{{{ID_LEN}}}")
_LETTERS: Final = string.digits + string.ascii_letters


class Takes(Struct, frozen=True, omit_defaults=True):
    """The forms that a template takes. By default all but the role `developer`."""

    text: bool = True
    """Content that is a text. False where it takes nothing but parts."""
    developer: bool = False
    """The role `developer`, as more than any name of a role."""
    system: bool = True
    """A system message at the head."""
    systems: bool = True
    """Several system messages at the head."""
    late_system: bool = True
    """A system message behind others, at its place."""
    late_developer: bool = True
    any_first: bool = True
    """A chat whose first message, behind those of the system, is not the user's."""
    users_in_row: bool = True
    assistants_in_row: bool = True
    user_behind_tool: bool = True
    """A message of the user's behind a tool's result."""
    calls_at_once: bool = True
    """Several calls in one message."""
    text_of_reasoned_call: bool = True
    """Text beside reasoning and calls."""
    no_text: Literal["absent", "null", "empty"] = "absent"
    """The content of a message that is calls alone."""
    objects: bool = True
    """Arguments of calls as objects. False where they are JSON texts."""
    written: bool = True
    """Arguments that print as they were written (`shared.text.call_arguments`)."""
    any_id: bool = True
    """Ids of calls in any form. False where they have nine letters and digits."""
    nameless_result: bool = True
    """A tool's result without the function's name."""
    past_reasoning: bool = True
    """Reasoning before the user's last message. False where the template leaves it out: nothing is changed
    then, and the law does not hold for what follows it."""
    reasoning_kept_by: dict[str, bool] = {}
    """The variable of the template, and its value, with which that is kept. Empty where there is none."""
    efforts: tuple[str, ...] = ()
    """The values of `reasoning_effort`, least first. Empty where it takes any, or reads none."""

    @property
    def any_order(self) -> bool:
        """True if chats without calls need no change but that of a role's name."""
        return (
            self.system
            and self.systems
            and self.late_system
            and (self.late_developer or not self.developer)
            and self.any_first
            and self.users_in_row
            and self.assistants_in_row
        )

    @property
    def any_calls(self) -> bool:
        """True if messages with calls, and their results, need no change."""
        return (
            self.user_behind_tool
            and self.calls_at_once
            and self.text_of_reasoned_call
            and self.any_id
            and self.nameless_result
        )


def nearest(effort: str, efforts: Sequence[str]) -> str:
    """The effort, or where it is not among those that a template takes, the next greater one of them, else
    the greatest."""
    if not efforts or effort in efforts or effort not in EFFORTS:
        return effort
    rank = EFFORTS.index(effort)
    return next((one for one in efforts if EFFORTS.index(one) > rank), efforts[-1])


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def taken(messages: Sequence[Message], takes: Takes) -> list[Message]:
    """The messages as a template takes them, whose contents are texts or none. They are changed in place."""
    if takes.system and _is_usual(messages):
        return list(messages)
    return _Turns(takes).of(messages)


def _is_usual(messages: Sequence[Message]) -> bool:
    """True if user and assistant take turns, without calls, behind one message of the system's or none."""
    expected, is_begun = "user", False
    for message in messages:
        role = message["role"]
        if role == expected and "tool_calls" not in message:
            expected = "assistant" if role == "user" else "user"
        elif is_begun or role not in INSTRUCTIONS:
            return False
        is_begun = True
    return expected == "assistant" or len(messages) > 1


class _Turns:
    """The messages that were put into form, and the last of them, to which others may be joined."""

    def __init__(self, takes: Takes) -> None:
        self._takes = takes
        self._made: list[Message] = []
        self._joined: dict[str, list[str]] = {}
        """The texts of the last message's fields that others were joined to."""
        self._names: dict[str, str] = {}
        """The function of each call, by its id."""
        self._is_head = True
        """True while there are instructions alone."""

    def of(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages if self._takes.calls_at_once else _single_calls(messages):
            self._add(message)
        if self._is_head:
            self._end_head()
        self._flush()
        return self._made

    def _add(self, message: Message) -> None:
        takes, is_late = self._takes, message["role"] in INSTRUCTIONS
        if is_late:
            if self._is_head and takes.system:
                self._instruct(message)
                return
            self._demote(message)
        role, reminds = message["role"], message["role"] == "user" and is_late
        if self._is_head and role != "user":
            self._end_head()
        self._is_head = False
        if role == "assistant" and "tool_calls" in message:
            self._call(message)
        elif role == "tool":
            self._result(message)
        last = self._made[-1] if self._made else None
        match role, last and last["role"]:
            case ("user", "user") if not takes.users_in_row:
                self._join(message)
            case ("user", "tool") if not takes.user_behind_tool or (reminds and not takes.past_reasoning):
                self._join(message)
            case ("assistant", "assistant") if not takes.assistants_in_row:
                self._join(message)
            case _:
                self._append(message)

    def _append(self, message: Message) -> None:
        self._flush()
        self._made.append(message)

    def _join(self, message: Message) -> None:
        """Join a message to the last one."""
        last = self._made[-1]
        for name in ("content", *REASONING):
            if text := message.get(name):
                self._joined.setdefault(name, [last.get(name) or ""]).append(text)
        if "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])

    def _flush(self) -> None:
        """Put together what was joined to the last message."""
        for name, texts in self._joined.items():
            self._made[-1][name] = _BETWEEN.join(filter(None, texts))
        self._joined = {}

    # -- instructions -----------------------------------------------------------------------------

    def _instruct(self, message: Message) -> None:
        """Add an instruction to the head."""
        if self._made and not self._takes.systems:
            self._join(message)
        else:
            self._append(message)

    def _demote(self, message: Message) -> None:
        """Make of an instruction that comes late what the template takes at its place."""
        takes = self._takes
        if message["role"] == "developer" and not (takes.developer and takes.late_developer):
            message["role"] = "system"
        if message["role"] == "system" and not (takes.system and takes.late_system):
            message["role"] = "user"
            message["content"] = reminder(message["content"])
            message.pop("name", None)

    def _end_head(self) -> None:
        """Go on behind the head with what is not the user's."""
        if not self._takes.any_first:
            self._append({"role": "user", "content": ""})

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, message: Message) -> None:
        takes = self._takes
        for call in message["tool_calls"]:
            if not takes.any_id:
                call["id"] = short_id(call["id"])
            if not takes.nameless_result:
                self._names[call["id"]] = (call.get("function") or call["custom"])["name"]
        if not takes.text_of_reasoned_call and message.get("content"):
            names = [name for name in REASONING if name in message]
            for name in names:
                message[name] += _BETWEEN + message["content"]
            if names:
                message["content"] = ""
        if not message.get("content"):
            without_text(message, takes)

    def _result(self, message: Message) -> None:
        if "tool_call_id" not in message:
            return
        if not self._takes.any_id:
            message["tool_call_id"] = short_id(message["tool_call_id"])
        if not self._takes.nameless_result and message["tool_call_id"] in self._names:
            message.setdefault("name", self._names[message["tool_call_id"]])


def without_text(message: Message, takes: Takes) -> None:
    """Give a message that is calls alone the content that the template takes."""
    match takes.no_text:
        case "absent":
            message.pop("content", None)
        case "null":
            message["content"] = None
        case "empty":
            message["content"] = ""


def short_id(id_: str) -> str:
    """An id of nine letters and digits: the same one if it has that form, else one made of it."""
    if _SHORT_ID.fullmatch(id_):
        return id_
    number = int.from_bytes(hashlib.blake2b(id_.encode(), digest_size=8).digest())
    letters = []
    for _ in range(ID_LEN):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


def _single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with those of several calls taken apart: each call comes with the results that follow for
    it, the others behind the last."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.get("tool_calls", ())) < 2:
            yield message
            continue
        begun = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        yield from _apart(message, messages[begun:at])


def _apart(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    calls, others = message["tool_calls"], list[Message]()
    of_call: dict[str, list[Message]] = {call["id"]: [] for call in calls}
    for result in results:
        of_call.get(result.get("tool_call_id", ""), others).append(result)
    message["tool_calls"] = [calls[0]]
    yield message
    yield from of_call.pop(calls[0]["id"])
    for call in calls[1:]:
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield from of_call.pop(call["id"], ())
    yield from others

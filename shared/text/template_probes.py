"""Finds out what a chat template takes of a chat, by small chats that it renders.

A probe is a chat whose texts are marks. It passes where the template renders it, all marks are there, in the
chat's order, and what stands for a turn's messages does not change with those behind them. Each form of
`Takes` has probes that have it. Where one of them does not pass, the form counts as not taken if all pass
once they are changed accordingly. Otherwise chats of that form are left as they are: the template says what
it refuses.

The probes of a form are put into the forms that were found before it, so the order matters: roles first, then
instructions, then calls. All take some milliseconds where they are rendered in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from msgspec.structs import replace

from shared.apis.chat import EFFORTS
from shared.apis.chat_messages import ChatMessage, FunctionCall, FunctionToolCall
from shared.apis.prompt import ChatPrompt
from shared.process import logs
from shared.process.clock import Clock
from shared.text.rendering import Unrenderable
from shared.text.template_takes import EFFORT, Takes
from shared.wire.errors import ApiError, TooMuch

PROBE_LEN: Final = 2048
"""Characters of the longest probe, and more."""
PROBES_S: Final = 2.0
"""The time in which no further probe is begun, in seconds: a hundred times what they take."""
_MARK: Final = re.compile(r"mark[a-z]+?mark")
_ROLE: Final = "markrolemark"
"""A role that no template knows."""

Render = Callable[[ChatPrompt, Takes], str]

log = logs.get(__name__)


def _said(role: Any, mark: str, *calls: FunctionToolCall, **more: Any) -> ChatMessage:
    return ChatMessage(role, mark and f"mark{mark}mark", tool_calls=list(calls) or None, **more)


def _call(name: str, arguments: str = "") -> FunctionToolCall:
    """A call, with an id that is not of the form which some templates ask for."""
    function = FunctionCall(f"mark{name}mark", arguments or f'{{"key":"mark{name}xmark"}}')
    return FunctionToolCall(f"call_a1b2c3d4e5f6a7b8{name}", function)


def _result(name: str) -> ChatMessage:
    return _said("tool", f"result{name}", tool_call_id=_call(name).id)


_THOUGHT: Final = {"reasoning_content": "markthoughtmark"}
_SYSTEM: Final = _said("system", "system")
_USER: Final = _said("user", "user")
_ANSWER: Final = _said("assistant", "answer")
_AGAIN: Final = _said("user", "again")
_CALL: Final = _said("assistant", "", _call("f"))
_RESULT: Final = _result("f")


@dataclass(frozen=True, slots=True)
class _Probe:
    messages: tuple[ChatMessage, ...]
    cuts: tuple[int, ...] = ()
    """Numbers of first messages that are a turn's prompt."""
    is_ordered: bool = True
    """True if the marks are to be written in the chat's order."""

    @property
    def marks(self) -> list[str]:
        texts = (text for message in self.messages for text in message.texts)
        return [mark for text in texts for mark in _MARK.findall(text)]


def takes_of(render: Render, clock: Clock, *, knows_calls: bool, arguments: Collection[str]) -> Takes:
    """Finds what a template takes. It is not asked about calls where it does not know them; `arguments` are
    the variables that requests may set."""
    try:
        return _Search(render, clock, knows_calls=knows_calls).found(arguments)
    except ApiError as error:  # it needs too much for a probe, or cannot be rendered now
        log.warning("template.not_probed", problem=error.message, detail=error.detail)
        return Takes()


class _Search:
    def __init__(self, render: Render, clock: Clock, *, knows_calls: bool) -> None:
        self._render, self._clock, self._knows_calls = render, clock, knows_calls
        self._due_s = clock.monotonic() + PROBES_S
        self._takes = Takes()

    def found(self, arguments: Collection[str]) -> Takes:
        more, new = _said("assistant", "more"), _said("user", "new")
        self._try("text", _Probe((_USER,)))
        self._try("users_in_row", _Probe((_USER, _AGAIN)), _Probe((_USER, _ANSWER, _AGAIN, new)))
        self._try("assistants_in_row", _Probe((_USER, _ANSWER, more, _AGAIN)))
        self._try("system", _Probe((_SYSTEM, _USER)))
        self._takes = replace(self._takes, developer=self._knows_role("developer"))
        roles = ("system", "developer") if self._takes.developer else ("system",)
        self._try("systems", *_heads(roles))
        headed = _Probe((_SYSTEM, _ANSWER, _USER), is_ordered=False)
        self._try("any_first", _Probe((_ANSWER, _USER)), headed, _Probe((_SYSTEM,)))
        if self._knows_calls:
            self._find_calls()
        stays = self._passes(_Probe((_SYSTEM, _USER, _ANSWER, _AGAIN), (2,)), self._takes)
        for role in roles:
            late = _late(role, (_SYSTEM,) if stays else (), with_calls=self._knows_calls)
            self._try(f"late_{role}", *late)
        self._takes = replace(self._takes, efforts=self._efforts(arguments))
        if not self._drops_reasoning({}):
            return self._takes
        settings = ({name: value} for name in sorted(arguments) for value in (True, False))
        kept_by = next((one for one in settings if self._drops_reasoning(one) is False), {})
        return replace(self._takes, past_reasoning=False, reasoning_kept_by=kept_by)

    def _find_calls(self) -> None:
        self._find_one_call()
        self._try("user_behind_tool", _Probe((_USER, _CALL, _RESULT, _AGAIN, _ANSWER), (1,)))
        calls = _said("assistant", "", _call("f"), _call("g"))
        self._try("calls_at_once", _Probe((_USER, calls, _RESULT, _result("g")), is_ordered=False))
        reasoned = _said("assistant", "answer", _call("f"), **_THOUGHT)
        probe = _Probe((_USER, reasoned, _RESULT), is_ordered=False)
        if (
            self._text(probe.messages, self._takes) is None
        ):  # that a template leaves one of them out is its own
            self._try("text_of_reasoned_call", probe)
        self._takes = replace(self._takes, written=self._keeps_writing())

    def _find_one_call(self) -> None:
        """Find the form of a call and its result that needs the fewest changes."""
        probe = _Probe((_USER, _CALL, _RESULT, _ANSWER, _AGAIN))
        truth = True, False
        for objects, any_id, nameless, no_text in product(truth, truth, truth, ("absent", "null", "empty")):
            form = {"objects": objects, "any_id": any_id, "nameless_result": nameless, "no_text": no_text}
            changed = replace(self._takes, **form)
            if self._passes(probe, changed):
                self._takes = changed
                return

    def _efforts(self, arguments: Collection[str]) -> tuple[str, ...]:
        """The efforts that are taken, where others are refused."""
        if EFFORT not in arguments:
            return ()
        taken = tuple(
            effort
            for effort in EFFORTS
            if self._text((_USER,), self._takes, arguments={EFFORT: effort}) is not None
        )
        return () if taken == EFFORTS else taken

    def _keeps_writing(self) -> bool:
        """True if arguments that remember how they were written print as others do, but for white space."""
        printed = set()
        for arguments in ('{"key":[1,"markxmark"]}', '{ "key" :[ 1,"markxmark" ] }'):
            call = _said("assistant", "", _call("f", arguments))
            text = self._text((_USER, call, _RESULT), self._takes)
            printed.add(None if text is None else "".join(text.split()))
        return None not in printed and len(printed) == 1

    def _drops_reasoning(self, arguments: dict[str, bool]) -> bool | None:
        """True if reasoning that the template prints in the user's last turn is not printed later. None where
        it is never printed."""
        turns: list[tuple[ChatMessage, ...]] = [(_USER, _said("assistant", "answer", **_THOUGHT))]
        if self._knows_calls:
            turns.append((_USER, _said("assistant", "", _call("f"), **_THOUGHT), _RESULT))
        prints = False
        for turn in turns:
            last, past = (
                self._text((*turn, *more), self._takes, arguments=arguments) or ""
                for more in ((), (_ANSWER, _AGAIN))
            )
            if "markthoughtmark" in last:
                prints = True
                if "markthoughtmark" not in past:
                    return True
        return False if prints else None

    def _knows_role(self, role: str) -> bool:
        """True if the template makes more of a role at the head than it makes of any other."""
        takes = replace(self._takes, developer=True)
        own, other = (self._text((_said(each, "head"), _USER), takes) for each in (role, _ROLE))
        if own is None or not {"markheadmark", "markusermark"} <= set(_MARK.findall(own)):
            return False
        return other is None or own.lower() != other.lower().replace(_ROLE, role)

    # -- probes -----------------------------------------------------------------------------------

    def _try(self, form: str, *probes: _Probe) -> None:
        """Find out whether a form is taken."""
        if not all(self._passes(probe, self._takes) for probe in probes):
            changed = replace(self._takes, **{form: False})
            if all(self._passes(probe, changed) for probe in probes):
                self._takes = changed

    def _passes(self, probe: _Probe, takes: Takes) -> bool:
        text = self._text(probe.messages, takes)
        if text is None:
            return False
        marks = probe.marks
        found = [mark for mark in dict.fromkeys(_MARK.findall(text)) if mark in marks]
        if found != marks if probe.is_ordered else set(found) != set(marks):
            return False
        return all(self._begins(probe.messages[:cut], text, takes) for cut in probe.cuts)

    def _begins(self, messages: tuple[ChatMessage, ...], text: str, takes: Takes) -> bool:
        """True if a text begins with the prompt of messages, without what begins or ends an answer."""
        closed, open_ = (self._text(messages, takes, opens=opens) for opens in (False, True))
        if closed is None or open_ is None:
            return False
        return text.startswith(common(closed, open_))

    def _text(
        self,
        messages: tuple[ChatMessage, ...],
        takes: Takes,
        *,
        opens: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> str | None:
        """The chat as the template renders it. None where it refuses."""
        if self._clock.monotonic() > self._due_s:
            raise TooMuch("The probes of the chat template take too long.")
        try:
            chat = ChatPrompt(list(messages), arguments=arguments or {}, opens_answer=opens)
            return self._render(chat, takes)
        except Unrenderable:
            return None


def common(first: str, second: str) -> str:
    """The beginning that two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))]


def _heads(roles: tuple[str, ...]) -> Iterator[_Probe]:
    """Chats with two instructions at the head."""
    for first, second in product(roles, roles):
        yield _Probe((_said(first, "first"), _said(second, "second"), _USER))


def _late(role: str, head: tuple[ChatMessage, ...], *, with_calls: bool) -> Iterator[_Probe]:
    """Chats in which a role instructs behind the user, the assistant or a tool, with a head and without."""
    late, of_head = _said(role, "late"), len(head)
    yield _Probe((*head, _USER, late, _ANSWER, _AGAIN), (of_head + 2,))
    yield _Probe((_USER, _ANSWER, late, _AGAIN), (1,))
    yield _Probe((_USER, late, _ANSWER, _AGAIN), (2,))
    yield _Probe((*head, _USER, _ANSWER, _AGAIN, late), (of_head + 1,))
    if with_calls:
        yield _Probe((*head, _USER, _CALL, _RESULT, late, _ANSWER, _AGAIN), (of_head + 4,))

"""Long chats, and those of doubtful templates, rendered by processes of their own.

A chat template works on whole texts, and each step of it (`split`, `strip`, `replace`) is one call in which
the interpreter lets no other thread run: of a chat of 8 MiB up to 0.2 seconds. So a chat of more than
`APART_LEN` characters is sent to a child process, which is started when the first one comes and stays.

Rules:

1. One chat at a time, and templates whose chats wait take turns. A job that waits, for its turn or for the
   answer, gives its thread back every few milliseconds (`shared.fairness.fair_threads`), so neither a long
   chat nor a template that never ends holds up the prompts of others.
2. The child has `RENDER_S` for a chat of the longest body, and the less the shorter it is, and
   `MEMORY_MAX` for all that it holds. A chat that needs more is refused.
3. Where a chat's caller leaves, or the child failed, the child is killed. The next chat starts another.
4. There are two children: `RENDERER` for long chats, and `DOUBTFUL` for templates that are not known to be
   bounded (`shared.text.chat_template`), which runs only where nobody else wants the CPU as much.
5. The child knows nothing but templates and chats: no configuration, and none of this process's environment
   but what says where Python's modules are, and the time zone. It ends when this process does, by its
   stdin's end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from typing import IO, Any, Final

import msgspec
from msgspec import Struct

from shared.fairness.fair_threads import Slices
from shared.process.child_python import scant_environment
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.bounded_template import LONGEST_LEN
from shared.text.call_arguments import WrittenObject, arguments_of, written_json
from shared.wire.errors import InvalidRequest, Overloaded, TooMuch
from shared.wire.shapes import BODY_LEN_MAX

APART_LEN: Final = LONGEST_LEN
"""Characters of the longest chat that is rendered in place."""
MEMORY_MAX: Final = 256 * 1024 * 1024
"""Bytes of each process that renders chats: it may have no more addresses. A chat of 8 MiB with one emoji
has four bytes for each character, and takes 187 MB in all."""
RENDER_S: Final = 10.0
"""The time for a chat of a whole body, in seconds: twenty times what 8 MiB take."""
RENDER_S_MIN: Final = 2.0
"""The time for a chat of no length, in seconds."""
START_S: Final = 10.0
"""The time in which a child that was started says that it is ready, in seconds."""
MANNERS_S: Final = 0.1
"""The time for which another chat of the template that was rendered last lets others go first, in seconds."""
NICE: Final = 10
"""The number that is added to the nice value of the child for doubtful templates."""
TURN_S: Final = 0.005
"""The time for which a job waits before it gives its thread back, in seconds."""
PIECE_LEN: Final = 1024 * 1024
"""Bytes that are read at once."""
HEAD_LEN: Final = 8
"""Bytes of a message's length, before it."""
TOO_DEEP: Final = "The tools or the calls of this chat are nested too deeply."
TOO_MUCH: Final = "This chat is too long for the model's chat template."


class Chat(Struct, frozen=True):
    """A chat as it is sent to the child."""

    source: str
    """The template."""
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    """The variables beside the messages and the special tokens."""
    now_s: float
    """The time since the Unix epoch, which templates may print."""


class Rendered(Struct, frozen=True, omit_defaults=True):
    """The child's answer: a text, or the reason why there is none."""

    text: str | None = None
    problem: str = ""
    """The error's message, for the caller."""
    detail: str | None = None
    at: int | None = None
    """The number of the message that was rendered when the template failed."""


class Unrenderable(Exception):
    """The template refuses a chat, or fails on it."""

    def __init__(self, problem: str, detail: str | None = None, at: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.detail, self.at = problem, detail, at


def told(answer: Rendered) -> str:
    """The text of an answer. Raises Unrenderable where there is none."""
    if answer.text is None:
        raise Unrenderable(answer.problem, answer.detail, answer.at)
    return answer.text


class RenderingFailed(Exception):
    """The child ended, or answered what is no answer."""


def encoded(chat: Chat) -> bytes:
    """The chat for the child. Raises InvalidRequest where it is nested too deeply."""
    try:
        chat = msgspec.structs.replace(chat, messages=[*map(_with_texts, chat.messages)])
        try:
            return msgspec.msgpack.encode(chat)
        except OverflowError:
            wide = msgspec.structs.replace(
                chat, messages=_wide(chat.messages), variables=_wide(chat.variables)
            )
            return msgspec.msgpack.encode(wide)
    except RecursionError:
        raise InvalidRequest(TOO_DEEP, param="messages") from None


def decoded(data: bytes) -> Chat:
    """The inverse of `encoded`."""
    return msgspec.msgpack.decode(data, type=Chat, ext_hook=_of_ext)


_NUMBER: Final = 0
_ARGUMENTS: Final = 1
"""The kinds of texts that stand for what MessagePack has no form of."""


def _of_ext(kind: int, text: memoryview) -> Any:
    return int(bytes(text)) if kind == _NUMBER else arguments_of(str(text, "utf-8"))


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with arguments as texts that remember how they were written."""
    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [*map(_call_with_text, message["tool_calls"])]}


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("function", {}).get("arguments")
    if not isinstance(arguments, WrittenObject):
        return call
    text = msgspec.msgpack.Ext(_ARGUMENTS, written_json(arguments).encode())
    return call | {"function": call["function"] | {"arguments": text}}


def _wide(value: Any) -> Any:
    """The value with its numbers of more than 64 bits as texts of a kind of their own, since MessagePack has
    none."""
    if isinstance(value, dict):
        return {key: _wide(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_wide(one) for one in value]
    is_wide = isinstance(value, int) and not -(2**63) <= value < 2**63
    return msgspec.msgpack.Ext(_NUMBER, str(value).encode()) if is_wide else value


class _Turns:
    """The turns of templates: of those whose chats wait, not the one that had the last turn goes next."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._lock: Final = threading.Lock()
        self._waiting: Final[Counter[str]] = Counter()
        self._is_taken = False
        self._last: str | None = None
        self._free_since_s = 0.0

    def ask(self, template: str) -> None:
        with self._lock:
            self._waiting[template] += 1

    def leave(self, template: str) -> None:
        """Wait no longer."""
        with self._lock:
            self._waiting[template] -= 1
            if not self._waiting[template]:
                del self._waiting[template]

    def take(self, template: str) -> bool:
        """Take a turn, where there is one."""
        with self._lock:
            others = len(self._waiting) > 1 and template == self._last
            is_early = self._clock.monotonic() < self._free_since_s + MANNERS_S
            if self._is_taken or (others and is_early):
                return False
            self._is_taken, self._last = True, template
            return True

    def give_back(self) -> None:
        with self._lock:
            self._is_taken, self._free_since_s = False, self._clock.monotonic()


class Renderer:
    """The child, started when it is first needed. Its jobs may come from several threads."""

    def __init__(
        self,
        *,
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "shared.text.rendering_child"),
        memory_max: int = MEMORY_MAX,
        nice: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._argv: Final = (*argv, str(memory_max), str(nice))
        self._clock: Final = clock
        self._turns: Final = _Turns(clock)
        self._child: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        """Children that were killed, and whose end was not waited for."""

    @property
    def pid(self) -> int | None:
        """The child's. None while there is none."""
        return None if self._child is None else self._child.pid

    def slices(self, chat: Chat, length: int) -> Slices[str]:
        """The text of a chat of so many characters, as a job. Raises Unrenderable where the template refuses
        it, TooMuch, and Overloaded where there is no child to be had."""
        yield from self._turn(chat.source)
        is_over = False
        try:
            render_s = RENDER_S_MIN + (RENDER_S - RENDER_S_MIN) * min(1.0, length / BODY_LEN_MAX)
            answer = yield from self._asked(encoded(chat), render_s)
            is_over = True
        except RenderingFailed as error:
            raise TooMuch(TOO_MUCH, param="messages", detail=str(error)) from None
        except OSError as error:
            raise Overloaded("Chats cannot be rendered at the moment.", detail=str(error)) from None
        finally:
            if not is_over:
                self._end()
            self._turns.give_back()
        return told(answer)

    def _turn(self, template: str) -> Slices[None]:
        """Wait for a turn."""
        self._turns.ask(template)
        try:
            while not self._turns.take(template):
                time.sleep(TURN_S)
                yield
        finally:
            self._turns.leave(template)

    def close(self) -> None:
        self._end()
        for child in self._killed:
            child.wait()

    def _asked(self, message: bytes, render_s: float) -> Generator[None, None, Rendered]:
        is_new = self._child is None or self._child.poll() is not None
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        if is_new:
            yield from self._read(child.stdout, HEAD_LEN, self._clock.monotonic() + START_S)
        due_s = self._clock.monotonic() + render_s
        for data in (len(message).to_bytes(HEAD_LEN, "big"), message):
            yield from self._write(child.stdin, data, due_s)
        length = int.from_bytes((yield from self._read(child.stdout, HEAD_LEN, due_s)), "big")
        answer = yield from self._read(child.stdout, length, due_s)
        try:
            return msgspec.msgpack.decode(answer, type=Rendered)
        except msgspec.DecodeError as error:
            raise RenderingFailed(str(error)) from None

    def _write(self, pipe: IO[bytes], data: bytes, due_s: float) -> Slices[None]:
        left = memoryview(data)
        while left:
            _, writable, _ = select.select([], [pipe], [], TURN_S)
            if writable:
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BrokenPipeError:
                    raise RenderingFailed("the child has ended") from None
            else:
                self._check(due_s)
                yield

    def _read(self, pipe: IO[bytes], length: int, due_s: float) -> Generator[None, None, bytearray]:
        data = bytearray()
        while len(data) < length:
            readable, _, _ = select.select([pipe], [], [], TURN_S)
            if readable:
                piece = os.read(pipe.fileno(), min(PIECE_LEN, length - len(data)))
                if not piece:
                    raise RenderingFailed("the child has ended")
                data += piece
            else:
                self._check(due_s)
                yield
        return data

    def _check(self, due_s: float) -> None:
        if self._clock.monotonic() >= due_s:
            raise RenderingFailed("it takes too long")

    def _started(self) -> subprocess.Popen[bytes]:
        """The child, a new one where there is none that lives. Raises OSError."""
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            self._killed = [child for child in self._killed if child.poll() is None]
            self._child = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=scant_environment(),
                bufsize=0,
            )
            os.set_blocking(self._child.stdin.fileno(), False)  # type: ignore[union-attr]
        return self._child

    def _end(self) -> None:
        """Kill the child. Its end is not waited for: to give much memory back takes it a while, and this may
        be called on the event loop."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        self._killed.append(child)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


RENDERER: Final = Renderer()
"""The child of this process for long chats."""
DOUBTFUL: Final = Renderer(nice=NICE)
"""The one for doubtful templates."""
atexit.register(RENDERER.close)
atexit.register(DOUBTFUL.close)

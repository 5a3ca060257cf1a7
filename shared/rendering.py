"""Long chats, rendered by a process of their own.

A chat template works on whole texts, and each step of it (`split`, `strip`, `replace`) is one call in which
the interpreter lets no other thread run: of a chat of 8 MiB up to 0.2 seconds. So a chat of more than
`APART_LEN` characters is sent to a child process, which is started when the first one comes and stays.

Rules:

1. One chat at a time. A job that waits, for its turn or for the answer, gives its thread back every few
   milliseconds (`shared.fair_threads`), so neither a long chat nor a template that never ends holds up the
   prompts of others.
2. The child has `RENDER_S` for a chat, and `shared.memory.RENDERING` for all that it holds. A chat that needs
   more is refused.
3. Where a chat's caller leaves, or the child failed, the child is killed. The next chat starts another.
4. The child knows nothing but templates and chats: no configuration, and none of this process's environment
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
from collections.abc import Generator
from typing import IO, Final

import msgspec
from msgspec import Struct

from shared.child_python import environment
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import InvalidRequest, Overloaded
from shared.fair_threads import Slices
from shared.memory import RENDERING

APART_LEN: Final = 256 * 1024
"""Characters of a chat that is rendered in place: each step of its template takes 6 ms at most."""
RENDER_S: Final = 10.0
"""The time for one chat, in seconds: twenty times what 8 MiB take."""
TURN_S: Final = 0.005
"""The time for which a job waits before it gives its thread back, in seconds."""
PIECE_LEN: Final = 1024 * 1024
"""Bytes that are read at once."""
HEAD_LEN: Final = 8
"""Bytes of a message's length, before it."""
_INHERITED: Final = ("PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TZ", "LANG", "LC_ALL")


class Chat(Struct, frozen=True):
    """A chat as it is sent to the child."""

    source: str
    """The template."""
    special_tokens: dict[str, str]
    messages: list[dict[str, str]]
    now_s: float
    """The time since the Unix epoch, which templates may print."""


class Rendered(Struct, frozen=True, omit_defaults=True):
    """The child's answer: a text, or the reason why there is none."""

    text: str | None = None
    problem: str = ""
    """The error's message, for the caller."""
    detail: str | None = None


class Failed(Exception):
    """The child ended, or answered what is no answer."""


class Renderer:
    """The child, started when it is first needed. Its jobs may come from several threads."""

    def __init__(
        self,
        *,
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "shared.rendering_child"),
        render_s: float = RENDER_S,
        memory_max: int = RENDERING,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._argv: Final = (*argv, str(memory_max))
        self._render_s: Final = render_s
        self._clock: Final = clock
        self._turn: Final = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        """Children that were killed, and whose end was not waited for."""

    @property
    def pid(self) -> int | None:
        """The child's. None while there is none."""
        return None if self._child is None else self._child.pid

    def slices(self, chat: Chat) -> Slices[str]:
        """The chat's text, as a job. Raises InvalidRequest where the template refuses it, or it needs too
        much time or memory, and Overloaded where there is no child to be had."""
        while not self._turn.acquire(timeout=TURN_S):
            yield
        is_over = False
        try:
            answer = yield from self._asked(msgspec.msgpack.encode(chat))
            is_over = True
        except Failed as error:
            text = "This chat is too long for the model's chat template."
            raise InvalidRequest(text, param="messages", detail=str(error)) from None
        except OSError as error:
            raise Overloaded("Chats cannot be rendered at the moment.", detail=str(error)) from None
        finally:
            if not is_over:
                self._end()
            self._turn.release()
        if answer.text is None:
            raise InvalidRequest(answer.problem, param="messages", detail=answer.detail)
        return answer.text

    def close(self) -> None:
        with self._turn:
            self._end()
        for child in self._killed:
            child.wait()

    def _asked(self, message: bytes) -> Generator[None, None, Rendered]:
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        due_s = self._clock.monotonic() + self._render_s
        for data in (len(message).to_bytes(HEAD_LEN, "big"), message):
            yield from self._write(child.stdin, data, due_s)
        length = int.from_bytes((yield from self._read(child.stdout, HEAD_LEN, due_s)), "big")
        answer = yield from self._read(child.stdout, length, due_s)
        try:
            return msgspec.msgpack.decode(answer, type=Rendered)
        except msgspec.DecodeError as error:
            raise Failed(str(error)) from None

    def _write(self, pipe: IO[bytes], data: bytes, due_s: float) -> Slices[None]:
        left = memoryview(data)
        while left:
            _, writable, _ = select.select([], [pipe], [], TURN_S)
            if writable:
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BrokenPipeError:
                    raise Failed("the child has ended") from None
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
                    raise Failed("the child has ended")
                data += piece
            else:
                self._check(due_s)
                yield
        return data

    def _check(self, due_s: float) -> None:
        if self._clock.monotonic() >= due_s:
            raise Failed(f"it takes more than {self._render_s:g} s")

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
                env=environment({name: os.environ[name] for name in _INHERITED if name in os.environ}),
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
"""The process's."""
atexit.register(RENDERER.close)

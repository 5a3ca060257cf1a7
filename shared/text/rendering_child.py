"""The process that renders chats for another one: see `shared.text.rendering`.

    python -m shared.text.rendering_child MEMORY_MAX NICE

It says that it is ready by `HEAD_LEN` bytes. Then it reads chats from stdin and writes their texts to stdout,
each with its length before it, until stdin ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec

from shared.process.child_python import answer_pipe
from shared.process.clock import SYSTEM_CLOCK
from shared.text.chat_template import CompiledTemplate, Environment
from shared.text.rendering import HEAD_LEN, RENDER_S, TOO_DEEP, TOO_MUCH, Rendered, Unrenderable, decoded

TEMPLATES_MAX: Final = 8
"""Templates that are kept compiled."""
_TOO_LARGE: Final = Rendered(problem=TOO_MUCH, detail="memory ran out")


class _Told:
    """A clock whose time of day comes with each chat."""

    wall_s = 0.0
    monotonic = staticmethod(SYSTEM_CLOCK.monotonic)
    sleep = staticmethod(SYSTEM_CLOCK.sleep)
    call_at = staticmethod(SYSTEM_CLOCK.call_at)

    def wall(self) -> float:
        return self.wall_s


_NOW: Final = _Told()


@lru_cache(TEMPLATES_MAX)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> CompiledTemplate:
    return CompiledTemplate(source, dict(special_tokens), Environment(_NOW))


def rendered(data: bytes) -> Rendered:
    """The answer to one chat, as it was sent."""
    try:
        chat = decoded(data)
        _NOW.wall_s = chat.now_s
        template = _template(chat.source, tuple(chat.special_tokens.items()))
        return Rendered(template.render(chat.messages, variables=chat.variables))
    except Unrenderable as error:
        return Rendered(problem=error.problem, detail=error.detail, at=error.at)
    except ValueError:  # a long template is compiled here for the first time
        return Rendered(problem="The model's chat template is none.", detail="it does not compile")
    except RecursionError:
        return Rendered(problem=TOO_DEEP)
    except MemoryError:
        return _TOO_LARGE


def _chats() -> Iterator[bytes]:
    stdin = sys.stdin.buffer
    while len(head := stdin.read(HEAD_LEN)) == HEAD_LEN:
        yield stdin.read(int.from_bytes(head, "big"))


def main(memory_max: int, nice: int) -> None:
    os.nice(nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the process that asks
    resource.setrlimit(resource.RLIMIT_AS, (memory_max, memory_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdout = answer_pipe()
    stdout.write(bytes(HEAD_LEN))
    stdout.flush()
    for chat in _chats():
        signal.alarm(int(2 * RENDER_S))  # should nobody be left to kill it
        try:
            answer = msgspec.msgpack.encode(rendered(chat))
        except MemoryError:
            answer = msgspec.msgpack.encode(_TOO_LARGE)
        stdout.write(len(answer).to_bytes(HEAD_LEN, "big"))
        stdout.write(answer)
        stdout.flush()
        signal.alarm(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, MemoryError):
        main(int(sys.argv[1]), int(sys.argv[2]))

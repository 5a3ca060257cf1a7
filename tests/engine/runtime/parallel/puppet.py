"""A rank without tensors, which does as the test says: by its configuration's `model`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from engine.runtime.parallel.wire import Closed, Execute, Here, RankDone, RankEnd, RankFailed, Start
from shared.process.lifecycle import die_with_parent


def main() -> None:
    wire = RankEnd(socket.socket(fileno=sys.stdin.fileno()))
    start = wire.receive()
    assert isinstance(start, Start)
    die_with_parent(start.leader_pid, signal.SIGKILL)
    wire.send(Here())
    while True:
        try:
            message = wire.receive()
        except Closed:
            return
        if isinstance(message, Execute):
            act(start.config.model, wire)
        wire.send(RankDone())


def act(part: str, wire: RankEnd) -> None:
    match part:
        case "obey":
            pass
        case "exit":
            os._exit(3)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "talk nonsense":
            os.write(sys.stdin.fileno(), b"\0\0\0\1\0")
        case "wait":
            signal.pause()
        case "complain":
            wire.send(RankFailed("the device has fallen off the bus"))
        case "hang up":
            os.close(sys.stdin.fileno())
            signal.pause()
        case _:
            raise AssertionError(part)


if __name__ == "__main__":
    main()

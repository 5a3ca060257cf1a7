"""How the pods of a group end (their preStop hooks), so that the answers of its leader can.

`group.py worker PORT` waits until nothing listens at the leader's PORT any more: a worker's ranks
compute what the leader streams, and must outlive it. `group.py leader DELAY_S` waits until others know
that the pod is going, then ends rank 0 and waits until it has drained: torchrun would kill it half a
minute after SIGTERM.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

PERIOD_S = 1.0
MISSES = 3
"""Connections that fail in a row before the leader counts as gone."""


def await_leader(port: int) -> None:
    """Wait for the end of the leader, by the address that its name has now: the name may go first."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            os.environ["LWS_LEADER_ADDRESS"], port, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        return
    misses = 0
    while misses < MISSES:
        with socket.socket(family, kind, protocol) as sock:
            sock.settimeout(2.0)
            misses = misses + 1 if sock.connect_ex(address) else 0
        time.sleep(PERIOD_S)


def rank_0() -> int | None:
    """The process of this group's rank 0."""
    marks = {b"RANK=0", f"LWS_LEADER_ADDRESS={os.environ['LWS_LEADER_ADDRESS']}".encode()}
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # no process, another user's, or gone meanwhile
            continue
        if {b"engine", b"serve"} <= set(words) and marks <= set(variables):
            return int(process.name)
    return None


def drain_leader(delay_s: float) -> None:
    """End rank 0 after the delay, and wait for its end."""
    time.sleep(delay_s)
    process = rank_0()
    if process is None:
        return
    os.kill(process, signal.SIGTERM)
    while rank_0() == process:
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", port]:
            await_leader(int(port))
        case ["leader", delay_s]:
            drain_leader(float(delay_s))
        case _:
            sys.exit(f"usage: {__doc__}")

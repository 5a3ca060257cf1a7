"""A rank that somebody else started, on any machine: it joins rank 0, and executes what it is told.

It serves nothing and listens nowhere but for the other ranks' data. Its settings are rank 0's, but for the
model's directory and the threads, which are this machine's own.

Its end is rank 0's end, and its exit status says which:

    0   rank 0 has ended as it should
    1   this rank has failed; rank 0 knows why
    2   the environment or the options are wrong
    3   rank 0 is gone, or cannot be reached any more: start all ranks anew

A stop signal does not end it once it has joined. Who stops a group sends one to every rank at once, and rank
0 still needs the others while open answers finish. Then it says goodbye.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from engine.runtime.parallel import rank
from engine.runtime.parallel.rendezvous import Rendezvous
from engine.runtime.parallel.wire import Closed, RankEnd, Start
from engine.runtime.setup.model_errors import ModelError, RankLost
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process import logs

FAILED: Final = 1
LEADER_GONE: Final = 3
UNWIND_S: Final = 5.0
"""The time that the main thread has to end by itself, once rank 0 is gone."""
LOG_S: Final = 0.5
"""The time for the last line of the log to be written."""

log = logs.get(__name__)


Resolve = Callable[[], Path]
"""Finds the model's directory, which may be downloaded first. Raises ModelError."""


def follow(config: RunnerConfig, place: Rendezvous, timeout_s: float, resolve: Resolve) -> int:
    """Join rank 0 within `timeout_s`, and execute until it ends. Returns the process's exit status."""
    log.info("rank.joining", rank=place.rank, address=place.address, port=place.port)
    try:
        return _follow(config, place, timeout_s, resolve)
    except Closed:
        log.error("rank.leader_gone", reason="rank 0 has closed its connection, or cannot be reached")
        return LEADER_GONE
    except RankLost as error:
        log.error("rank.leader_gone", reason=str(error))
        return LEADER_GONE
    except ModelError as error:
        log.error("rank.failed", reason=str(error))
        return FAILED


def _follow(config: RunnerConfig, place: Rendezvous, timeout_s: float, resolve: Resolve) -> int:
    from engine.runtime.parallel.nodes import join  # imports torch, which takes seconds

    directory = resolve()
    joined = join(place, directory, timeout_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _end_with(joined.wire)
    wire = RankEnd(joined.wire)
    start = wire.receive()
    assert isinstance(start, Start)
    log.info("rank.joined", rank=place.rank)
    own = replace(start.config, model=str(directory), threads=config.threads)
    status = rank.follow(wire, msgspec.structs.replace(start, config=own), joined.meeting)
    log.info("rank.ended", rank=place.rank, status=status)
    return status


def _end_with(wire: socket.socket) -> None:
    """End this process soon after its connection to rank 0, wherever the main thread waits: a device's
    collective may wait for a rank that is gone for ever."""
    threading.Thread(target=_watch, args=(wire,), name="leader", daemon=True).start()


def _watch(wire: socket.socket) -> None:
    poll = select.poll()
    poll.register(wire, select.POLLRDHUP)
    poll.poll()
    threading.Event().wait(UNWIND_S)
    log.error("rank.leader_gone", reason="rank 0 is gone, and a collective with it has not ended")
    threading.Event().wait(LOG_S)
    os._exit(LEADER_GONE)

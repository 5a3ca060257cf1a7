"""Ctrl-C and SIGTERM while a process still imports its modules: it ends at once, without a traceback.

Python turns Ctrl-C into a KeyboardInterrupt wherever it happens to be, and imports take longer than it takes
to press the keys. SIGTERM is lost where a process without a handler is the first of its container: the kernel
drops what would end it. So a service calls `end_quietly` before its imports. Nothing has been started or
opened by then; from its first step on, its loop decides what the signals do (`shared.process.lifecycle`).

This module is imported first of all, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
from typing import Final

INTERRUPTED: Final = 130
"""The exit status of an interrupted process, as shells have it: 128 and the signal's number."""


STOPPED: Final = 0
"""The exit status of a process that is stopped: as later, when its loop runs and nothing is open."""
_HELD: Final = (signal.SIGINT, signal.SIGTERM)


def end_quietly() -> None:
    """Exit on SIGINT and SIGTERM, also on those that were held back, until other handlers are set."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    end_when_stopped()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def end_when_stopped() -> None:
    """Exit on SIGTERM, until another handler is set."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))


def ignore_hangups() -> None:
    """Ignore SIGHUP, which would end the process, until it has a handler: whoever sends it wants files to be
    read, and those that are read later are read anyway."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hold_back() -> None:
    """Keep SIGINT and SIGTERM for the program that this process becomes, which calls `end_quietly`: a
    starting interpreter would show a traceback, or lose them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def leave_to_parent() -> None:
    """Ignore the signals that a terminal or a supervisor sends to all processes of a service: the parent lets
    streams finish that need this process, and decides when it ends. SIGTTOU comes when this process, which
    the parent has put into another process group than the terminal's, writes to the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)

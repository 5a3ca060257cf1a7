"""Ctrl-C while a process still imports its modules: it ends at once, with 130, and without a traceback.

Python turns the signal into a KeyboardInterrupt wherever it happens to be, and imports take longer than it
takes to press the keys. So a service calls `end_quietly` before its imports. Nothing has been started or
opened by then; from its first step on, its loop decides what the signal does (`shared.lifecycle`).

This module is imported first of all, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
from typing import Final

INTERRUPTED: Final = 130
"""The exit status of an interrupted process, as shells have it: 128 and the signal's number."""


def end_quietly() -> None:
    """Exit on SIGINT, also on one that was held back, until another handler is set."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def pass_over_hangups() -> None:
    """Ignore SIGHUP until another handler is set: a service that starts reads anyway what it would read
    again, and must not end by it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hold_back() -> None:
    """Keep a SIGINT for the program that this process becomes, which calls `end_quietly`: a starting
    interpreter would show a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def leave_to_parent() -> None:
    """Ignore the signals that a terminal or a supervisor sends to all processes of a service: the parent lets
    streams finish that need this process, and decides when it ends. SIGTTOU comes when this process, which
    the parent has put into another process group than the terminal's, writes to the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)

"""Ctrl-C while a process still imports what it needs: it ends at once, with 130, and without a traceback.

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
"""The exit status, as shells have it: 128 and the signal's number."""


def end_quietly() -> None:
    """On SIGINT, until somebody else handles it; also on one that was held back."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def hold_back() -> None:
    """Keep a SIGINT for the program that this process becomes, which calls `end_quietly`: its interpreter
    starts as it likes, and would show a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def leave_to_parent() -> None:
    """What a terminal or a supervisor tells all of a service's processes is for the parent: it lets the
    streams finish that need us, and decides when we end. A terminal tells its foreground group alone, and
    the parent has put us into another; should we write a line to the terminal from there, we go on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)

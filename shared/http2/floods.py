"""Budgets against floods: frames that cause work though they carry no message are paid for by the peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shared.http2 import frames, limits


class FloodBudgets:
    """The budgets of one peer. Spending raises ProtocolViolation when nothing is left."""

    __slots__ = ("by_type", "empty_frames")

    def __init__(self, now: Callable[[], float], *, client: bool) -> None:
        reports = {frames.REPORT: limits.Budget("REPORTs", limits.REPORTS, now)} if client else {}
        self.by_type: Final[Mapping[int, limits.Budget]] = {
            **reports,
            frames.RST_STREAM: limits.Budget("resets", limits.RESETS, now),
            frames.PING: limits.Budget("PINGs", limits.PINGS, now),
            frames.SETTINGS: limits.Budget("SETTINGS", limits.SETTINGS_FRAMES, now),
            frames.PRIORITY: limits.Budget("PRIORITYs", limits.PRIORITIES, now),
        }
        self.empty_frames: Final = limits.Budget("empty frames", limits.EMPTY_FRAMES, now)

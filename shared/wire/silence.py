"""Answers to operators of which some parts may be missing."""

from __future__ import annotations

from msgspec import Struct


class Silent(Struct, frozen=True, kw_only=True):
    """The gateways and workers that were asked, and did not answer in time."""

    silent_gateways: tuple[str, ...] = ()
    silent_workers: tuple[int, ...] = ()

    @property
    def named(self) -> str:
        """Their names; empty where everybody has answered."""
        workers = (f"worker {index}" for index in self.silent_workers)
        return ", ".join((*self.silent_gateways, *workers))

"""The sequences that wait in the core, as the API process knows them.

Rules.

1. The queue's bounds, in sequences and in prompt tokens, are decided here, at once. The core's own bounds are
   never reached before these.
2. A sequence waits from its submission until its Started or its end. One that is aborted waits until the core
   has seen it, since a core that hangs leaves what it is sent in this process.
3. A tenant's part of the queue follows what is left of it (`shared.fairness.fair_share`), and one request of
   any size may wait while its tenant has no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from engine.contract.messages import ServiceClass
from shared.fairness.fair_share import FairShare
from shared.wire.errors import Overloaded

RETRY_AFTER_S_MIN: Final = 1.0
RETRY_AFTER_S_MAX: Final = 30.0


class _Waiting(NamedTuple):
    """A sequence that was submitted and has not begun."""

    tenant: str
    prompt_len: int
    """In tokens."""
    service_class: ServiceClass


class CoreQueue:
    def __init__(self, len_max: int, tokens_max: int) -> None:
        self._sequences: Final = FairShare(len_max)
        self._tokens: Final = FairShare(tokens_max)
        self._waiting: dict[int, _Waiting] = {}  # by handle, in their order
        self._unseen = [0] * len(ServiceClass)
        """Prompt tokens of waiting sequences with newer handles than `seen`, by class."""
        self.seen = 0
        """The newest handle that the core counts."""
        self.latest_s = 0.0
        """How long the sequence that started last had waited, in seconds."""

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self, tenant: str, sequences: int, tokens: int) -> None:
        """Raise Overloaded where the queue is full, or the tenant has filled its part of it."""
        has_room = self._sequences.may_acquire(tenant, sequences, alone=True)
        if has_room and self._tokens.may_acquire(tenant, tokens, alone=True):
            return
        raise Overloaded(
            "The engine's queue is full. Please try again later.",
            retry_after_s=min(max(RETRY_AFTER_S_MIN, math.ceil(self.latest_s)), RETRY_AFTER_S_MAX),
            detail=f"sequences: {self._sequences.describe(tenant, sequences)}; "
            f"tokens: {self._tokens.describe(tenant, tokens)}",
        )

    def enter(self, first: int, lens: Sequence[int], tenant: str, service_class: ServiceClass) -> None:
        """Take in sequences with these prompt lengths, whose handles count up from `first`. There must be
        room."""
        self._sequences.acquire(tenant, len(lens), alone=True)
        self._tokens.acquire(tenant, sum(lens), alone=True)
        self._unseen[service_class] += sum(lens)
        for handle, prompt_len in enumerate(lens, first):
            self._waiting[handle] = _Waiting(tenant, prompt_len, service_class)

    def leave(self, handle: int) -> None:
        """Let a sequence out that has begun or ended. Others are passed over."""
        if (entry := self._waiting.pop(handle, None)) is not None:
            self._sequences.release(entry.tenant, 1)
            self._tokens.release(entry.tenant, entry.prompt_len)
            if handle > self.seen:
                self._unseen[entry.service_class] -= entry.prompt_len

    def leave_aborted(self, handle: int) -> None:
        """Let an aborted sequence out, unless its message may still wait for the core, and takes room until
        then (rule 2: it waits until the core has seen it)."""
        if handle <= self.seen:
            self.leave(handle)

    def clear(self) -> None:
        """Let all out: the core is gone."""
        for handle in list(self._waiting):
            self.leave(handle)

    def see(self, newest: int) -> None:
        """Note the newest handle that the core counts. What it has, and what had been submitted by then, is
        not counted here any more."""
        self.seen = newest
        self._unseen = [0] * len(self._unseen)
        for handle, entry in reversed(self._waiting.items()):
            if handle <= newest:
                return
            self._unseen[entry.service_class] += entry.prompt_len

    def tokens(self, counted: Sequence[int]) -> tuple[int, ...]:
        """Prompt tokens that are to be computed and are not, by class: those that the core has counted, and
        of the sequences that it has not, all."""
        return tuple(map(sum, zip_longest(counted, self._unseen, fillvalue=0)))

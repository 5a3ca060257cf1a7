"""Sequences in a given status, for tests of the pure functions that rank and choose them."""

from __future__ import annotations

from array import array
from typing import Final

from engine.contract.messages import ServiceClass
from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import PageChain
from engine.core.sequence import Sequence
from tests.engine.core.harness import greedy

FLEX, DEFAULT, PRIORITY = ServiceClass
COST: Final = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0)
"""A prompt of 100 tokens takes 0.1 s."""


def sequence(
    handle: int,
    arrived_at: float,
    *,
    prompt_len: int = 100,
    preempted: bool = False,
    service_class: ServiceClass = DEFAULT,
    tenant: str = "",
) -> Sequence:
    """A waiting sequence, or one that was admitted and preempted."""
    chain, prompt = PageChain(b"", 4), array("I", [1] * prompt_len)
    seq = Sequence(handle, greedy(4), prompt_len, prompt, chain, arrived_at, tenant, service_class)
    if preempted:
        seq.admit(0, [0], 0, arrived_at)
        seq.preempt(arrived_at)
    return seq


def stalled(
    handle: int, paused_at: float, *, resumed: bool = False, service_class: ServiceClass = DEFAULT
) -> Sequence:
    """A stalled sequence that holds one page, still paused or resumed."""
    seq = sequence(handle, 0.0, service_class=service_class)
    seq.admit(0, [0], 0, 0.0)
    seq.pause(paused_at)
    seq.stall(paused_at)
    if resumed:
        seq.resume(paused_at)
    return seq


def handles(sequences: list[Sequence]) -> list[int]:
    return [seq.handle for seq in sequences]

"""Prompts as the core gets them, packed, which is also the check of their ids against the model's vocabulary.

A million ids take 40 ms, which the event loop has not: long prompts are packed on threads, in slices
(`shared.fairness.fair_threads`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from engine.contract.packing import TOKENS
from shared.fairness.fair_threads import FairThreads, Slices, at_once
from shared.text.prompts import SLICE_IDS

INLINE_IDS_MAX: Final = 4096
"""The most ids that are packed on the event loop: 0.2 ms."""


async def pack(
    prompts: Sequence[list[int]], vocab_size: int, threads: FairThreads, tenant: str
) -> list[bytes] | None:
    """The result of `pack_slices`, made in place where the prompts are short."""
    slices = pack_slices(prompts, vocab_size)
    if sum(map(len, prompts)) > INLINE_IDS_MAX:
        return await threads.run(tenant, slices, holds=True)
    return at_once(slices)


def pack_slices(prompts: Sequence[list[int]], vocab_size: int) -> Slices[list[bytes] | None]:
    """The ids of each prompt, packed; None where one is outside of the vocabulary."""
    packed = []
    done = 0
    for ids in prompts:
        tokens = array(TOKENS)
        for at in range(0, len(ids), SLICE_IDS):
            part = ids[at : at + SLICE_IDS]
            try:
                tokens.extend(array(TOKENS, part))
            except OverflowError:  # negative, or no unsigned 32-bit integer
                return None
            if max(part) >= vocab_size:
                return None
            done += len(part)
            if done >= SLICE_IDS:
                done = 0
                yield
        packed.append(tokens.tobytes())
    return packed

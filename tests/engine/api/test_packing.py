"""Prompts are packed and checked in slices, and on threads where they are long."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.ask import prompt_packing
from engine.api.ask.prompt_packing import INLINE_IDS_MAX, pack, pack_slices
from engine.contract.packing import unpacked
from shared.fairness.fair_threads import FairThreads, Slices
from shared.text.prompts import SLICE_IDS

VOCAB = 1000
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
WRONG = st.sampled_from([-1, VOCAB, 2**32, -(2**40)])


def packed_in(prompts: list[list[int]]) -> tuple[list[bytes] | None, int]:
    """The result, and the number of slices."""
    slices, taken = pack_slices(prompts, VOCAB), 1
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: list[bytes] | None = end.value
            return result, taken
        taken += 1


@given(prompts=st.lists(IDS, max_size=5), wrong=st.none() | st.tuples(st.integers(0, 4), WRONG))
def test_what_is_packed_are_the_ids_and_none_that_is_no_tokens(
    prompts: list[list[int]], wrong: tuple[int, int] | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_packing, "SLICE_IDS", 3)
        result, slices = packed_in(prompts)
        assert result is not None
        assert [unpacked(ids).tolist() for ids in result] == prompts
        assert slices <= 1 + sum(map(len, prompts)) // 3
        if wrong is not None and prompts:
            at, token_id = wrong
            prompts[at % len(prompts)].append(token_id)
            assert packed_in(prompts)[0] is None


def test_a_slice_looks_at_a_bounded_number_of_ids() -> None:
    for prompts in ([[5] * 10 * SLICE_IDS], [[5] * 10] * SLICE_IDS):
        _, slices = packed_in(prompts)
        assert 10 <= slices <= 11


@pytest.mark.parametrize(("length", "on_threads"), [(INLINE_IDS_MAX, False), (INLINE_IDS_MAX + 1, True)])
async def test_long_prompts_are_packed_on_threads(
    length: int, on_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[bool]()

    async def run(
        threads: FairThreads, tenant: str, slices: Slices[list[bytes] | None], *, holds: bool
    ) -> list[bytes] | None:
        ran.append(holds)
        return await plain(threads, tenant, slices, holds=holds)

    plain = FairThreads.run
    monkeypatch.setattr(FairThreads, "run", run)
    threads = FairThreads(1)
    try:
        packed = await asyncio.wait_for(pack([[5] * length], VOCAB, threads, "tenant"), 30)
    finally:
        threads.close()
    assert packed is not None
    assert unpacked(packed[0]).tolist() == [5] * length
    assert ran == [True] * on_threads

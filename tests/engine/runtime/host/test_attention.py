"""The paged back ends against attention written as its definition, in float64, one query at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.host import torch_paged
from engine.runtime.host.torch_paged import PagedAttention, Workspace
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.seats import HostSlots

KV_HEADS, HEAD_DIM, PAGE_SIZE, MAX_LEN = 2, 8, 4, 80
Rows = Sequence[tuple[int, int]]

RAGGED: dict[str, Rows] = {
    # (start, length) per row, decodes first
    "one decode": [(0, 1)],
    "decodes": [(3, 1), (0, 1), (70, 1), (4, 1), (31, 1), (7, 1)],
    "whole prompts": [(0, 9), (0, 2), (0, 32)],
    "chunks": [(5, 6), (8, 1), (8, 8), (37, 43)],
    "mixed": [(11, 1), (64, 1), (0, 17), (13, 20), (4, 4), (0, 1)],
}


def naive(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """q [t, H, D] at positions start...; keys, values [start + t, Hkv, D]."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i in range(len(q)):
        position = start + i
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(q.shape[1]):
            k = keys[first : position + 1, head // group].double()
            v = values[first : position + 1, head // group].double()
            out[i, head] = (k @ q[i, head].double() / HEAD_DIM**0.5).softmax(dim=0) @ v
    return out


class Stage:
    """A cache full of NaN, in which each row's past lies on shuffled pages."""

    def __init__(self, rows: Rows, group: int, window: int | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rows = rows
        geometry = KVGeometry(1, KV_HEADS, PAGE_SIZE, HEAD_DIM, torch.float32)
        pages = len(rows) * MAX_LEN // PAGE_SIZE
        self.cache = KVCache(geometry, pages)
        self.cache.keys[0].fill_(torch.nan)
        self.cache.values[0].fill_(torch.nan)
        free = random.Random(seed).sample(range(pages), pages)
        self.slots = HostSlots(len(rows), MAX_LEN, PAGE_SIZE, vocab_size=2)
        self.spec = AttentionSpec(KV_HEADS * group, KV_HEADS, HEAD_DIM, [window])
        self.owned: list[list[int]] = []
        self.past = []
        for start, length in rows:
            count = -(-(start + length) // PAGE_SIZE)
            self.owned.append([free.pop() for _ in range(count)])
            self.past.append((torch.randn(start, KV_HEADS, HEAD_DIM), torch.randn(start, KV_HEADS, HEAD_DIM)))
        tokens = sum(length for _, length in rows)
        self.q = torch.randn(tokens, KV_HEADS * group, HEAD_DIM)
        self.k, self.v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)

    def run(self) -> Tensor:
        """First the past is written by the cache's own means, then the rows attend."""
        greedy = SamplingParams(seed=0, max_tokens=1)
        seated = [SlotAssignment.of(i, [0] * (s + n), s + n, greedy) for i, (s, n) in enumerate(self.rows)]
        self.slots.apply(Plan(0, [], seated, list(enumerate(self.owned)), [], [], [], []))
        for i, (k, v) in enumerate(self.past):
            if len(k):
                batch = PackedBatch.of(Plan(0, [], [], [], [i], [0], [len(k)], [Want.NOTHING]), self.slots)
                self.cache.write(0, k, v, batch.places)
        starts, lengths = [s for s, _ in self.rows], [n for _, n in self.rows]
        n = len(self.rows)
        batch = PackedBatch.of(
            Plan(0, [], [], [], list(range(n)), starts, lengths, [Want.NOTHING] * n), self.slots
        )
        workspace = Workspace(self.cache.geometry.dtype)
        return PagedAttention(self.cache, batch, self.spec, workspace)(0, self.q, self.k, self.v)

    def expected(self) -> Tensor:
        found, offset = [], 0
        for (start, length), (k, v) in zip(self.rows, self.past, strict=True):
            own = slice(offset, offset + length)
            keys, values = torch.cat((k, self.k[own])), torch.cat((v, self.v[own]))
            found.append(naive(self.q[own], keys, values, start, self.spec.windows[0]))
            offset += length
        return torch.cat(found)


@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
def test_equals_the_definition(rows: Rows, group: int, window: int | None) -> None:
    stage = Stage(rows, group, window)
    torch.testing.assert_close(stage.run().double(), stage.expected(), atol=2e-6, rtol=1e-5)


def test_where_the_pages_lie_changes_nothing() -> None:
    """To the bit: the same numbers in the same order."""
    stages = [Stage(RAGGED["mixed"], 2, None) for _ in range(2)]
    stages[1].owned = [pages[::-1] for pages in stages[1].owned]
    assert torch.equal(stages[0].run(), stages[1].run())


def test_small_workspaces_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets cut to a row each, prompts to two queries each."""
    monkeypatch.setattr(torch_paged, "WORKSPACE_BYTES_MAX", 1)
    monkeypatch.setattr(torch_paged, "QUERY_BLOCK", 2)
    stage = Stage([*RAGGED["decodes"], *RAGGED["chunks"]], 2, 6)
    torch.testing.assert_close(stage.run().double(), stage.expected(), atol=2e-6, rtol=1e-5)


def test_a_page_is_wiped_when_it_is_begun_and_kept_when_it_is_continued() -> None:
    stage = Stage([(0, 6)], 1, None)
    stage.run()
    second = stage.owned[0][1]
    assert torch.equal(stage.cache.keys[0][second, :, :2], stage.k[4:].transpose(0, 1))
    assert not stage.cache.keys[0][second, :, 2:].any()
    assert not stage.cache.values[0][second, :, 2:].any()

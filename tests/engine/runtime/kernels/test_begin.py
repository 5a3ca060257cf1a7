"""The kernel that begins a decode step, against torch's gathers."""

from __future__ import annotations

import pytest
import torch

from engine.runtime.kernels import begin
from engine.runtime.kernels.begin import begin_step
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Rope

SLOTS, PAGE = 5, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_that_a_step_knows_of_its_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order, several in one slot, at a page's begin and end; copies in several blocks."""
    monkeypatch.setattr(begin, "COPY_BLOCK", 32)
    torch.manual_seed(0)
    vocab, hidden, longest = 300, 80, 1000
    rotary = Rotary(Rope(10_000.0), 32, 1)
    embedding = torch.randn(vocab, hidden).to(dtype)
    tokens = torch.randint(vocab, (SLOTS, longest), dtype=torch.int32)
    page_table = torch.randint(1 << 30, (SLOTS, -(-longest // PAGE)), dtype=torch.int32)
    slots = torch.tensor([3, 0, 4, 4, 1], dtype=torch.int32)
    lengths = torch.tensor([1, 16, 17, 1000, 33], dtype=torch.int32)
    step, tables = begin_step(slots, lengths, tokens, page_table, embedding, rotary.table[None], PAGE)

    positions = lengths.long() - 1
    assert torch.equal(step.residual, embedding[tokens[slots, positions]])
    assert torch.equal(step.pages, page_table[slots, positions // PAGE].long())
    assert torch.equal(step.offsets, positions % PAGE)
    assert torch.equal(tables, page_table[slots])
    for found, expected in zip(step.angles[0], rotary.angles(positions, torch.float32), strict=True):
        torch.testing.assert_close(found, expected[:, 0], atol=1e-6, rtol=1e-6)

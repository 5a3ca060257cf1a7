"""The C++ decoder on ranks, each with its heads and its part of the MLP, beside the same alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runtime.collective.collective import Collective
from engine.runtime.collective.shard import Shard
from engine.runtime.models.spec import DecoderSpec, DeltaNet
from engine.runtime.native.decoder import misfit
from engine.runtime.setup.model_errors import CollectiveFailed
from tests import effort
from tests.engine.decoders import like, with_deltas
from tests.engine.runtime.parallel.test_shards import together
from tests.engine.runtime.test_native import GATED, ISAS, PAGE_SIZE, PLAIN, RAGGED, SHAPES, Stage, company

ROWS = RAGGED["mixed"]
WIDER = {"intermediate_size": 192, "heads": 8, "kv_heads": 4}
HYBRID = with_deltas(like(GATED, **WIDER), DeltaNet(4, 8, 32, 32, kernel=4))
SPLIT: dict[str, DecoderSpec] = {
    "delta nets": HYBRID,
    "plain, tied": like(PLAIN, **WIDER),
    "biases, one kv head for all": like(
        PLAIN, **WIDER | {"kv_heads": 1}, bias=True, out_bias=True, mlp_bias=True, tied_embeddings=False
    ),
    "norms on both sides, GeGLU, scales": like(SHAPES["norms on both sides, GeGLU, scales"], **WIDER),
    "no gate, untied, scaled logits": like(SHAPES["no gate, untied, scaled logits"], **WIDER),
    "side by side, centred norms": like(SHAPES["side by side, centred norms"], **WIDER),
}


def said(stage: Stage) -> tuple[Tensor, Tensor]:
    hidden = stage.run(ROWS)
    return hidden, stage.model.logits(hidden).clone()


def said_by(
    config: DecoderSpec, size: int, store: Path, dtype: torch.dtype, **native: Any
) -> list[tuple[Tensor, Tensor]]:
    def work(ranks: Collective) -> tuple[Tensor, Tensor]:
        return said(Stage.of(config, dtype, ISAS[0], threads=1, ranks=ranks, **native))

    return together(size, store, work)


@pytest.mark.parametrize("config", SPLIT.values(), ids=list(SPLIT))
@pytest.mark.parametrize("size", effort.some([2, 4], usual=1))
def test_ranks_compute_what_one_does(tmp_path: Path, config: DecoderSpec, size: int) -> None:
    hidden, logits = said(Stage.of(config, isa=ISAS[0]))
    found = said_by(config, size, tmp_path / "store", torch.float32)
    for own_hidden, own_logits in found:
        torch.testing.assert_close(own_hidden, hidden, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(own_logits, logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(own_logits.argmax(-1), logits.argmax(-1))
        assert torch.equal(own_logits, found[0][1]), "every rank has the same bits"


def test_ranks_pad_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    config = like(PLAIN, heads=6, kv_heads=3, intermediate_size=144, tied_embeddings=False)
    _, expected = said(Stage.of(config, isa=ISAS[0]))
    for _, own in said_by(config, 3, tmp_path / "store", torch.float32):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [HYBRID, SPLIT["plain, tied"]], ids=["delta nets", "plain"])
def test_bfloat16_on_ranks_is_as_near_to_float32_as_alone(tmp_path: Path, config: DecoderSpec) -> None:
    exact, _ = said(Stage.of(config, isa=ISAS[0]))
    alone, _ = said(Stage.of(config, torch.bfloat16, ISAS[0]))
    [(found, _), *_] = said_by(config, 2, tmp_path / "store", torch.bfloat16)
    assert (found.float() - exact).norm() <= 1.1 * (alone.float() - exact).norm()


def test_int8_on_ranks_is_as_near_to_float32_as_alone(tmp_path: Path) -> None:
    """A row's scale is its part's own where columns are split, so it is finer there."""
    exact, _ = said(Stage.of(HYBRID, isa=ISAS[0]))
    alone, _ = said(Stage.of(HYBRID, isa=ISAS[0], int8=True))
    [(found, _), *_] = said_by(HYBRID, 2, tmp_path / "store", torch.float32, int8=True)
    assert (found - exact).norm() <= 1.1 * (alone - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", effort.some([4, 2], usual=1))
def test_company_and_chunks_change_no_bits_on_ranks(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    """What several ranks have is added up in one order, wherever a token lies in a step."""
    together(size, tmp_path / "store", lambda ranks: company(HYBRID, dtype, ISAS[0], ranks=ranks))


def test_a_sum_that_is_not_to_be_had_is_raised() -> None:
    class Broken:
        shard = Shard(0, 2)
        neighbours = 2

        def all_reduce_(self, x: Tensor) -> Tensor:
            raise CollectiveFailed("the other rank is gone")

        def all_gather(self, x: Tensor) -> Tensor:
            raise CollectiveFailed("the other rank is gone")

    stage = Stage.of(HYBRID, isa=ISAS[0], ranks=Broken())
    with pytest.raises(CollectiveFailed, match="the other rank is gone"):
        stage.run([(0, 5)])


def test_what_the_kernels_do_not_split_goes_to_torch() -> None:
    wide = like(SHAPES["norms behind, two ropes"], **WIDER)
    assert misfit(wide, PAGE_SIZE) is None
    assert misfit(wide, PAGE_SIZE, Shard(0, 2)) == "on 2 ranks: norms over all heads"
    narrow = like(PLAIN, intermediate_size=80)
    assert misfit(narrow, PAGE_SIZE) is None
    assert misfit(narrow, PAGE_SIZE, Shard(0, 2)) == "intermediate_size 40 cannot be divided by 16"

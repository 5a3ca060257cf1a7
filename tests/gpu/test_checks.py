"""The checks of single kernels, walked through at toy size in Triton's interpreter, and what they say of a
kernel that is wrong. What they are for is on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.runtime.kernels.matmul import TILES, Tile
from tests.engine.runtime.kernels.cases import Shape
from tests.gpu import kernels
from tests.gpu.near import near, same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
TILE = Tile(16, 32, 4, 3)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CUDA": torch.device("cpu"),
        "LENGTHS": (70, 0, 16),
        "VERIFIED": (1, 3, 1),
        "VERIFIED_CONTEXTS": (20, 35, 0),
        "REPEATS": 1,
        "CHUNKS": (5, 1),
        "CONTEXTS": (20, 1),
        "PRODUCTS": ((1, 32, 64), (17, 33, 40)),
        "NORMED_PRODUCTS": ((1, 32, 64), (7, 34, 40)),
        "RESTORED": ((33, 200),),
        "SPLIT_PRODUCTS": ((17, 40, 64),),
        "TILES": (TILE,),
    }.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.nightly
def test_attention() -> None:
    shape = Shape(1, 2, 16, 16)
    for window in (None, 20):
        assert kernels.decode_attention(shape, torch.float32, window)["error"] < 1e-5
        assert kernels.prefill_attention(shape, torch.float32, window)["error"] < 1e-5


@pytest.mark.nightly
def test_attention_of_drafts() -> None:
    shape = Shape(1, 2, 16, 16)
    for window in (None, 20):
        assert kernels.decode_attention_of_drafts(shape, torch.float32, window)["error"] < 1e-5


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sampling_of_drafts() -> None:
    assert max(kernels.sampling_of_drafts(1.0, True)["stay"]) > 2


@pytest.mark.nightly
def test_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DELTA_ROWS", ((7, 1), (0, 1), (50, 40)))
    (net,) = kernels.DELTA_FLOAT32
    assert kernels.delta_nets(net, torch.float32)["error"] < 1e-5
    kernels.delta_chunks_cut(torch.float32)


@pytest.mark.nightly
def test_delta_nets_of_drafts() -> None:
    (net,) = kernels.DELTA_FLOAT32
    assert kernels.delta_nets_of_drafts(net, torch.float32)["error"] < 1e-5


@pytest.mark.parametrize("fp8", [False, True])
def test_products(fp8: bool) -> None:
    assert kernels.products(torch.float32, TILE, fp8)["error"] < 1e-5
    for gated in (False, True):
        assert kernels.whole_products(torch.float32, TILE, fp8, gated)["error"] < 1e-5


@pytest.mark.parametrize("fp8", [False, True])
def test_products_that_share_columns(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """float32 has no candidates on a card: here it stands for bfloat16, which the interpreter gets wrong."""
    splits = [Tile(16, 32, 4, 3, splits=2), Tile(32, 32, 4, 3, splits=3)]
    monkeypatch.setattr(kernels, "split_tiles_for", lambda *_: splits)
    monkeypatch.setattr(kernels, "ERROR_MAX", {torch.float32: 1e-5})
    assert kernels.split_products(torch.float32, fp8)["error"] < 1e-5


def test_products_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PRODUCTS", ((3, 32, 200),))
    assert kernels.grouped(torch.float32)["error"] < 1e-5
    kernels.restoring(torch.float16)


@pytest.mark.parametrize(
    "check", [kernels.beginning, kernels.norms, kernels.store, kernels.activation], ids=lambda c: c.__name__
)
def test_what_is_between(check: Callable[[torch.dtype], dict[str, Any]]) -> None:
    assert check(torch.float32)["error"] < 1e-5


def test_every_tile_is_checked_where_it_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    of = kernels.tiles
    bf16, fp8 = (of(torch.bfloat16, fp8, kernels.PRODUCTS) for fp8 in (False, True))
    assert of(torch.float32, False, kernels.PRODUCTS) == [TILES[-1]]
    assert set(TILES) < set(bf16) < set(fp8)
    assert len(fp8) == len({str(tile) for tile in fp8}), "rows are told apart by name"


def test_a_wrong_result_is_described() -> None:
    expected = torch.ones(3, 4)
    found = expected.clone()
    found[1, 2] = 3.0
    with pytest.raises(
        AssertionError, match=r"relative error 5.77e-01, at most 1e-02; worst at \[1, 2\]: 3 for 1"
    ):
        near(found, expected, 1e-2)
    with pytest.raises(AssertionError, match=r"twice: 1 of 12, from \[1, 2\] to \[1, 2\].* 1: 2.0e\+00"):
        same(found, expected, "twice")
    found[0, 1] = torch.nan
    with pytest.raises(AssertionError, match=r"not finite: 1 of 12, from \[0, 1\]"):
        near(found, expected, 1e-2)
    same(found, found.clone(), "NaN is NaN")
    assert near(expected, expected, 1e-9) == 0.0


def test_a_token_drawn_beside_the_cpus_is_its_neighbour_in_the_order_of_the_draw() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert kernels.neighbours(logits, 1, 2, {"temperature": 3.0})
    assert not kernels.neighbours(logits, 1, 3, {"min_p": 0.1})
    assert kernels.neighbours(logits, 1, 3, {"top_p": 0.99})
    assert not kernels.neighbours(logits, 1, 2, {"top_k": 3})

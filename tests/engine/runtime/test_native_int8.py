"""int8 weights: products of whole numbers beside the same in Python, on every instruction set.

`emulated` is a library that computes as processors with VNNI do, on any processor: their one instruction is
written out in others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from engine.runtime.models.spec import Names
from engine.runtime.native import build
from engine.runtime.native.decoder import library
from engine.runtime.weights.checkpoint import ALL, TensorPart
from tests.engine.decoders import like
from tests.engine.runtime.test_native import ISAS, PLAIN, RAGGED, SHAPES, Stage, Weights, company

GROUP: Final = 128
"""As in int8.h."""
EMULATED: Final = "emulated"
HIDDEN: Final = 304
"""Two groups and a part of one."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("native") / "emulated.so"
    flags = [*build.FLAGS, *build.ISAS[_base()], "-O1", "-DPENSTOCK_EMULATE_VNNI"]
    subprocess.run([build.compiler(), *flags, str(build.HERE / build.SOURCE), "-o", str(made)], check=True)
    return made


@pytest.fixture(params=[*ISAS, EMULATED])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the libraries of the product are called; `emulated` stands in for one."""
    if request.param != EMULATED:
        yield request.param
        return
    path = request.getfixturevalue("emulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.runtime.native.decoder.library_path", lambda isa: path)
        library.cache_clear()
        yield _base()
    library.cache_clear()


def _base() -> str:
    return next(isa for isa in ISAS if "-mavx512vnni" not in build.ISAS[isa])


@pytest.fixture
def levels(request: pytest.FixtureRequest, isa: str) -> int:
    """The largest whole number that an activation becomes."""
    is_emulated = EMULATED in request.node.callspec.id
    return 127 if is_emulated or "-mavx512vnni" in build.ISAS[isa] else 32767


class Head(Weights):
    """A head of whole numbers up to 127 and down to -127, by 64; everything else is made up."""

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        if list(names) != [Names().embedding]:
            return super().stack(names, rows, *columns, part=part)
        return whole_weights(rows[0], columns[0]) / 64


def whole_weights(rows: int, columns: int) -> Tensor:
    weights = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(1)).float()
    weights[:, 0] = 127
    weights[0] = 127
    weights[1] = -127
    return weights


def head_of(isa: str, dtype: torch.dtype = torch.float32) -> Stage:
    return Stage.of(like(PLAIN, hidden_size=HIDDEN), dtype, isa, int8=True, source=Head(dtype))


@pytest.mark.slow
def test_products_are_those_of_whole_numbers(isa: str, levels: int) -> None:
    """With the largest numbers too, where a sum of two products of bytes has more than 16 bits."""
    model = head_of(isa).model
    shape = (23, HIDDEN)
    whole = torch.randint(-levels, levels + 1, shape, generator=torch.Generator().manual_seed(2)).float()
    whole[:, ::GROUP] = levels  # the scale of each group is a power of two
    whole[0], whole[1], whole[2, ::2] = levels, -levels, -levels
    found = model.logits(whole / 1024).clone()
    expected = (whole.double() @ whole_weights(PLAIN.vocab_size, HIDDEN).double().T) / 1024 / 64
    size = (whole.double().abs() @ whole_weights(PLAIN.vocab_size, HIDDEN).double().abs().T) / 1024 / 64
    assert ((found.double() - expected).abs() <= 1e-6 * size).all()
    alone = torch.cat([model.logits(row[None] / 1024).clone() for row in whole])
    assert torch.equal(found, alone), "one row is computed as many are"


def test_a_huge_element_costs_its_group_alone(isa: str, levels: int) -> None:
    model = head_of(isa).model
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))
    plain = model.logits(x).clone()
    x[1, 5] = 1e4
    found = model.logits(x).clone()
    assert torch.equal(found[[0, 2]], plain[[0, 2]])
    weights = whole_weights(PLAIN.vocab_size, HIDDEN).double() / 64
    error = (found.double() - x.double() @ weights.T).abs()
    groups = list(zip(x.double().abs().split(GROUP, dim=1), weights.abs().split(GROUP, dim=1), strict=True))
    bound = sum(
        (part.amax(1, keepdim=True) / levels / 2 * (1 + 1e-4) * own.sum(1) for part, own in groups),
        1e-6 * (x.double().abs() @ weights.abs().T),
    )
    assert (error <= bound).all()
    without = x.clone()
    without[1, :GROUP] = 0
    other = model.logits(without).clone().double() - without.double() @ weights.T
    assert other[1].abs().max() <= 1.1 * sum(
        part[1].amax() / levels / 2 * own.sum(1).amax() for part, own in groups[1:]
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 7, GROUP, HIDDEN - 1])
def test_what_is_not_finite_shows_in_its_row(isa: str, bad: float, at: int) -> None:
    model = head_of(isa).model
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    x[1, at] = bad
    logits = model.logits(x)
    assert logits[1].isnan().all()
    assert logits[[0, 2]].isfinite().all()


def test_tiny_and_huge_numbers(isa: str) -> None:
    x = torch.stack([torch.zeros(HIDDEN), torch.full((HIDDEN,), 1e-42), torch.full((HIDDEN,), 1e30)])
    logits = head_of(isa).model.logits(x)
    assert not logits[0].any()
    assert logits[1].abs().max() < 1e-35
    assert logits[2].isfinite().all(), "and huge ones have a scale as well"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_nothing(isa: str, dtype: torch.dtype) -> None:
    company(like(PLAIN, hidden_size=HIDDEN, windows=(None, 24), qk_norm="heads"), dtype, isa, int8=True)
    company(SHAPES["delta nets, odd heads"], dtype, isa, int8=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_close(isa: str, levels: int, dtype: torch.dtype, tied: bool) -> None:
    most = 0.03 if levels > 127 else 0.045
    config, rows = like(PLAIN, tied_embeddings=tied), RAGGED["mixed"]
    exact, found = Stage.of(config), Stage.of(config, dtype, isa, int8=True)
    wanted, hidden = exact.run(rows), found.run(rows)
    assert 1e-4 < (hidden.float() - wanted).norm() / wanted.norm() < most
    logits, wanted_logits = found.model.logits(hidden), exact.model.logits(wanted)
    assert (logits - wanted_logits).norm() / wanted_logits.norm() < most

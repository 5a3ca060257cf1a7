"""Flat distributions on the device: candidates in sorted runs give the CPU's tokens, one for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE
from engine.contract.packing import Biases
from engine.runtime.device import device_sampling as device_sampling
from tests.effort import some
from tests.engine.runtime.kernels.test_sampling import VOCAB, histories, on_cpu, on_device, params

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, where a row is not finite

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks of two runs, the last not full; more than 40 candidates are sorted."""
    monkeypatch.setattr(device_sampling, "CHUNK", 128)
    monkeypatch.setattr(device_sampling, "RUN", 64)
    monkeypatch.setattr(device_sampling, "CANDIDATE_BLOCK", 128)
    monkeypatch.setattr(device_sampling, "GATHERED_MAX", 40)


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 3.0},
    {"top_p": 0.999999999, "temperature": 0.3},
    {"top_k": 290},
    {"top_k": 200, "top_p": 0.7, "min_p": 0.02},
    {"top_p": 0.99, "min_p": 0.3},
    {"top_k": 5},
    {"top_p": 0.9, "logit_bias": Biases.of(((3, 2.0), (299, 3.0))), "frequency_penalty": 0.5},
]


def kinds() -> dict[str, Tensor]:
    torch.manual_seed(1)
    equals = torch.randint(3, (len(CUTS), VOCAB)).float() * 0.5
    far = torch.randn(len(CUTS), VOCAB)
    far[:, ::2] = torch.finfo(torch.float32).min
    return {"flat": torch.randn(len(CUTS), VOCAB) * 0.3, "equals": equals, "infinitely far": far}


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(["equals", "infinitely far", "flat"], usual=1))
def test_a_flat_row_gives_the_cpus_token(kind: str) -> None:
    """Cuts of every kind, beside a row with few candidates. Sorted rows hold each token once, in runs."""
    logits = kinds()[kind]
    asked = [params(seed=(1 << 63) + row * 977, **cut) for row, cut in enumerate(CUTS)]
    past = histories(len(CUTS), 2)
    scratch = device_sampling.SamplingScratch.empty(len(CUTS), VOCAB, logits.dtype, CPU)
    scratch.candidates.fill_(-1)
    assert on_device(logits, asked, past, scratch=scratch)[0] == on_cpu(logits, asked, past)
    whole = 0
    for row in scratch.candidates:
        if (row >= 0).all():
            whole += 1
            assert (row & 0xFFFFFFFF).sort().values.tolist() == list(range(VOCAB))
            assert all((run.diff() > 0).all() for run in row.split(64))
    assert whole >= 4


def test_a_flat_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 200] = torch.nan
    asked = [params(seed=row, top_p=0.9) for row in range(2)]
    found = on_device(logits, asked, histories(2, 1))[0]
    assert found[0] == NUMERIC_FAILURE
    assert found == on_cpu(logits, asked, histories(2, 1))

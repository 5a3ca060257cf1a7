"""Penalties look at the tokens of a sequence alone, and at how often each is in its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.contract.messages import SamplingParams
from engine.runtime.step.edits import History
from tests.engine.runtime.host.test_sampler import Seats

VOCAB = 4096


@pytest.mark.parametrize("added", [0, 3, 8])
def test_each_token_is_there_once_with_its_number_in_the_output(added: int) -> None:
    prompt, output = [5, 9, 5], [7, 9, 7, 7, 0, 9, 11, 4095]
    history = History(prompt, output[: len(output) - added], VOCAB, len_max=len(prompt) + len(output))
    for token in output[len(output) - added :]:
        history.append(token)
    ids, counts = history.present
    assert len(ids) == len({*prompt, *output})
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
        token: output.count(token) for token in (*prompt, *output)
    }


def test_a_vocabulary_may_be_smaller_than_the_longest_sequence() -> None:
    history = History([0, 1], [1], vocab_size=3, len_max=100)
    for token in (2, 0, 2, 1):
        history.append(token)
    assert sorted(zip(*(column.tolist() for column in history.present), strict=True)) == [
        (0, 1),
        (1, 2),
        (2, 2),
    ]


class Passes(TorchDispatchMode):
    """The number of operations whose result is as large as the vocabulary."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += isinstance(result, torch.Tensor) and result.numel() >= VOCAB
        return result


def test_penalties_take_no_passes_over_the_vocabulary() -> None:
    """Beside what any edit of a row takes, to take its copy and to clamp it, there is one operation, which
    puts the penalised logits back."""
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    numbers = []
    for fields in ({"min_tokens": 8}, {"min_tokens": 8, **penalties}):
        seats = Seats(VOCAB)
        seats.add(SamplingParams(seed=1, max_tokens=8, temperature=0.0, **fields), [5, 9, 5], [7, 9, 7])
        with Passes() as passes:  # type: ignore[no-untyped-call]
            seats.sample(torch.randn(1, VOCAB))
        numbers.append(passes.number)
    plain, penalised = numbers
    assert penalised - plain <= 1

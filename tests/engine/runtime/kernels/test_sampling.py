"""The device's sampler in the interpreter: the CPU's tokens, one for one, and so its distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE, SamplingParams, SlotAssignment, agreed
from engine.contract.packing import Biases
from engine.runtime.device import device_sampling as device_sampling
from engine.runtime.device.device_sampling import DeviceSampling
from engine.runtime.host import sampler
from engine.runtime.step.edits import Edits
from engine.runtime.step.protocols import Ahead
from engine.runtime.step.seats import SamplingColumns, Seat
from tests.effort import some
from tests.engine.runtime.host.test_sampler import CUTS, EXTREMES, extreme_logits, extreme_params, mask_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, where a row is not finite

CPU = torch.device("cpu")
VOCAB = 300


def seat(columns: DeviceSampling, slot: int, params: SamplingParams, prompt: Tensor, output: Tensor) -> None:
    """Write one slot's parameters, and count its sequence's tokens; prompt and output [n] int, on the device.
    tests/gpu calls it too."""
    columns.seat_all([slot], [params], [len(prompt)])
    if params.needs_history:
        columns.count(slot, prompt, output)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last not full; candidates in blocks of which a row needs several."""
    monkeypatch.setattr(device_sampling, "CHUNK", 128)
    monkeypatch.setattr(device_sampling, "CANDIDATE_BLOCK", 128)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 1} | settings))


def histories(rows: int, seed: int, vocab: int = VOCAB) -> list[tuple[Tensor, Tensor]]:
    """Prompt and output of each row."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int) -> Tensor:
        return torch.randint(vocab, (length,), generator=generator)

    return [(drawn(5 + row), drawn(row % 4)) for row in range(rows)]


def seated(
    vocab: int, asked: Sequence[SamplingParams], past: Sequence[tuple[Tensor, Tensor]]
) -> tuple[SamplingColumns, list[Seat]]:
    columns, seats = SamplingColumns.empty(len(asked), vocab), []
    for slot, (own, (prompt, output)) in enumerate(zip(asked, past, strict=True)):
        columns.seat(slot, own, vocab)
        ids = [*prompt.tolist(), *output.tolist()]
        edits = Edits.of(SlotAssignment.of(slot, ids, len(prompt), own), vocab, vocab)
        seats.append(Seat(own, len(prompt), len(ids), edits=edits))
    return columns, seats


def on_cpu(
    logits: Tensor,
    asked: Sequence[SamplingParams],
    past: list[tuple[Tensor, Tensor]],
    masks: Sequence[bytes] = (),
) -> list[int]:
    columns, seats = seated(logits.shape[1], asked, past)
    return sampler.sample(logits, list(range(len(asked))), seats, columns, masks=masks).tolist()


def on_device(
    logits: Tensor,
    asked: Sequence[SamplingParams],
    past: list[tuple[Tensor, Tensor]],
    device: torch.device = CPU,
    scratch: device_sampling.SamplingScratch | None = None,
    masks: Sequence[bytes] = (),
) -> tuple[list[int], Tensor, DeviceSampling]:
    """Rows sit in slots from the last to the first. tests/gpu calls it too."""
    rows, vocab = logits.shape
    columns = DeviceSampling.empty(rows, vocab, device)
    scratch = scratch or device_sampling.SamplingScratch.empty(rows, vocab, logits.dtype, device)
    scratch.edited.fill_(torch.nan)
    for row, (own, (prompt, output)) in enumerate(zip(asked, past, strict=True)):
        seat(columns, rows - 1 - row, own, prompt.to(device), output.to(device))
    masked = {rows - 1 - row: mask for row, mask in enumerate(masks) if mask}
    if masked:
        columns.mask(list(masked), list(masked.values()))
    slots = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
    lengths = [len(prompt) + len(output) for prompt, output in past]
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    known = torch.full((rows, max(lengths) + 1), -7, dtype=torch.int32, device=device)
    tokens, logprobs = device_sampling.sample(logits.to(device), slots, positions, columns, scratch, known)
    at = slots.long(), positions.long()
    assert torch.equal(known[at], tokens.clamp_min(0).int())
    assert (known != -7).sum() == rows, "nothing else is written"
    return tokens.tolist(), logprobs.cpu(), columns


LIMITS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.05},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "top-p of nearly all": {"top_p": 0.9999, "temperature": 3.0},
    "top-p of nothing": {"top_p": 1e-9},
    "all at once": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    "k beyond what is near": {"top_k": 290, "temperature": 0.2},
    "p beyond what is near": {"top_p": 0.999999999, "temperature": 0.3},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_a_seed_gives_the_cpus_tokens(limits: dict[str, Any]) -> None:
    torch.manual_seed(1)
    rows = 3
    logits = torch.randn(rows, VOCAB) * 3
    asked = [params(seed=(1 << 63) + row * 977, **limits) for row in range(rows)]
    past = histories(rows, 2)
    found, logprobs, _ = on_device(logits, asked, past)
    assert found == on_cpu(logits, asked, past)
    own = logits.log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, own, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("limits", [LIMITS["greedy"], LIMITS["plain"], LIMITS["all at once"]], ids=str)
def test_masks_give_the_cpus_tokens(limits: dict[str, Any]) -> None:
    """Beside rows without one, on top of the other edits, of few tokens and of all but one, and where those
    that are allowed are held back. The log-probabilities stay the model's own."""
    torch.manual_seed(3)
    own: list[tuple[set[int] | None, dict[str, Any]]] = [
        ({5}, {}),
        (None, {}),
        (set(range(VOCAB)) - {7}, {"repetition_penalty": 1.4, "logit_bias": Biases.of([(7, 50.0)])}),
        ({31, 32, 127, 128, 299}, {"frequency_penalty": 0.5}),
        ({9, 130}, {"min_tokens": 9, "stop_token_ids": (9, 130)}),
    ]
    logits = torch.randn(len(own), VOCAB) * 3
    asked = [params(seed=row * 977, **({**limits, **more})) for row, (_, more) in enumerate(own)]
    masks, past = [mask_of(allowed, VOCAB) for allowed, _ in own], histories(len(own), 2)
    found, logprobs, _ = on_device(logits, asked, past, masks=masks)
    assert found == on_cpu(logits, asked, past, masks)
    assert all(allowed is None or token in allowed for token, (allowed, _) in zip(found, own, strict=True))
    raw = logits.log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, raw, atol=2e-6, rtol=1e-5)


def test_no_more_candidates_than_are_needed() -> None:
    """Logits 0.1 nats apart: 40 of them in each rung of 4 nats, and the best."""
    logits = torch.linspace(0, -0.1 * (VOCAB - 1), VOCAB)[None] - 0.01
    e = torch.e
    wanted: list[tuple[dict[str, Any], int]] = [
        ({"top_k": 5}, 40),
        ({"top_k": 40}, 40),
        ({"top_k": 41}, 80),
        ({"top_k": 100}, 120),
        ({"top_k": 160, "top_p": 0.1}, 160),
        ({"top_k": 161}, VOCAB),
        ({"top_p": 1 - e**-3.9}, 40),
        ({"top_p": 1 - e**-4.1}, 80),
        ({"top_p": 1 - e**-17}, VOCAB),
    ]
    logits[0, 0] += 0.005  # the first of each rung is then just beyond its edge
    for limits, candidates in wanted:
        scratch = device_sampling.SamplingScratch.empty(1, VOCAB, logits.dtype, CPU)
        scratch.candidates.fill_(-1)
        asked, past = [params(**limits)], histories(1, 0)
        assert on_device(logits, asked, past, scratch=scratch)[0] == on_cpu(logits, asked, past), limits
        assert (scratch.candidates >= 0).sum() == candidates, limits


@pytest.mark.parametrize("limits", [{"top_k": 10}, {"top_p": 0.5}, {"temperature": 0.0}, {}], ids=str)
def test_equals_are_told_apart_by_id(limits: dict[str, Any]) -> None:
    """Logits of four values: cuts go through equals, and every draw lands among them."""
    torch.manual_seed(0)
    logits = torch.randint(4, (3, VOCAB)).float()
    asked = [params(seed=row, **limits) for row in range(3)]
    assert on_device(logits, asked, histories(3, 3))[0] == on_cpu(logits, asked, histories(3, 3))


def test_edits_and_neighbours_of_every_kind() -> None:
    """Penalties, biases, held stop tokens; greedy, random and truncated rows in one batch; counts go on."""
    torch.manual_seed(4)
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.1, "presence_penalty": -0.7},
        {"logit_bias": Biases.of(((3, 8.0), (64, -100.0), (299, 9.0)))},
        {"stop_token_ids": (1, 2, 299, 5000), "min_tokens": 3},
        {
            "repetition_penalty": 0.6,
            "logit_bias": Biases.of(((7, 9.0),)),
            "stop_token_ids": (7,),
            "min_tokens": 9,
        },
        {},
    ]
    limits: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.7}]
    asked = [params(seed=i, **edit, **limit) for i, edit in enumerate(edits) for limit in limits]
    past = histories(len(asked), 5)
    logits = torch.randn(len(asked), VOCAB) * 2
    before = logits.clone()
    found, logprobs, columns = on_device(logits, asked, past)
    assert found == on_cpu(logits, asked, past)
    assert torch.equal(logits, before)
    own = logits.log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, own, atol=2e-6, rtol=1e-5)
    for row, (own_params, (_, output)) in enumerate(zip(asked, past, strict=True)):
        expected = torch.bincount(torch.tensor([*output.tolist(), found[row]]), minlength=VOCAB)
        counted = columns.counts[len(asked) - 1 - row, 0]
        assert torch.equal(counted, expected.int() if own_params.needs_history else torch.zeros_like(counted))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(list(extreme_logits()), usual=1))
def test_extreme_parameters_draw_what_the_cpu_draws(name: str) -> None:
    asked = [extreme_params(extreme | cut, seed) for seed, extreme in enumerate(EXTREMES) for cut in CUTS]
    logits = extreme_logits()[name].expand(len(asked), -1).contiguous()
    past = [(torch.tensor([3, 20, 25, 30]), torch.tensor([], dtype=torch.int64))] * len(asked)
    expected = on_cpu(logits, asked, past)
    assert min(expected) >= 0
    assert on_device(logits, asked, past)[0] == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5}]
    asked = [params(**kinds[row % 3]) for row in range(6)]
    logits[:3, 200] = bad
    found = on_device(logits, asked, histories(6, 1))[0]
    assert found[:3] == [NUMERIC_FAILURE] * 3
    assert found == on_cpu(logits, asked, histories(6, 1))


# -- rows that verify drafts ----------------------------------------------------------------------


@dataclass
class Verified:
    """Rows with drafts, each with logits of its own behind its known tokens and behind each draft."""

    asked: list[SamplingParams]
    past: list[tuple[Tensor, Tensor]]
    drafts: list[list[int]]
    logits: Tensor
    masks: list[bytes]
    """A token's each, or none."""

    def on_cpu(self) -> list[list[int]]:
        columns, seats = seated(VOCAB, self.asked, self.past)
        slots = range(len(seats))
        found = sampler.sample_ahead(self.logits, slots, seats, self.drafts, columns, masks=self.masks)
        rest = iter(found.tolist())
        return [[next(rest) for _ in range(len(own) + 1)] for own in self.drafts]

    def on_device(self, device: torch.device = CPU) -> tuple[list[list[int]], DeviceSampling, Tensor]:
        """tests/gpu calls it, too. -> the tokens of each row, the slots' columns, the known tokens."""
        rows, drafts = len(self.asked), sum(map(len, self.drafts))
        columns = DeviceSampling.empty(rows, VOCAB, device, drafts)
        known = torch.full((rows, 64), -7, dtype=torch.int32)
        slots: list[int] = []
        positions: list[int] = []
        before: list[int] = []
        for slot, (asked, (prompt, output), own) in enumerate(
            zip(self.asked, self.past, self.drafts, strict=True)
        ):
            seat(columns, slot, asked, prompt.to(device), output.to(device))
            length = len(prompt) + len(output)
            known[slot, length : length + len(own)] = torch.tensor(own)
            slots += [slot] * (len(own) + 1)
            positions += range(length, length + len(own) + 1)
            before += range(len(own) + 1)
        if self.masks:  # the places of a mask behind a draft are those behind the slots'
            spare = iter(range(rows, rows + drafts))
            places = [next(spare) if at else slot for slot, at in zip(slots, before, strict=True)]
            own_masks = {place: mask for place, mask in zip(places, self.masks, strict=True) if mask}
            first = [place for place in own_masks if place < rows]
            ahead = {place: mask for place, mask in own_masks.items() if place >= rows}
            columns.mask(first, [own_masks[place] for place in first], ahead)
            masked_by = [place if mask else -1 for place, mask in zip(places, self.masks, strict=True)]
        else:
            masked_by = [-1] * len(slots)

        def column(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        scratch = device_sampling.SamplingScratch.empty(len(slots), VOCAB, self.logits.dtype, device)
        scratch.agreed.fill_(1)
        known = known.to(device)
        tokens, _ = device_sampling.sample(
            self.logits.to(device),
            column(slots),
            column(positions),
            columns,
            scratch,
            known,
            Ahead(column(before), column(before), column(masked_by), max(before) + 1, column(before)),
        )
        rest = iter(tokens.tolist())
        return [[next(rest) for _ in range(len(own) + 1)] for own in self.drafts], columns, known.cpu()


def verified(right: float, *, masked: bool = False, seed: int = 6) -> Verified:
    """Of the drafts of each row a share is right."""
    edits: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.8, "temperature": 0.0},
        {"frequency_penalty": 1.1, "presence_penalty": -0.7},
        {"logit_bias": Biases.of(((3, 8.0),)), "frequency_penalty": 2.0, "top_p": 0.7},
        {"stop_token_ids": tuple(range(0, VOCAB, 3)), "min_tokens": 4, "top_k": 9},
        {"repetition_penalty": 0.5},
    ]
    lengths, rng = [4, 3, 1, 5, 2, 0], random.Random(seed)
    torch.manual_seed(seed)
    asked = [params(seed=row * 31, **edit) for row, edit in enumerate(edits)]
    tokens = sum(lengths) + len(lengths)
    allowed = [set(rng.sample(range(VOCAB), 40)) if masked and at % 3 else None for at in range(tokens)]
    masks = [mask_of(each, VOCAB) for each in allowed] if masked else []
    logits = torch.randn(tokens, VOCAB) * 2
    own = Verified(asked, histories(len(edits), 7), [[0] * length for length in lengths], logits, masks)
    for at in range(max(lengths)):
        for drafts, found in zip(own.drafts, own.on_cpu(), strict=True):
            if at < len(drafts):
                drafts[at] = found[at] if rng.random() < right else rng.randrange(VOCAB)
    return own


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_what_stands_behind_drafts_is_the_cpus_and_what_stays_is_counted(right: float, masked: bool) -> None:
    """Each token as if the drafts before it were known; counts and known tokens go on by those that stay."""
    own = verified(right, masked=masked)
    found, columns, known = own.on_device()
    expected = own.on_cpu()
    assert found == expected
    stays = [agreed(drafts, tokens) + 1 for drafts, tokens in zip(own.drafts, found, strict=True)]
    assert right < 1.0 or stays == [len(drafts) + 1 for drafts in own.drafts]
    for slot, (asked, (prompt, output), tokens, stay) in enumerate(
        zip(own.asked, own.past, found, stays, strict=True)
    ):
        length = len(prompt) + len(output)
        assert known[slot, length : length + stay].tolist() == tokens[:stay]
        all_of = torch.tensor([*output.tolist(), *tokens[:stay]])
        expected_counts = torch.bincount(all_of, minlength=VOCAB).int()
        counted = columns.counts[slot, 0]
        assert torch.equal(counted, expected_counts if asked.needs_history else torch.zeros_like(counted))


def test_a_token_behind_a_draft_that_is_not_finite_ends_what_stays() -> None:
    own = verified(1.0)
    own.logits[2, 5] = torch.nan
    found, columns, _ = own.on_device()
    assert found == own.on_cpu()
    assert found[0][2] == NUMERIC_FAILURE
    own.logits[6, 5] = torch.nan  # the second row has penalties
    found, columns, _ = own.on_device()
    assert found[1][1] == NUMERIC_FAILURE
    assert columns.counts[1, 0].sum() == len(own.past[1][1]) + 1

"""Sampling on the device: every slot's parameters and token counts, and the launches of the sampling kernels
(`engine.runtime.kernels.sampling`), which make the edits of `engine.runtime.step.edits`.

A plan may seat many sequences: their parameters are sent in one copy, and each column is written once. Biases
and held stop tokens, which few requests have, are sent separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from engine.contract.messages import END_TOKENS_MAX, SamplingParams
from engine.runtime.device.transfer import upload
from engine.runtime.kernels.dependent_launch import dependent
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.masses import MASS_BITS, RUNGS
from engine.runtime.kernels.ordering import GATHERED_MAX, PREFIX, RUN, order_kernel
from engine.runtime.kernels.sampling import (
    CANDIDATE_BLOCK,
    CHUNK,
    WARPS,
    choose_kernel,
    measure_kernel,
    settle_kernel,
    weigh_kernel,
)
from engine.runtime.step.edits import bias_of, held_stops_of, penalties_of
from engine.runtime.step.protocols import Ahead
from engine.runtime.step.seats import temperature_of
from shared.wire.shapes import LOGIT_BIAS_MAX, STOP_MAX, STOP_TOKEN_IDS_MAX

EDITS_MAX: Final = 1024
"""The most entries of `logit_bias` per sequence."""
STOPS_MAX: Final = 128
"""The most stop tokens per sequence that `min_tokens` holds back: a request's own, those that its stop
strings are, and the model's."""
assert EDITS_MAX >= LOGIT_BIAS_MAX
assert STOPS_MAX >= STOP_TOKEN_IDS_MAX + STOP_MAX + END_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Every slot's sampling parameters, on the device: `seat_all` writes them, a step reads them by slot."""

    temperature: Tensor
    top_k: Tensor
    """The number of tokens that top-k keeps; the vocabulary's size when it is off."""
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    penalties: Tensor
    """The repetition, frequency and presence penalties, [slots, 3] float32."""
    counts: Tensor
    """How often each token is in the output, and in the prompt: [slots, 2, vocab] int32. Read and written for
    slots with penalties only."""
    bias_ids: Tensor
    """The tokens of `logit_bias`, [slots, EDITS_MAX]."""
    bias_values: Tensor
    biases: Tensor
    """The number of entries of `logit_bias`, [slots]."""
    stop_ids: Tensor
    """The stop tokens that are held back, [slots, STOPS_MAX]."""
    stops: Tensor
    held_until: Tensor
    """The position before which stop tokens are not sampled, [slots] int32."""
    masks: Tensor
    """The tokens that a grammar allows now, a bit for each, [slots, words] int32, and further ones for tokens
    behind drafts. Read for masked slots only, and as `Ahead` says."""
    are_masked: Tensor
    """1 in slots whose sequences follow a grammar, else 0: [slots] int32."""

    @property
    def edits(self) -> tuple[Tensor, ...]:
        """The columns that decide how logits are edited."""
        biases, stops = (self.bias_ids, self.bias_values, self.biases), (self.stop_ids, self.stops)
        return self.penalties, self.counts, *biases, *stops, self.held_until, self.masks, self.are_masked

    @property
    def limits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The columns that decide which tokens may be drawn."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @staticmethod
    def empty(slots: int, vocab_size: int, device: torch.device, drafts: int = 0) -> DeviceSampling:
        """`drafts`: those of a step at most, over all rows."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        return DeviceSampling(
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(),
            top_p=zeros(dtype=torch.float64),
            min_p=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
            penalties=torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(slots, 1),
            counts=zeros(2, vocab_size),
            bias_ids=zeros(EDITS_MAX),
            bias_values=zeros(EDITS_MAX, dtype=torch.float32),
            biases=zeros(),
            stop_ids=zeros(STOPS_MAX),
            stops=zeros(),
            held_until=zeros(),
            masks=torch.zeros(slots + drafts, -(-vocab_size // 32), dtype=torch.int32, device=device),
            are_masked=zeros(),
        )

    def seat_all(
        self, slots: Sequence[int], asked: Sequence[SamplingParams], prompt_lens: Sequence[int]
    ) -> None:
        """Write the parameters of the sequences that take `slots`. For sequences with penalties, call
        `count`, too."""
        vocab_size = self.counts.shape[2]
        stops = [held_stops_of(p, vocab_size) for p in asked]
        assert all(len(own) <= STOPS_MAX for own in stops)
        assert all(len(p.logit_bias) <= EDITS_MAX for p in asked)
        integers = [
            [min(p.top_k, vocab_size) or vocab_size for p in asked],
            [len(p.logit_bias) for p in asked],
            [len(own) for own in stops],
            [length + p.min_tokens for p, length in zip(asked, prompt_lens, strict=True)],
        ]
        floats = [[temperature_of(p) for p in asked], [p.min_p for p in asked]]
        at, top_p, seed, (top_k, biases, held, held_until), (temperature, min_p), looks = upload(
            [
                np.array(slots, np.int64),
                np.array([p.top_p for p in asked], np.float64),
                np.array([p.seed for p in asked], np.uint64).view(np.int64),
                np.array(integers, np.int32),
                np.array(floats, np.float32),
                np.array([penalties_of(p) for p in asked], np.float32),
            ],
            self.counts.device,
        )
        for column, values in (
            (self.top_p, top_p),
            (self.seed, seed),
            (self.top_k, top_k),
            (self.biases, biases),
            (self.stops, held),
            (self.held_until, held_until),
            (self.temperature, temperature),
            (self.min_p, min_p),
            (self.penalties, looks),
        ):
            column.index_copy_(0, at, values)
        ids, values = zip(*map(bias_of, asked), strict=True)
        self._list(slots, self.bias_ids, ids, np.int32)
        self._list(slots, self.bias_values, values, np.float32)
        self._list(slots, self.stop_ids, stops, np.int32)

    def mask(self, slots: Sequence[int], masks: Sequence[bytes], ahead: Mapping[int, bytes] = {}) -> None:
        """Write the masks by which these slots sample next, and those of tokens behind drafts, by place."""
        words = self.masks.shape[1]
        own = [np.frombuffer(mask, np.int32)[:words] for mask in (*masks, *ahead.values())]
        table = np.zeros((len(own), words), np.int32)
        for row, mask in zip(table, own, strict=True):
            row[: len(mask)] = mask
        at, there = upload([np.array([*slots, *ahead], np.int64), table], self.masks.device)
        self.masks.index_copy_(0, at, there)
        self.are_masked.index_fill_(0, at[: len(slots)], 1)

    def unmask(self, slots: Sequence[int]) -> None:
        """Note that these slots have sequences without a grammar."""
        (at,) = upload([np.array(slots, np.int64)], self.masks.device)
        self.are_masked.index_fill_(0, at, 0)

    def count(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Count the tokens of a sequence that has penalties; prompt and output [n] int, on the device."""
        own = self.counts[slot].zero_()
        for row, tokens in enumerate((output, prompt)):
            own[row].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def _list(
        self,
        slots: Sequence[int],
        table: Tensor,
        rows: Sequence[ArrayLike],
        kind: type[np.int32 | np.float32],
    ) -> None:
        """Write the first entries of some rows of a table; nothing is sent when all are empty."""
        entries = [np.asarray(row, kind) for row in rows]
        if any(map(len, entries)):
            starts = np.array(slots, np.int64) * table.shape[1]
            places = [start + np.arange(len(own)) for start, own in zip(starts, entries, strict=True)]
            at, there = upload([np.concatenate(places), np.concatenate(entries)], table.device)
            table.view(-1).index_copy_(0, at, there)


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Memory that passes results between the four launches, for a limited number of rows."""

    edited: Tensor
    """The logits that tokens are drawn from in rows that ask for edits, [rows, vocab] float32."""
    are_edited: Tensor
    """1 in rows that are drawn from `edited`, else 0: [rows] int32."""
    logits: Tensor
    """A place for the logits that `sample` is given, the same in every step: [rows, vocab] in the model's
    type."""
    candidates: Tensor
    """The tokens near the best, [rows, vocab] int64: the bits of the distance above, the id below. By id, or
    where these are many all tokens in sorted runs."""
    mass_before: Tensor
    """The mass that each run has before every PREFIX-th token, [rows, chunks * CHUNK / PREFIX] int64."""
    measures: Tensor
    """Per chunk the best edited logit, the best logit, and the sum of exp(logit - best): [3, rows, chunks]
    float32."""
    places: Tensor
    """The id of each chunk's best edited logit, [rows, chunks] int32; NUMERIC_FAILURE where one is not
    finite."""
    masses: Tensor
    """The mass of each chunk, [rows, chunks] int64."""
    near_masses: Tensor
    """The mass within each distance from the best, [rows, chunks, RUNGS] int64."""
    near_counts: Tensor
    """The number of tokens within each distance, [rows, chunks, RUNGS] int32."""
    agreed: Tensor
    """1 where a token is the draft in its place, else 0: [rows] int32."""

    @property
    def edits(self) -> tuple[Tensor, Tensor]:
        """The logits that tokens are drawn from in rows that ask for edits, and which rows those are."""
        return self.edited, self.are_edited

    @property
    def weighed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The masses that the second launch finds."""
        return self.masses, self.near_masses, self.near_counts

    @property
    def ordered(self) -> tuple[Tensor, Tensor]:
        """The tokens that are near the best, and the masses before them."""
        return self.candidates, self.mass_before

    @staticmethod
    def empty(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> SamplingScratch:
        chunks = _chunks(vocab_size)
        return SamplingScratch(
            edited=torch.empty(rows, vocab_size, device=device),
            are_edited=torch.empty(rows, dtype=torch.int32, device=device),
            logits=torch.empty(rows, vocab_size, dtype=dtype, device=device),
            candidates=torch.empty(rows, vocab_size, dtype=torch.int64, device=device),
            mass_before=torch.empty(rows, chunks * CHUNK // PREFIX, dtype=torch.int64, device=device),
            measures=torch.empty(3, rows, chunks, device=device),
            places=torch.empty(rows, chunks, dtype=torch.int32, device=device),
            masses=torch.empty(rows, chunks, dtype=torch.int64, device=device),
            near_masses=torch.empty(rows, chunks, RUNGS, dtype=torch.int64, device=device),
            near_counts=torch.empty(rows, chunks, RUNGS, dtype=torch.int32, device=device),
            agreed=torch.empty(rows, dtype=torch.int32, device=device),
        )


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    columns: DeviceSampling,
    scratch: SamplingScratch,
    known: Tensor,
    ahead: Ahead | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [S, vocab], left unchanged; slots, positions [S] int32 -> tokens [S] int64, log-probabilities
    [S].

    The tokens are written to `known` [slots, any] int32 at `positions`, and counted for penalties. A token is
    NUMERIC_FAILURE where its row is not finite; 0 is written then. The log-probabilities are those of the
    model's own distribution, before any edits. `ahead`: of a step in which rows verify drafts, which lie in
    `known`; of each such row the tokens are counted that stay.
    """
    rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    assert known.is_contiguous()
    assert vocab_size == columns.counts.shape[2]
    assert vocab_size < 1 << 63 - MASS_BITS
    assert ahead is None or rows <= len(scratch.agreed)
    agreed = None if ahead is None else scratch.agreed
    tokens, logprobs = _chosen(logits, slots, positions, columns, scratch, known, ahead, agreed)
    if ahead is not None:
        own = columns.penalties, columns.counts, vocab_size
        launch(settle_kernel, (rows,), slots, ahead.before, tokens, agreed, *own, num_warps=1, **dependent())
    return tokens, logprobs


def draw(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    columns: DeviceSampling,
    scratch: SamplingScratch,
    known: Tensor,
) -> Tensor:
    """Draw as `sample` does, by the slots' parameters and the random numbers of these positions, what is not
    sampled yet: written to `known`, and not counted. -> tokens [S] int64"""
    return _chosen(logits, slots, positions, columns, scratch, known, None, scratch.agreed)[0]


def _chosen(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    columns: DeviceSampling,
    scratch: SamplingScratch,
    known: Tensor,
    ahead: Ahead | None,
    agreed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The launches that all rows need -> tokens and log-probabilities, as `sample` has them. `agreed`: where
    it is noted which tokens are the drafts in their places; None: tokens are counted for penalties."""
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    drafts = (None, None) if ahead is None else (ahead.before, ahead.masked_by)
    source, everyone = (logits, *scratch.edits, slots), (known, known.shape[1])
    by_chunk, run = (rows, _chunks(vocab_size)), {"GATHERED_MAX": GATHERED_MAX, "RUN": _run()}
    options = _sizes(vocab_size) | dependent()
    found = *scratch.measures, scratch.places
    launch(
        measure_kernel,
        by_chunk,
        *(*source, positions, *columns.edits, *drafts, *everyone, *found, vocab_size),
        EDITS_MAX=EDITS_MAX,
        STOPS_MAX=STOPS_MAX,
        CHUNK=CHUNK,
        num_warps=WARPS,
        **dependent(),
    )
    weighed = scratch.measures[0], *scratch.weighed
    launch(weigh_kernel, by_chunk, *source, *columns.limits, *weighed, vocab_size, **options)
    sorted_ = *weighed, *scratch.ordered
    launch(order_kernel, by_chunk, *source, *columns.limits[:3], *sorted_, vocab_size, **run, **options)
    launch(
        choose_kernel,
        (rows,),
        *(*source, positions, *columns.limits, columns.penalties, columns.seed, columns.counts),
        *(*found, *scratch.weighed, *scratch.ordered, tokens, logprobs, *everyone, agreed, vocab_size),
        CANDIDATE_BLOCK=CANDIDATE_BLOCK,
        RUNS_BLOCK=_power_of_two(-(-vocab_size // _run())),
        **run,
        **options,
    )
    return tokens, logprobs


def _chunks(vocab_size: int) -> int:
    return -(-vocab_size // CHUNK)


def _run() -> int:
    return min(RUN, CHUNK)


def _power_of_two(n: int) -> int:
    """The least power of two that is no less than `n`."""
    return 1 << (n - 1).bit_length()


def _sizes(vocab_size: int) -> dict[str, int]:
    return {"CHUNK": CHUNK, "CHUNKS_BLOCK": _power_of_two(_chunks(vocab_size)), "num_warps": WARPS}

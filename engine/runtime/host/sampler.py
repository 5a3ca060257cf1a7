"""Samples tokens from logits.

The reference distribution, in this order:

  1.-4. the edits (`engine.runtime.step.edits`)
  5. temperature 0, or one too small for float32: the largest logit, lowest id among equals, and done; else
     logits / temperature
  6. top-k: the k likeliest stay, lower ids first among equals
  7. top-p: of those, renormalised, the fewest that reach p together; the best one always
  8. min-p: of those, the tokens with at least min_p of the best one's probability
  9. renormalised, the token at u in the cumulative distribution, u being philox(seed, position)

Finite logits never become NaN on the way: differences of what step 4 leaves may be infinite, and are divided
by a temperature that is neither 0 nor infinite.

Every row is computed from that row alone, with sums in float64 and a fixed order, so that a token never
depends on the rest of the batch. Top-k and top-p take the tokens in order, likeliest first; a row without
either, a top-k of the whole vocabulary being none, draws in the order of ids.

Edits are made on copies of the rows that ask for them. The mask, and the steps behind it, are a `Draw`'s: the
network's own, or `draw_by_torch`, which sorts what top-k and top-p may keep. Of a large vocabulary that takes
so long that only the likeliest few are put in order (`CANDIDATES`); rows that need more are sorted one by
one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE
from engine.runtime.host.philox import uniforms
from engine.runtime.step.edits import forbid
from engine.runtime.step.logprobs import stable_topk
from engine.runtime.step.seats import SamplingColumns, Seat

CANDIDATES: Final = 256
"""The number of likeliest tokens that are put in order at first: sorting a vocabulary of 152k takes 15 times
as long."""
_SEED_BITS: Final = 2**64 - 1
CDF_BLOCK: Final = 128
"""Tokens per block of a cumulative sum. It divides the vocabulary of most models, so that these need no
padding."""


class Draw(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        columns: SamplingColumns,
        masks: Sequence[bytes] = (),
    ) -> Tensor:
        """Steps 4 to 9: tokens [r] int64 for these rows of logits [R, vocab] float32, each of a slot and at a
        position; NUMERIC_FAILURE where not finite. `masks`: a row's each, or none. Implementations draw the
        same tokens, unless u is nearer to the border between two than float32 weights are exact."""
        ...


def sample(
    logits: Tensor,
    slots: Sequence[int],
    seats: Sequence[Seat],
    columns: SamplingColumns,
    draw: Draw | None = None,
    masks: Sequence[bytes] = (),
) -> Tensor:
    """logits [S, vocab] float32, left unchanged -> tokens [S] int64, NUMERIC_FAILURE where not finite.
    `masks`: those of the plan."""
    draw = draw or draw_by_torch
    editors = [i for i, seat in enumerate(seats) if seat.edits.each and seat.edits.are_due(seat.output_len)]

    def drawn(logits: Tensor, rows: Sequence[int], which: Sequence[int]) -> Tensor:
        positions = [seats[i].known_len for i in which]
        own = [masks[i] for i in which] if masks else masks
        return draw(logits, rows, [slots[i] for i in which], positions, columns, own)

    everyone = range(len(seats))
    if not editors:
        return drawn(logits, everyone, everyone)
    others = [i for i in everyone if i not in set(editors)]
    tokens = torch.empty(len(seats), dtype=torch.int64)
    if others:
        tokens[others] = drawn(logits, others, others)
    edited = torch.index_select(logits, 0, torch.tensor(editors), out=columns.edited[: len(editors)])
    sound = _are_sound(edited)
    for row, i in zip(edited, editors, strict=True):
        seats[i].edits.edit(row, seats[i].output_len)
    tokens[editors] = drawn(edited, range(len(editors)), editors).where(sound, NUMERIC_FAILURE)
    return tokens


def sample_ahead(
    logits: Tensor,
    slots: Sequence[int],
    seats: Sequence[Seat],
    drafts: Sequence[Sequence[int]],
    columns: SamplingColumns,
    draw: Draw | None = None,
    masks: Sequence[bytes] = (),
) -> Tensor:
    """The tokens behind each slot's known ones and behind each of its drafts, as if all drafts before were
    known: logits [S, vocab] float32, for each slot those behind the known tokens and then those behind each
    draft -> tokens [S] int64. Each is what `sample` gives once the drafts before it are known, to the bit."""
    draw = draw or draw_by_torch
    lengths = [len(own) + 1 for own in drafts]
    own_slots = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    positions = [
        seat.known_len + at for seat, length in zip(seats, lengths, strict=True) for at in range(length)
    ]
    if not any(seat.edits.each for seat in seats):
        return draw(logits, range(len(logits)), own_slots, positions, columns, masks)
    edited, sound = logits.clone(), _are_sound(logits)
    row = 0
    for seat, own in zip(seats, drafts, strict=True):
        with seat.edits.ahead() as note:
            for at in range(len(own) + 1):
                if at and seat.edits.each:
                    note(own[at - 1])
                if seat.edits.each and seat.edits.are_due(seat.output_len + at):
                    seat.edits.edit(edited[row], seat.output_len + at)
                row += 1
    tokens = draw(edited, range(len(logits)), own_slots, positions, columns, masks)
    return tokens.where(sound, NUMERIC_FAILURE)


def draw_by_torch(
    logits: Tensor,
    rows: Sequence[int],
    slots: Sequence[int],
    positions: Sequence[int],
    columns: SamplingColumns,
    masks: Sequence[bytes] = (),
) -> Tensor:
    """Implements `Draw`."""
    own = logits if len(rows) == len(logits) else logits[list(rows)]
    at = torch.tensor(slots)
    sound = _are_sound(own)
    if masks:
        own = own.clone()
        for row, mask in zip(own, masks, strict=True):
            if mask:
                forbid(row, mask)
    tokens = own.argmax(dim=-1).where(sound, NUMERIC_FAILURE)
    is_random = (columns.temperature[at] > 0.0) & (tokens != NUMERIC_FAILURE)
    truncates = (columns.top_k[at] < logits.shape[1]) | (columns.top_p[at] < 1.0)
    for some, draw in ((is_random & truncates, _draw_truncated), (is_random & ~truncates, _draw_whole)):
        which = some.nonzero()[:, 0]
        if len(which):
            slot = at[which]
            best = own[which]
            scaled = (best - best.amax(dim=-1, keepdim=True)).div_(columns.temperature[slot, None])
            seeds = [seed & _SEED_BITS for seed in columns.seed[slot].tolist()]
            u = torch.from_numpy(uniforms(seeds, [positions[i] for i in which.tolist()]))
            tokens[which] = draw(scaled, slot, columns, u)
    return tokens


def _are_sound(logits: Tensor) -> Tensor:
    # Both are NaN where one is. A sum would be a single pass, and overflow.
    return logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()


def _draw_whole(scaled: Tensor, slots: Tensor, columns: SamplingColumns, u: Tensor) -> Tensor:
    """scaled [r, vocab], best 0; u [r] -> tokens [r] of rows that only min-p truncates."""
    return inverse_cdf(_above_min_p(scaled.exp_(), slots, columns), u)


def _draw_truncated(scaled: Tensor, slots: Tensor, columns: SamplingColumns, u: Tensor) -> Tensor:
    """scaled [r, vocab], best 0; u [r] -> tokens [r] of rows that top-k or top-p truncate.

    The likeliest `CANDIDATES` tokens are put in order; rows that may keep more are sorted whole, one by one.
    The result does not depend on it, since the first tokens of one order are those of the other.
    """
    top_k, top_p = columns.top_k[slots], columns.top_p[slots]
    # top-p is a share of the whole vocabulary's mass, unless top-k leaves less.
    mass = _blocks(scaled.exp())[1][:, -1].where(top_k == scaled.shape[1], 0.0)
    candidates = min(CANDIDATES, scaled.shape[1])
    values, ids = stable_topk(scaled, candidates)
    weights = _keep(values.exp_(), mass, top_k, top_p)
    short = (top_k > candidates) & ((mass == 0.0) | (weights[:, -1] > 0.0))
    tokens = ids.gather(1, inverse_cdf(_above_min_p(weights, slots, columns), u)[:, None])[:, 0]
    for i in short.nonzero()[:, 0].tolist():
        row = slice(i, i + 1)
        values, order = scaled[row].sort(dim=-1, descending=True, stable=True)
        weights = _keep(values.exp_(), mass[row], top_k[row], top_p[row])
        tokens[row] = order[0, inverse_cdf(_above_min_p(weights, slots[row], columns), u[row])]
    return tokens


def _above_min_p(weights: Tensor, slots: Tensor, columns: SamplingColumns) -> Tensor:
    """weights [r, n], of which the best is 1 -> the same, zero where min-p cuts."""
    return weights.masked_fill_(weights < columns.min_p[slots, None], 0.0)


def _keep(weights: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """weights [r, n] best first, zero where top-k or top-p cut. `mass` [r]; 0: the mass that top-k leaves."""
    column = torch.arange(weights.shape[1])
    weights = weights.masked_fill(column >= top_k[:, None], 0.0)
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    reach = top_p * torch.where(mass > 0.0, mass, sums[:, -1])
    # Off means off: rounding must not let a top_p of 1 cut the last of the tail.
    cut = (sums - weights >= reach[:, None]) & (top_p < 1.0)[:, None] & (column > 0)
    return weights.masked_fill(cut, 0.0)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """weights [r, n], at least one above zero per row; u [r] float64 in [0, 1) -> indices [r] int64.

    The first index whose cumulative weight exceeds u times the total. First the block is found, then the
    place within it, so that only the sums of blocks and one block are in float64.
    """
    blocks, ends = _blocks(weights)
    target = u * ends[:, -1]
    block = _first_above(ends, target)
    start = F.pad(ends, (1, 0)).gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(len(blocks)), block].cumsum(dim=-1, dtype=torch.float64)
    return (block * CDF_BLOCK + _first_above(inside, target - start)).clamp_max(weights.shape[1] - 1)


def _blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """weights [r, n] in blocks [r, n', CDF_BLOCK], and the cumulative weights at the blocks' ends [r, n']."""
    missing = -weights.shape[1] % CDF_BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, CDF_BLOCK)
    return blocks, blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """cdf [r, n] ascending, target [r] -> the first index at which it exceeds the target, [r].

    Rounding may not lift the target to the total: there is always such a place, and weight there. In
    a failed row there is none, and any place will do.
    """
    reachable = torch.minimum(target, torch.nextafter(cdf[:, -1], torch.zeros_like(target)))
    return torch.searchsorted(cdf, reachable[:, None], right=True)[:, 0].clamp_max(cdf.shape[1] - 1)

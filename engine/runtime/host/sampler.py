"""Samples tokens from logits.

The reference distribution, in this order:

  1. repetition penalty over prompt and output (positive logits divided, negative multiplied), then
     frequency and presence penalties over the output
  2. `logit_bias` added
  3. until `min_tokens` are out, stop tokens are excluded: their logits become float32's smallest number, and
     logits that edits have moved beyond float32 are clamped to its range
  4. temperature 0, or one too small for float32: the largest logit, lowest id among equals, and done; else
     logits / temperature
  5. top-k: the k likeliest stay, lower ids first among equals
  6. top-p: of those, renormalised, the fewest that reach p together; the best one always
  7. min-p: of those, the tokens with at least min_p of the best one's probability
  8. renormalised, the token at u in the cumulative distribution, u being philox(seed, position)

Finite logits never become NaN on the way: differences of what step 3 leaves may be infinite, and are divided
by a temperature that is neither 0 nor infinite.

Every row is computed from that row alone, with sums in float64 and a fixed order, so that a token
never depends on the rest of the batch. Rows that need no edit are not copied, rows that truncate
nothing are not sorted, and a batch that is all greedy is one argmax.

Most rows neither edit nor truncate. A network may draw these faster (`DrawPlain`); that is decided row by
row, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.messages import NUMERIC_FAILURE, SamplingParams
from engine.runtime.host.philox import uniforms
from engine.runtime.host.slots import SamplingColumns
from engine.runtime.logprobs import stable_topk
from engine.runtime.seats import Seat, repetition_penalty_of

CANDIDATES: Final = 256
"""The number of likeliest tokens that are put in order at first: sorting a vocabulary of 152k takes 15 times
as long."""
WIDENING: Final = 16
"""The factor by which more tokens are put in order when top-p reaches beyond the first ones."""
FLOAT_MAX: Final = torch.finfo(torch.float32).max
CDF_BLOCK: Final = 128
"""Tokens per block of a cumulative sum. It divides the vocabulary of most models, so that these need no
padding."""


class DrawPlain(Protocol):
    def __call__(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], columns: SamplingColumns
    ) -> Tensor:
        """Tokens [S] for rows whose seats are plain; results for other rows are undefined. The tokens are
        those of `sample`, unless u is nearer to the border between two than float32 weights are exact."""
        ...


def sample(
    logits: Tensor,
    slots: Sequence[int],
    seats: Sequence[Seat],
    columns: SamplingColumns,
    draw_plain: DrawPlain | None = None,
) -> Tensor:
    """logits [S, vocab] float32, left unchanged -> tokens [S] int64, NUMERIC_FAILURE where not finite."""
    if draw_plain is None:
        return _sample(logits, slots, seats, columns)
    tokens = draw_plain(logits, slots, [seat.known_len for seat in seats], columns)
    others = [i for i, seat in enumerate(seats) if not seat.is_plain]
    if others:
        own = logits if len(others) == len(seats) else logits[others]
        tokens[others] = _sample(own, [slots[i] for i in others], [seats[i] for i in others], columns)
    return tokens


def _sample(logits: Tensor, slots: Sequence[int], seats: Sequence[Seat], columns: SamplingColumns) -> Tensor:
    # Both are NaN where one is. A sum would be a single pass, and overflow.
    sound = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    edited = _edited(logits, seats)
    tokens = edited.argmax(dim=-1)
    for truncated in (False, True):
        rows = [i for i, seat in enumerate(seats) if seat.is_random and _truncates(seat) == truncated]
        if rows:
            tokens[rows] = _draw_rows(edited, rows, slots, seats, columns, truncated)
    return tokens.where(sound, NUMERIC_FAILURE)


def _truncates(seat: Seat) -> bool:
    """True if sampling needs the tokens in order. min-p alone does not."""
    return seat.sampling.top_k > 0 or seat.sampling.top_p < 1.0


def _draw_rows(
    logits: Tensor,
    rows: Sequence[int],
    slots: Sequence[int],
    seats: Sequence[Seat],
    columns: SamplingColumns,
    truncated: bool,
) -> Tensor:
    """Tokens [r] for the random rows `rows`, all of which truncate, or none."""
    own = logits if len(rows) == len(logits) else logits[rows]
    own_slots = torch.tensor([slots[i] for i in rows])
    scaled = (own - own.amax(dim=-1, keepdim=True)).div_(columns.temperature[own_slots, None])
    params = [seats[i].sampling for i in rows]
    if truncated:
        weights, ids = _likeliest(scaled, params, columns.top_k[own_slots], columns.top_p[own_slots])
    else:
        weights, ids = scaled.exp_(), None
    if any(p.min_p > 0.0 for p in params):  # the best weight is 1
        weights.masked_fill_(weights < columns.min_p[own_slots, None], 0.0)
    u = torch.from_numpy(uniforms([p.seed for p in params], [seats[i].known_len for i in rows]))
    index = inverse_cdf(weights, u)
    return index if ids is None else ids.gather(1, index[:, None])[:, 0]


def _likeliest(
    scaled: Tensor, params: Sequence[SamplingParams], top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """scaled [r, vocab], best 0; top_k, top_p [r] -> (weights, ids) [r, n], best first, zero where cut."""
    # top-p is a share of the whole vocabulary's mass, unless top-k leaves less.
    mass = torch.zeros(len(params), dtype=torch.float64)
    if any(p.top_k == 0 for p in params):
        mass = _blocks(scaled.exp())[1][:, -1].where(top_k == scaled.shape[1], 0.0)
    return _truncate(scaled, mass, top_k, top_p, max(CANDIDATES, *(p.top_k for p in params)))


def _truncate(
    scaled: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """The result of `_likeliest`, given the mass [r] of rows without top-k.

    Only the likeliest few tokens are put in order; rows whose top-p reaches beyond them try again with more.
    The result does not depend on the number tried, since it is a prefix of one order.
    """
    candidates = min(candidates, scaled.shape[1])
    values, ids = stable_topk(scaled, candidates)
    weights = _keep(values.exp(), mass, top_k, top_p)
    short = (top_k > candidates) & (weights[:, -1] > 0.0)
    if short.any():
        more = _truncate(scaled[short], mass[short], top_k[short], top_p[short], candidates * WIDENING)
        weights, ids = (F.pad(found, (0, more[0].shape[1] - candidates)) for found in (weights, ids))
        weights[short], ids[short] = more
    return weights, ids


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


def _edited(logits: Tensor, seats: Sequence[Seat]) -> Tensor:
    """Steps 1 to 3: an edited copy of the logits, or the logits themselves when no row edits."""
    editors = [i for i, seat in enumerate(seats) if _edits(seat)]
    if not editors:
        return logits
    edited = logits.clone()
    for i in editors:
        _edit(edited[i], seats[i])
    return edited


def _edits(seat: Seat) -> bool:
    params = seat.sampling
    return params.needs_history or seat.bias is not None or seat.output_len < params.min_tokens


def _edit(row: Tensor, seat: Seat) -> None:
    """Edit the logits of one row [vocab], in place."""
    params = seat.sampling
    if seat.history is not None:
        _penalise(row, seat.history, params)
    if seat.bias is not None:
        ids, values = seat.bias
        row[ids] += values
    if seat.output_len < params.min_tokens:
        row[[token for token in params.stop_token_ids if token < len(row)]] = -FLOAT_MAX
    row.clamp_(-FLOAT_MAX, FLOAT_MAX)


def _penalise(row: Tensor, history: Tensor, params: SamplingParams) -> None:
    """Penalise the logits of one row [vocab], in place. history [2, vocab]: counts of output and prompt."""
    output, prompt = history
    penalty = repetition_penalty_of(params)
    if penalty != 1.0:
        punished = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where((output > 0) | (prompt > 0), punished, row))
    row -= params.frequency_penalty * output
    row -= params.presence_penalty * (output > 0)

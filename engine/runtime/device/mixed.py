"""Steps with parts of prompts as CUDA graphs, one for each of a few numbers of tokens.

To launch a step of a few hundred tokens kernel by kernel takes longer than a small model computes, and every
running stream waits for it. So its layers are captured, too, up to the final hidden states. What differs from
one such step to the next besides its tokens: how many rows decode, and how prompts are cut.

  1. A step is padded to the next bucket of tokens. Padding tokens are those of the padding slot.
  2. Any of the first tokens may be a row that decodes: decode attention runs over as many as there are slots,
     with lengths of 0 for tokens that are none.
  3. Prefill attention is given as many tiles as the bucket can need for up to `CHUNKS_MAX` chunks. The others
     belong to a chunk of no tokens, and end at once.
  4. The host lists chunks and tiles, and sends them with the tokens' slots and positions in one copy. All
     else is gathered on the device, as in a decode step (`graphs.py`).

Sampling stays outside: it differs from step to step, and takes ten launches beside hundreds.

A bucket is kept only where its replay is faster than the launches of the smallest step that would use it. The
larger a model is, the less its launches matter, and the more padding does. Other steps are launched kernel by
kernel, as are those with more chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from engine.runtime.attention.triton_paged import FRESH_TOKENS_MIN, TritonDecode, TritonPrefillStep
from engine.runtime.device.device_decoder import DeviceDecoder
from engine.runtime.device.graphs import Captured, DecodeInputs, GraphDevice
from engine.runtime.device.slots import DeviceBatch
from engine.runtime.device.transfer import ALIGNMENT
from engine.runtime.kernels.autotune import Timer
from engine.runtime.kernels.prefill_attention import BLOCK_M, tile_list
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec, Chunk

TOKEN_COUNTS: Final = (16, 64, 128, 192, 256, 384, 512)
"""The buckets, in tokens, behind the number of tokens that the smallest is compared with. Beyond, kernels
take longer than their launches for all but the smallest models, and a library may attend to prompts."""
CHUNKS_MAX: Final = 16
MARGIN: Final = 1.02
"""How many times as long the launches have to take as a replay, for the graph to be kept."""
assert TOKEN_COUNTS[-1] < FRESH_TOKENS_MIN


@dataclass(frozen=True, slots=True)
class MixedShape:
    """The sizes of a step's inputs."""

    tokens: int
    decode_rows: int
    """The most rows that decode."""
    group: int
    """Query heads of a key head."""
    windows: tuple[int | None, ...]
    """The widths of the layers' windows, each once."""

    @staticmethod
    def of(tokens: int, slots: int, spec: AttentionSpec) -> MixedShape:
        windows = tuple(dict.fromkeys(spec.windows))
        return MixedShape(tokens, min(tokens, slots), spec.heads // spec.kv_heads, windows)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a chunk's tile in prefill attention."""
        return BLOCK_M // self.group

    @property
    def tiles(self) -> int:
        """The most tiles of the step's chunks."""
        return self.tokens // self.tile_tokens + CHUNKS_MAX

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each part of the inputs ends in their memory. All begin at aligned addresses."""
        chunks = CHUNKS_MAX + 1
        sizes = [self.tokens, self.tokens, self.decode_rows, 3 * chunks, chunks]
        sizes += [2 * self.tiles] * len(self.windows)
        each = ALIGNMENT // torch.int32.itemsize
        return tuple(accumulate(-(-size // each) * each for size in sizes))


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """The inputs of a step of T tokens, of which the first D may decode: int32, in one piece of memory."""

    slots: Tensor
    """Each token's slot, [T]."""
    ends: Tensor
    """Each token's position plus 1, [T]."""
    lengths: Tensor
    """The keys of each row that decodes, [D]; 0 for tokens that belong to a chunk, or to none."""
    chunks: Tensor
    """Start, length and offset of each chunk, [CHUNKS_MAX + 1, 3]. The last has no tokens."""
    chunk_slots: Tensor
    """[CHUNKS_MAX + 1]"""
    tiles: Mapping[int | None, Tensor]
    """The tiles of each width of window, [N, 2], as `tile_list` has them; the last chunk's come last."""

    @staticmethod
    def within(memory: Tensor, shape: MixedShape) -> MixedInputs:
        parts = [memory[begin:end] for begin, end in pairwise((0, *shape.ends))]
        slots, ends, lengths, chunks, chunk_slots, *tiles = parts
        return MixedInputs(
            slots[: shape.tokens],
            ends[: shape.tokens],
            lengths[: shape.decode_rows],
            chunks[: 3 * (CHUNKS_MAX + 1)].view(-1, 3),
            chunk_slots[: CHUNKS_MAX + 1],
            {
                window: part[: 2 * shape.tiles].view(-1, 2)
                for window, part in zip(shape.windows, tiles, strict=True)
            },
        )

    @staticmethod
    def empty(shape: MixedShape, device: torch.device) -> MixedInputs:
        return MixedInputs.within(torch.zeros(shape.ends[-1], dtype=torch.int32, device=device), shape)


def listed(rows: Sequence[Row], decode_rows: int, shape: MixedShape, padding_slot: int) -> NDArray[np.int32]:
    """The numbers of a step's `MixedInputs`. `rows`: those that decode first."""
    lengths = np.array([row.length for row in rows])
    before = np.array([row.start - row.offset for row in rows])
    tokens = int(lengths.sum())
    prompts = rows[decode_rows:]
    chunks = [Chunk(row.start, row.length, row.offset) for row in prompts]
    assert decode_rows <= shape.decode_rows
    assert len(chunks) <= CHUNKS_MAX
    parts = [
        _padded(np.repeat([row.slot for row in rows], lengths), [shape.tokens], padding_slot),
        _padded(np.arange(1, tokens + 1) + np.repeat(before, lengths), [shape.tokens], 1),
        _padded([row.end for row in rows[:decode_rows]], [shape.decode_rows], 0),
        _padded([(chunk.start, chunk.length, chunk.offset) for chunk in chunks], [CHUNKS_MAX + 1, 3], 0),
        _padded([row.slot for row in prompts], [CHUNKS_MAX + 1], padding_slot),
    ]
    for window in shape.windows:
        tiles = _padded(tile_list(chunks, shape.group, window), [shape.tiles, 2], 0)
        tiles[sum(-(-chunk.length // shape.tile_tokens) for chunk in chunks) :, 0] = CHUNKS_MAX
        parts.append(tiles)
    memory = np.zeros(shape.ends[-1], np.int32)
    for begin, part in zip((0, *shape.ends), parts, strict=False):
        memory[begin : begin + part.size] = part.reshape(-1)
    return memory


def _padded(numbers: ArrayLike, shape: Sequence[int], padding: int) -> NDArray[np.int32]:
    whole = np.full(shape, padding, np.int32)
    given = np.asarray(numbers)
    if given.size:
        whole[: len(given)] = given
    return whole


@dataclass(frozen=True, slots=True)
class MixedStep:
    """The layers of a step as a function of tensors on the device."""

    decoder: DeviceDecoder
    cache: KVCache
    decode: TritonDecode
    tokens: Tensor
    """The known tokens by slot, [slots, more than max_model_len] int32."""
    page_table: Tensor
    """The page tables, [slots, pages per sequence] int32."""

    def __call__(self, inputs: MixedInputs) -> tuple[Tensor]:
        """The final hidden states, [T, hidden]."""
        cache, spec, count = self.cache, self.decode.spec, len(inputs.lengths)
        given = DecodeInputs(inputs.slots, inputs.ends)
        step, tables = self.decoder.begin(given, self.tokens, self.page_table, cache.geometry.page_size)
        decode = self.decode.on_device(tables[:count], inputs.lengths)
        chunk_tables = self.page_table.index_select(0, inputs.chunk_slots)
        total = len(inputs.slots)
        prefill = TritonPrefillStep(cache, spec, chunk_tables, inputs.chunks, inputs.tiles, total)
        # zero where a token is neither in a row that decodes nor in a chunk: no layer writes there
        shape = total, spec.heads, spec.head_dim
        attended = torch.zeros(shape, dtype=self.decoder.dtype, device=inputs.slots.device)

        def attend(layer: int, q: Tensor) -> Tensor:
            decode(layer, q[:count], out=attended[:count])
            return prefill(layer, q, out=attended)

        return (self.decoder.normed(self.decoder.forward(step, cache, attend)),)


class MixedGraphs:
    """Runs the layers of steps with parts of prompts, by a graph where one was kept."""

    def __init__(
        self,
        step: MixedStep,
        eager: Callable[[DeviceBatch], Tensor],
        shapes: Sequence[MixedShape],
        padding_slot: int,
    ) -> None:
        """`eager`: launches a step kernel by kernel. `shapes`: of `TOKEN_COUNTS`."""
        self._step = step
        self._eager = eager
        self._shapes = tuple(shapes)
        self._padding_slot = padding_slot
        self._inputs = torch.zeros(shapes[-1].ends[-1], dtype=torch.int32, device=step.tokens.device)
        self._graphs: dict[int, Captured[tuple[Tensor]]] = {}

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self._shapes) - 1

    def ends(self) -> MixedGraphs:
        """The same with the smallest and the largest bucket alone."""
        shapes = dict.fromkeys((*self._shapes[:2], self._shapes[-1]))
        return MixedGraphs(self._step, self._eager, [*shapes], self._padding_slot)

    def launch(self) -> None:
        """Launch a step of every size, whose results are not read."""
        for shape in self._shapes:
            self._step(MixedInputs.empty(shape, self._inputs.device))

    @property
    def kept(self) -> list[int]:
        """The buckets that have a graph, in tokens."""
        return sorted(self._graphs)

    def capture(self, device: GraphDevice, timer: Timer | None, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets, the largest first, and keep those whose replays are faster than launches; all
        where there is no timer. `progress` is called with the numbers of graphs done and of all."""
        assert not self._graphs, "captured twice"
        buckets = [*pairwise(self._shapes)][::-1]
        for done, (smaller, shape) in enumerate(buckets):
            progress(done, len(buckets))
            launches_us = math.inf if timer is None else timer(self._rehearsed(smaller))
            run = self._rehearsed(shape)
            device.warm_up(run)
            graph = device.capture(run)
            if timer is None or timer(graph.replay) * MARGIN < launches_us:
                self._graphs[shape.tokens] = graph
        progress(len(buckets), len(buckets))

    def _rehearsed(self, shape: MixedShape) -> Callable[[], tuple[Tensor]]:
        """The step over a chunk of all its tokens, in the padding slot."""
        self._send([Row(self._padding_slot, 0, shape.tokens, 0)], 0, shape)
        return partial(self._step, MixedInputs.within(self._inputs, shape))

    def forward(self, batch: DeviceBatch) -> Tensor:
        """The final hidden states [T, hidden], valid until the next replay of any graph."""
        shape = next((shape for shape in self._shapes[1:] if batch.tokens <= shape.tokens), None)
        if shape is None or shape.tokens not in self._graphs or not _fits(batch, shape):
            return self._eager(batch)
        self._send(batch.rows, batch.decode_rows, shape)
        graph = self._graphs[shape.tokens]
        graph.replay()
        return graph.output[0][: batch.tokens]

    def eager(self, batch: DeviceBatch, shape: MixedShape) -> Tensor:
        """Run the same step kernel by kernel, padding included."""
        self._send(batch.rows, batch.decode_rows, shape)
        return self._step(MixedInputs.within(self._inputs, shape))[0][: batch.tokens]

    def _send(self, rows: Sequence[Row], decode_rows: int, shape: MixedShape) -> None:
        numbers = torch.from_numpy(listed(rows, decode_rows, shape, self._padding_slot))
        pinned = torch.empty(len(numbers), dtype=torch.int32, pin_memory=self._inputs.device.type == "cuda")
        self._inputs[: len(numbers)].copy_(pinned.copy_(numbers), non_blocking=True)


def _fits(batch: DeviceBatch, shape: MixedShape) -> bool:
    return batch.decode_rows <= shape.decode_rows and len(batch.rows) - batch.decode_rows <= CHUNKS_MAX

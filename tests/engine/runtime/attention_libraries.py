"""Stand-ins for FlashAttention and FlashInfer: their signatures, what they insist on, and what they compute.

Signatures and checks are those of flash-attn 2.8.4, of its Hopper module and of FlashInfer 0.6, as far as the
product calls them; the arithmetic is the definition of attention, in float64, and touches only what the real
kernels may count on: the tokens of a row, in the pages of a row.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, causal: bool) -> Tensor:
    """q [t, H, D], the last aligned to the last of k, v [L, Hkv, D]; `left` -1 is no window."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * scale
    query, key = len(k) - len(q) + torch.arange(len(q))[:, None], torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        seen &= key <= query
    if left >= 0:
        seen &= key >= query - left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)


def own_tokens(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """pages [pages, page_size, Hkv, D] -> [length, Hkv, D]."""
    count = -(-length // pages.shape[1])
    return pages[table[:count].long()].flatten(0, 1)[:length]


def check_flash(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *numbers: Tensor, multiple: int) -> None:
    assert q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type"
    assert k.dtype == q.dtype, "query and key must have the same dtype"
    assert v.dtype == q.dtype, "query and value must have the same dtype"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert k.dim() == 4, "pages [pages, page_size, Hkv, D]"
    assert k.shape[3] == q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"
    assert k.shape[1] % multiple == 0, f"Paged KV cache block size must be divisible by {multiple}"
    assert table.dtype == torch.int32, "block_table must have dtype torch.int32"
    assert table.stride(-1) == 1
    for number in numbers:
        assert number.dtype == torch.int32
        assert number.is_contiguous()


def flash_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    starts: list[int],
    lengths: list[int],
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    left, right = window_size
    assert right in (-1, 0)
    found = []
    for row, length in enumerate(lengths):
        own = q[starts[row] : starts[row + 1]]
        keys, values = own_tokens(k, table[row], length), own_tokens(v, table[row], length)
        found.append(attend(own, keys, values, softmax_scale, left, causal))
    return torch.cat(found)


def flash_batch(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, **how: Any) -> Tensor:
    """q [R, t, H, D]"""
    rows, tokens = q.shape[:2]
    assert len(table) == len(lengths) == rows
    starts = [row * tokens for row in range(rows + 1)]
    return flash_rows(q.flatten(0, 1), k, v, table, starts, lengths.tolist(), **how).view_as(q)


class FlashAttn2:
    """`flash_attn`"""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        block_table: Tensor,
        **how: Any,
    ) -> Tensor:
        check_flash(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, multiple=256)
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        lengths = cu_seqlens_k.diff().tolist()
        return flash_rows(q, k, v, block_table, cu_seqlens_q.tolist(), lengths, **how)

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, **how: Any
    ) -> Tensor:
        check_flash(q, k, v, block_table, cache_seqlens, multiple=256)
        return flash_batch(q, k, v, block_table, cache_seqlens, **how)


class FlashAttn3:
    """`flash_attn_interface`"""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        **how: Any,
    ) -> Tensor:
        if cu_seqlens_q is None:
            check_flash(q, k, v, page_table, cache_seqlens, multiple=1)
            return flash_batch(q, k, v, page_table, cache_seqlens, **how)
        check_flash(q, k, v, page_table, cache_seqlens, cu_seqlens_q, multiple=1)
        assert max_seqlen_q == cu_seqlens_q.diff().max(), "max_seqlen_q must be provided with cu_seqlens_q"
        assert len(cu_seqlens_q) == len(page_table) + 1 == len(cache_seqlens) + 1
        return flash_rows(q, k, v, page_table, cu_seqlens_q.tolist(), cache_seqlens.tolist(), **how)


class _PagedWrapper:
    """What both of FlashInfer's wrappers share: buffers that are given or copied, and one plan at a time."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) >= 128 << 20
        assert kv_layout == "HND"
        self.indptr: Tensor = torch.empty(0)
        self.indices: Tensor = torch.empty(0)
        self.last_page_len: Tensor = torch.empty(0)

    def remember(
        self,
        sizes: tuple[int, ...],
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """`sizes`: query heads, key heads, the size of a head, tokens of a page."""
        self.sizes, self.types = sizes, (q_data_type, kv_data_type)
        self.how = sm_scale, window_left, causal

    def keep(self, page_size: int, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu", "or plan waits for the device"
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.indptr, self.indices, self.last_page_len = indptr.clone(), indices.clone(), last_page_len.clone()

    def compute(
        self, q: Tensor, kv: tuple[Tensor, Tensor], starts: list[int], k_scale: float, v_scale: float
    ) -> Tensor:
        keys, values = kv
        assert (q.dtype, keys.dtype) == self.types, "what was planned for"
        assert values.dtype == keys.dtype
        heads, kv_heads, head_dim, page_size = self.sizes
        assert q.shape[1:] == (heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page_size, head_dim)
        found = []
        for row, last in enumerate(self.last_page_len.tolist()):
            table = self.indices[self.indptr[row] : self.indptr[row + 1]]
            length = (len(table) - 1) * page_size + last
            k = own_tokens(keys.transpose(1, 2), table, length).double() * k_scale
            v = own_tokens(values.transpose(1, 2), table, length).double() * v_scale
            found.append(attend(q[starts[row] : starts[row + 1]], k, v, *self.how))
        return torch.cat(found)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *sizes: int,
        causal: bool,
        **how: Any,
    ) -> None:
        assert qo_indptr.dtype == torch.int32
        self.remember(sizes, causal=causal, **how)
        self.keep(sizes[3], paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.qo_indptr = qo_indptr.clone()

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float, v_scale: float
    ) -> Tensor:
        assert len(q) == self.qo_indptr[-1]
        return self.compute(q, paged_kv_cache, self.qo_indptr.tolist(), k_scale, v_scale)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_cuda_graph = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer

    def keep(self, page_size: int, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """A graph's addresses do not change: what is new is copied into them."""
        if not self.use_cuda_graph:
            super().keep(page_size, indptr, indices, last_page_len)
            return
        buffers = self.indptr, self.indices, self.last_page_len
        assert len(last_page_len) == len(buffers[2]), "The batch size should be fixed in cudagraph mode"
        assert len(indices) <= len(buffers[1])
        super().keep(page_size, indptr, indices, last_page_len)
        buffers[0].copy_(indptr)
        buffers[1][: len(indices)].copy_(indices)
        buffers[2].copy_(last_page_len)
        self.indptr, self.indices, self.last_page_len = buffers

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **how: Any) -> None:
        group = sizes[0] // sizes[1]
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8), f"Unsupported group_size: {group}"
        self.remember(sizes, causal=False, **how)
        self.keep(sizes[3], indptr, indices, last_page_len)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float, v_scale: float
    ) -> Tensor:
        assert len(q) == len(self.last_page_len)
        return self.compute(q, paged_kv_cache, list(range(len(q) + 1)), k_scale, v_scale)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    kv_layout: str = "HND",
) -> Tensor:
    keys, values = kv_cache
    assert kv_layout == "HND"
    assert query.dtype in HALF
    assert keys.dtype in (query.dtype, torch.float8_e4m3fn)
    assert keys.shape[2] in (16, 32, 64, 128), "Invalid page_size"
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert seq_lens.max() <= max_seq_len
    assert not workspace_buffer.any(), "Must be initialized to 0 for its first use"
    found = []
    for row, length in enumerate(seq_lens.tolist()):
        k, v = (own_tokens(part.transpose(1, 2), block_tables[row], length).double() for part in kv_cache)
        found.append(attend(query[row : row + 1], k, v * bmm2_scale, bmm1_scale, window_left, causal=False))
    assert values.dtype == keys.dtype
    return torch.cat(found)


class FlashInfer:
    """`flashinfer`, and `flashinfer.decode`"""

    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    trtllm_batch_decode_with_kv_cache = staticmethod(trtllm_batch_decode_with_kv_cache)


FLASH_ATTN_2 = cast(ModuleType, FlashAttn2)
FLASH_ATTN_3 = cast(ModuleType, FlashAttn3)
FLASHINFER = cast(ModuleType, FlashInfer)

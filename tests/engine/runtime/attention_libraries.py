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
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, starts: list[int], lengths: list[int], **how: Any
) -> Tensor:
    scale, causal, (left, right) = how["softmax_scale"], how["causal"], how["window_size"]
    assert right in (-1, 0)
    found = []
    for row, length in enumerate(lengths):
        own = q[starts[row] : starts[row + 1]]
        keys, values = own_tokens(k, table[row], length), own_tokens(v, table[row], length)
        found.append(attend(own, keys, values, scale or q.shape[-1] ** -0.5, left, causal))
    return torch.cat(found)


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
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert block_table is not None
        check_flash(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, multiple=256)
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        lengths = cu_seqlens_k.diff().tolist()
        return flash_rows(q, k, v, block_table, cu_seqlens_q.tolist(), lengths, **how)

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert cache_seqlens is not None
        assert block_table is not None
        check_flash(q, k_cache, v_cache, block_table, cache_seqlens, multiple=256)
        how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        return flash_batch(q, k_cache, v_cache, block_table, cache_seqlens, **how)


class FlashAttn3:
    """`flash_attn_interface`"""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert cache_seqlens is not None
        assert page_table is not None
        how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
        if cu_seqlens_q is None:
            check_flash(q, k_cache, v_cache, page_table, cache_seqlens, multiple=1)
            return flash_batch(q, k_cache, v_cache, page_table, cache_seqlens, **how)
        check_flash(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, multiple=1)
        assert max_seqlen_q == cu_seqlens_q.diff().max(), "max_seqlen_q must be provided with cu_seqlens_q"
        assert len(cu_seqlens_q) == len(page_table) + 1 == len(cache_seqlens) + 1
        starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
        return flash_rows(q, k_cache, v_cache, page_table, starts, lengths, **how)


def flash_batch(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, **how: Any) -> Tensor:
    """q [R, t, H, D]"""
    rows, tokens = q.shape[:2]
    assert len(table) == len(lengths) == rows
    starts = [row * tokens for row in range(rows + 1)]
    return flash_rows(q.flatten(0, 1), k, v, table, starts, lengths.tolist(), **how).view_as(q)


class _PagedWrapper:
    """What both of FlashInfer's wrappers share: buffers that are given or copied, and one plan at a time."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) >= 128 << 20
        assert kv_layout == "HND"
        self.planned: dict[str, Any] = {}
        self.indptr: Tensor = torch.empty(0)
        self.indices: Tensor = torch.empty(0)
        self.last_page_len: Tensor = torch.empty(0)

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
        planned = self.planned
        assert q.dtype == planned["q_data_type"], "what was planned for"
        keys, values = kv
        assert keys.dtype == values.dtype == planned["kv_data_type"]
        heads, kv_heads, head_dim, page_size = planned["sizes"]
        assert q.shape[1:] == (heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page_size, head_dim)
        found = []
        for row, last in enumerate(self.last_page_len.tolist()):
            table = self.indices[self.indptr[row] : self.indptr[row + 1]]
            length = (len(table) - 1) * page_size + last
            k = own_tokens(keys.transpose(1, 2), table, length).double() * k_scale
            v = own_tokens(values.transpose(1, 2), table, length).double() * v_scale
            own = q[starts[row] : starts[row + 1]]
            found.append(attend(own, k, v, planned["sm_scale"], planned["window_left"], planned["causal"]))
        return torch.cat(found)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        assert qo_indptr.dtype == torch.int32
        self.keep(page_size, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.qo_indptr = qo_indptr.clone()
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.planned = {
            "sizes": sizes,
            "causal": causal,
            "sm_scale": sm_scale or head_dim_qk**-0.5,
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert len(q) == self.qo_indptr[-1]
        return self.compute(q, paged_kv_cache, self.qo_indptr.tolist(), k_scale or 1.0, v_scale or 1.0)


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
        backend: str = "auto",
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

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8), f"Unsupported group_size: {group}"
        self.keep(page_size, indptr, indices, last_page_len)
        self.planned = {
            "sizes": (num_qo_heads, num_kv_heads, head_dim, page_size),
            "causal": False,
            "sm_scale": sm_scale or head_dim**-0.5,
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert len(q) == len(self.last_page_len)
        return self.compute(q, paged_kv_cache, list(range(len(q) + 1)), k_scale or 1.0, v_scale or 1.0)


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
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
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

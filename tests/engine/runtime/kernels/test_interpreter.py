"""The interpreter that was made quick computes what Triton's own does, to the bit, and refuses the same.

Its products alone differ, by rounding: they are added in one order, whatever the processor.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterError

from engine.contract.packing import Biases
from tests.engine.runtime.kernels import test_decode_attention, test_prefill_attention
from tests.engine.runtime.kernels.cases import Shape, paged_case
from tests.engine.runtime.kernels.interpreter import _own, as_triton_has_it
from tests.engine.runtime.kernels.test_sampling import VOCAB, histories, on_device, params


def sampled() -> list[Tensor]:
    """Calls within calls, scans, 64-bit products."""
    torch.manual_seed(1)
    asked = [params(top_k=40, top_p=0.8, repetition_penalty=1.8), params(logit_bias=Biases.of(((3, 8.0),)))]
    tokens, logprobs, _ = on_device(torch.randn(2, VOCAB), asked, histories(2, 2))
    return [torch.tensor(tokens), logprobs]


def attended() -> list[Tensor]:
    """Products of blocks, masks, narrow types, atomic additions."""
    shape = Shape(1, 2, 32, 16)
    whole = paged_case(shape, [20, 3], [40, 3], dtype=torch.float16)
    narrow = paged_case(shape, [1, 1], [40, 3], kv_dtype=torch.float8_e4m3fn)
    return [test_prefill_attention.run(whole, 20), test_decode_attention.run(narrow)]


@pytest.mark.parametrize("compute", [sampled, attended])
def test_the_results_are_the_same(compute: Callable[[], list[Tensor]]) -> None:
    assert _own, "it is not in use"
    quick = compute()
    with as_triton_has_it():
        slow = compute()
    for ours, theirs in zip(quick, slow, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@triton.jit
def product_kernel(x, y, out):
    m, k, n = tl.arange(0, 16)[:, None], tl.arange(0, 64), tl.arange(0, 32)[None, :]
    left, right = tl.load(x + m * 64 + k[None, :]), tl.load(y + k[:, None] * 32 + n)
    tl.store(out + m * 32 + n, tl.dot(left, right, input_precision="ieee"))


def test_a_products_terms_are_added_by_halves() -> None:
    torch.manual_seed(0)
    x, y, out = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    product_kernel[(1,)](x, y, out)
    terms = x[:, :, None] * y
    for half in (32, 16, 8, 4, 2, 1):
        terms = terms[:, :half] + terms[:, half:]
    assert torch.equal(out, terms[:, 0])
    torch.testing.assert_close(out, x @ y)


@triton.jit
def uneven_kernel(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def odd_kernel(out):
    tl.store(out + tl.arange(0, 3), 1)


@pytest.mark.parametrize("kernel", [uneven_kernel, odd_kernel])
def test_what_does_not_fit_is_refused_alike(kernel: triton.runtime.KernelInterface) -> None:
    def refusal() -> str:
        with pytest.raises(InterpreterError) as caught:
            kernel[(1,)](torch.zeros(8, dtype=torch.int32))
        return str(caught.value)

    quick = refusal()
    with as_triton_has_it():
        assert refusal() == quick
    assert refusal() == quick, "and nothing was learnt from it"

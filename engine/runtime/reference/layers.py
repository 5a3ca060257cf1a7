"""The operations of the decoder in torch. Inference only: plain tensors, no modules, no autograd.

Shapes: T tokens, H query heads, Hkv key-value heads, D head size.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.process import logs

log: Final = logs.get(__name__)


class PackedLinear:
    """y = x W^T + b, with W laid out for the processor once, at load.

    On CPU the weight is reordered into oneDNN's blocked layout. Measured on two Zen 4 cores against
    F.linear, which reorders on every call: 1.5 to 2.6 times faster in bfloat16 at 1 to 16 rows, and
    up to 6 times in float32, where F.linear falls off a cliff at 2 to 16 rows.
    """

    __slots__ = ("_bias", "_exact", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> None:
        """weight [out, in], bias [out]. The caller's weight is not needed any more. `exact`: a row has the
        same bits in any company (`engine.runtime.reference.exact`): one alone is computed as one of two."""
        self._bias = bias
        self._exact = exact
        self._packed = weight.device.type == "cpu" and packs(weight.dtype)
        self._weight = _packed(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._exact and len(x) == 1:
            return self(x.expand(2, -1).contiguous())[:1]
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        return _product(x, self._weight, self._bias)


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """True if oneDNN takes weights of this type: bfloat16 only where the processor has at least AVX-512.

    torch offers its packed products to its own compiler alone, so the operations are private, and any release
    may change them: a product is tried, and where it fails, weights stay as they are.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(3, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _product(x, _packed(weight), None)
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning(
            "runtime.no_packed_weights", torch=str(torch.__version__), reason=str(error).partition("\n")[0]
        )
        return False
    return bool((product == 16).all())


def _packed(weight: Tensor) -> Tensor:
    # The hint is the row count to optimise for; the layout is the same for all row counts of decode.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The RMS norm over the last dimension (Zhang and Sennrich 2019), computed in float32. A weight in
    float32 is multiplied before the result is rounded to x's type."""
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm of x without its mean, over the last dimension (Ba et al. 2016), computed in float32."""
    exact = None if weight is None else weight.float()
    return F.layer_norm(x.float(), (x.shape[-1],), exact, None, eps).to(x.dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, heads, D], rotated by its positions' angles."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

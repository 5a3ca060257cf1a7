"""fp8 on a device: matrices as a checkpoint holds them, a cache with its scales, and who is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from engine.contract.messages import SamplingParams
from engine.runtime.attention import triton_paged
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.device.precision import Precision
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.models.quantization import Fp8Scheme
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.weights.fp8 import Fp8Weight
from tests.engine.models import reference_greedy
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.device.test_runner import SMALL
from tests.engine.runtime.driver import Driver
from tests.engine.runtime.test_fp8_checkpoint import make_fp8

FP8 = torch.float8_e4m3fn
aten = torch.ops.aten
PROMPT = list(range(2, 11))
NARROW = SMALL | {"num_hidden_layers": 2}
"""Each layer of a cache has scales of its own."""
KV_SCALES = {
    f"model.layers.{layer}.self_attn.{of}_scale": torch.tensor(scale)
    for layer in range(2)
    for of, scale in (("k", 0.03), ("v", 0.01))
}


def load_eager(path: Path, **settings: Any) -> DeviceRunner:
    """Without what takes the interpreter long, and is tested elsewhere."""
    return load_fake(path, kv_cache_memory=1 << 20, enforce_eager=True, max_num_seqs=1, **settings)


class AsOnAGpu(TorchDispatchMode):
    """fp8 is moved, filled and converted there, and nothing else: torch does not say so of a CPU."""

    MOVES: ClassVar = (
        aten.copy_,
        aten._to_copy,
        aten.clone,
        aten.fill_,
        aten.zero_,
        aten._local_scalar_dense,
    )
    VIEWS: ClassVar = (aten._unsafe_view, aten.set_)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if any(each.dtype == FP8 for each in tensors):
            name = func.overloadpacket.__name__
            does = func.overloadpacket in (*self.MOVES, *self.VIEWS) or func.is_view or "empty" in name
            assert does, f"no {name} of fp8"
        return found


def logprobs(runner: DeviceRunner) -> torch.Tensor:
    """Of the prompt's tokens, in chunks of 8 over what the cache holds."""
    driver = Driver(runner, poison=False)
    asked = SamplingParams(seed=0, max_tokens=2, temperature=0.0, prompt_logprobs=0)
    life = driver.seat(0, PROMPT, asked)
    driver.finish([0], 2, chunk=8)
    return torch.tensor([entry.logprob for entry in life.prompt_logprobs])


def test_a_checkpoint_in_fp8_is_held_in_fp8(tiny_model: MakeModel, tmp_path: Path) -> None:
    stored, meant = make_fp8(tiny_model("qwen3", **NARROW), tmp_path, "compressed")
    runner = load_eager(stored)
    *matrices, head = (linear.weight for linear in runner.model.decoder.linears)
    assert all(isinstance(weight, Fp8Weight) for weight in matrices)
    assert isinstance(head, torch.Tensor)
    driver = Driver(runner, poison=False)
    life = driver.seat(0, PROMPT, SamplingParams(seed=0, max_tokens=4, temperature=0.0))
    driver.finish([0], 4)
    assert life.output == reference_greedy(meant, [PROMPT], 4)[0]


def test_a_cache_in_fp8(tiny_model: MakeModel, tmp_path: Path) -> None:
    """With the checkpoint's scales. The kernels and torch read the same out of it; with other scales, of 1,
    it would be something else."""
    stored, _ = make_fp8(tiny_model("llama", **NARROW), tmp_path, "autofp8", **KV_SCALES)
    found: list[torch.Tensor] = []
    for backend in ("triton", "torch", "torch"):
        with AsOnAGpu():
            runner = load_eager(stored, kv_cache_dtype="fp8", attention_backend=backend)
        assert runner.cache.keys[0].dtype == FP8
        assert runner.info.page_bytes == 2 * 2 * 1 * 16 * 16, "two layers, a head, a byte each"
        assert len(runner.cache.scales) == 2
        for scales in runner.cache.scales:
            assert scales == pytest.approx((0.03, 0.01))
        if len(found) == 2:
            runner.cache.scales[:] = [(1.0, 1.0)] * 2
        with AsOnAGpu():
            found.append(logprobs(runner))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[2], found[1], atol=1e-2)


def test_a_long_prompt_over_a_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the library, which reads what was stored, multiplied by its scales; planned for before."""
    monkeypatch.setattr(triton_paged, "FRESH_TOKENS_MIN", 24)
    monkeypatch.setattr(triton_paged, "FRESH_TOKENS_MULTIPLE", 8)
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(1, 2, 16, 16, FP8), pages=3, scales=[(0.5, 3.0)])
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape))
    spec, tables, q = AttentionSpec(4, 2, 16, [None]), torch.tensor([[2, 0, 1]]), torch.randn(33, 4, 16)
    seen: list[tuple[Any, ...]] = []

    def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(tuple((each.shape, each.stride(), each.dtype) for each in (q, k, v)))
        alone = q[None], k[None], v[None]
        return scaled_dot_product_attention(*alone, is_causal=True, scale=scale, enable_gqa=True)[0]

    prefill = triton_paged.LibraryPrefill(cache, spec, library)
    prefill.warm_up(33, torch.float32)
    planned = set(seen)
    assert [shapes[0][0][1] for shapes in seen] == [24, 32, 40]
    with AsOnAGpu():
        for length in (33, 24):
            step = prefill.of_chunks([Row(0, 0, length, 0)], tables)
            expected = triton_paged.TritonPrefill(cache, spec).of_chunks([Row(0, 0, length, 0)], tables)
            torch.testing.assert_close(step(0, q[:length]), expected(0, q[:length]), atol=1e-5, rtol=1e-5)
    assert len(seen) == 5
    assert set(seen) == planned, "a plan is for sizes, strides and types"


def test_what_a_gpu_cannot_do_is_refused(tiny_model: MakeModel) -> None:
    model = read_model_config(tiny_model("llama"))
    stored = replace(model, fp8=Fp8Scheme("fbgemm_fp8"))

    def of(capability: tuple[int, int], model: Any = model, **settings: Any) -> Precision:
        return Precision.of(RunnerConfig("somewhere", **settings), model, torch.bfloat16, capability)

    for settings in ({"weights": "fp8"}, {"kv_cache_dtype": "fp8"}):
        assert of((9, 0), **settings)
        with pytest.raises(BadRunnerConfig, match=r"=fp8 needs compute capability 8.9, this GPU has 8.0"):
            of((8, 0), **settings)
    assert of((8, 0), stored) == Precision(False, torch.bfloat16)
    assert of((9, 0), stored) == Precision(True, torch.bfloat16)
    assert of((8, 0), stored).describe(stored, None) == "weights multiplied out of fp8 (fbgemm_fp8)"
    said = of((9, 0), weights="fp8", kv_cache_dtype="fp8").describe(model, None)
    assert said == "weights in fp8, rounded here; KV in fp8, scales of 1"
    assert of((9, 0)).describe(model, None) == ""


def test_a_back_end_that_does_not_read_fp8_is_refused_before_anything_is_loaded(
    tiny_model: MakeModel,
) -> None:
    with pytest.raises(BadRunnerConfig, match=r"reads fp8 from compute capability 8.9|needs compute"):
        load_fake(tiny_model("llama"), FakeCard(capability=(8, 0)), kv_cache_dtype="fp8")
    with pytest.raises(BadRunnerConfig, match=r"flash-attn 3 .*; flash-attn 2"):
        load_fake(tiny_model("llama"), attention_backend="flash-attn", kv_cache_dtype="fp8")

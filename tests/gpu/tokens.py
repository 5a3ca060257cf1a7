"""Small random models of every family on the GPU: tokens against transformers, and graph against eager."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contract.messages import SamplingParams
from engine.runtime.attention.triton_paged import TritonDecode, TritonPrefill
from engine.runtime.device.device_decoder import (
    DecodeStep,
    DeviceDecoder,
    DeviceModel,
    DeviceSampler,
    StepTables,
)
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch
from engine.runtime.device.graphs import CudaGraphDevice, DecodeGraphs, batch_buckets
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import Checkpoint, checkpoint_files
from tests.bench.engine.gpu.measuring import check
from tests.engine.models import not_greedy
from tests.engine.runtime.driver import Driver
from tests.engine.runtime.kernels.test_sampling import seat
from tests.gpu.models import other_models, plain_models

CUDA = torch.device("cuda")
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
PROMPTS = [list(range(2, 2 + length)) for length in (90, 3, 40)]
OUTPUTS = 24
STEPS = 16


@dataclass(frozen=True, slots=True)
class HostLogits:
    """A device's model for a runner whose slots and sampler are on the host."""

    model: DeviceModel

    def forward(self, batch: PackedBatch) -> Tensor:
        return self.model.forward(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden).cpu()


def on_gpu(path: Path) -> tuple[HostRunner, DeviceModel]:
    """A runner whose network and cache are on the GPU; the cache begins as NaN."""
    host = RunnerConfig(
        str(path), "cpu", "float32", kernels="torch", page_size=16, max_num_seqs=4, max_model_len=256
    )
    runner = load_runner(host, lambda stage: None)
    assert isinstance(runner, HostRunner)
    config, info = read_model_config(path), runner.info
    with CUDA:
        cache = KVCache(runner.cache.geometry, runner.cache.pages)
    for part in (*cache.keys, *cache.values):
        part.fill_(torch.nan)
    decoder = DeviceDecoder(config, Checkpoint(checkpoint_files(path), torch.float32), CUDA)
    spec = AttentionSpec.of(config)
    decode = TritonDecode(cache, spec, rows_max=info.slots + 1, multiprocessors=132)
    geometry = StateGeometry.of(config, torch.float32)
    states = States(geometry, info.slots + 1, CUDA) if config.deltas else None
    model = DeviceModel(decoder, cache, decode, TritonPrefill(cache, spec), states)
    runner.model = HostLogits(model)
    return runner, model


def tokens(path: Path) -> dict[str, Any]:
    """Chunks, mixed batches, shuffled pages."""
    runner, _ = on_gpu(path)
    driver = Driver(runner, poison=False)
    greedy = SamplingParams(seed=0, max_tokens=OUTPUTS, temperature=0.0)
    lives = [driver.seat(slot, prompt, greedy) for slot, prompt in enumerate(PROMPTS)]
    driver.finish([0, 1, 2], OUTPUTS, chunk=32)
    found = [life.output for life in lives]
    assert {len(tokens) for tokens in found} == {OUTPUTS}
    assert not (off := not_greedy(path, PROMPTS, found)), f"prompts {off} differ from transformers'"
    return {"tokens": OUTPUTS * len(PROMPTS)}


def ways_to_run() -> list[tuple[bool, bool]]:
    """By a graph or not, and dependently or not, beside the plain step."""
    if torch.cuda.get_device_capability() < DEPENDENT_LAUNCH_CAPABILITY:
        return [(True, False)]
    return [(True, False), (False, True), (True, True)]


def graph(path: Path) -> dict[str, Any]:
    """The same steps twice: kernel by kernel, then replayed."""
    runner, model = on_gpu(path)
    driver = Driver(runner, poison=False)
    asked = [SamplingParams(seed=s, max_tokens=OUTPUTS, temperature=s / 2, top_k=40 * s) for s in range(3)]
    lives = [
        driver.seat(slot, prompt, own) for slot, (prompt, own) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    driver.finish([0, 1, 2], 1)
    slots, padding, vocab = runner.slots, runner.info.slots, runner.info.vocab_size
    table = torch.cat((slots.page_table, torch.zeros_like(slots.page_table[:1])))
    spare = sorted(set(range(runner.info.pages)) - {page for life in lives for page in life.pages})
    table[padding, 0] = spare.pop()
    sampling = DeviceSampling.empty(padding + 1, vocab, CUDA)
    for slot, (life, own) in enumerate(zip(lives, asked, strict=True)):
        prompt, output = (torch.tensor(t, device=CUDA) for t in (PROMPTS[slot], life.output))
        seat(sampling, slot, own, prompt, output)
        for place in range(len(life.pages), len(life.pages) + 2):
            table[slot, place] = spare.pop()
    tokens = torch.cat((slots.tokens, torch.zeros_like(slots.tokens[:1]))).to(CUDA)
    scratch = SamplingScratch.empty(4, vocab, model.decoder.dtype, CUDA)
    tables = StepTables(tokens, table.to(CUDA), model.cache, model.decode, model.states)
    step = DecodeStep(tables, DeviceSampler(model.decoder, tables.tokens, sampling, scratch, tables.states))
    kept = () if model.states is None else (*model.states.heads, *model.states.inputs)
    begun = [own.clone() for own in kept]
    lengths = [len(life.tokens) for life in lives]

    def run(by_graph: bool, dependently: bool) -> list[tuple[list[int], list[float]]]:
        form = replace(step, launches_dependently=dependently)
        graphs = DecodeGraphs(form, batch_buckets(4), padding, CUDA)
        if by_graph:
            graphs.capture(CudaGraphDevice(), lambda done, of: None)
        for own, before in zip(kept, begun, strict=True):
            own.copy_(before)
        found = []
        for i in range(STEPS):
            now, logprobs = graphs.run([0, 1, 2], [length + i for length in lengths])
            found.append((now[:3].tolist(), logprobs[:3].tolist()))
        return found

    expected = run(by_graph=False, dependently=False)
    ways = ways_to_run()
    for by_graph, dependently in ways:
        found = run(by_graph, dependently)
        for (eager, eager_logprobs), (now, logprobs) in zip(expected, found, strict=True):
            how = f"by_graph={by_graph}, dependently={dependently}"
            assert now == eager, f"tokens differ from the plain step's: {how}"
            assert logprobs == eager_logprobs, f"log-probabilities differ from the plain step's: {how}"
    return {"steps": STEPS, "ways": len(ways)}


def main() -> int:
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        models = plain_models(Path(directory)) | other_models(Path(directory))
        for family, path in models.items():
            with torch.inference_mode():
                ok &= check("tokens", f"{family} against transformers", partial(tokens, path))
                ok &= check("tokens", f"{family} graph against eager", partial(graph, path))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

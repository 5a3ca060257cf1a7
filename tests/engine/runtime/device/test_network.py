"""The whole decoder of kernels in the interpreter, in the place of torch's: models, graphs, fp8,
vectors of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.attention.triton_paged import TritonDecode, TritonPrefill
from engine.runtime.device.device_decoder import (
    DecodeStep,
    DeviceDecoder,
    DeviceModel,
    DeviceSampler,
    StepTables,
    StepTokens,
)
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch
from engine.runtime.device.graphs import DecodeGraphs, DecodeInputs, batch_buckets
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.device.torch_on_device import Storing
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.kernels.fused import norm_rotate_store
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import Checkpoint, checkpoint_files
from tests.effort import IS_WHOLE, some
from tests.engine.embedders import KINDS, Kind, make_embedder, reference_vectors
from tests.engine.runtime.config_oracle import BY_KERNELS, PROMPT_LEN, TOKENS, Weights, their_logprobs
from tests.engine.runtime.config_oracle import tokens as oracle_tokens
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.device.test_runner import SMALL
from tests.engine.runtime.driver import Driver
from tests.engine.runtime.kernels.tables import all_by_tiles
from tests.engine.runtime.kernels.test_sampling import seat
from tests.engine.runtime.test_embeddings import apart, prompts, vectors

CPU = torch.device("cpu")


def device_model(path: Path, runner: HostRunner, *, fp8: bool = False) -> DeviceModel:
    """Over the runner's own cache."""
    config = read_model_config(path)
    source = Checkpoint(checkpoint_files(path), torch.float32)
    decoder = DeviceDecoder(config, source, CPU, fp8=fp8)
    spec = AttentionSpec.of(config)
    info = runner.info
    decode = TritonDecode(runner.cache, spec, rows_max=info.slots + 1, multiprocessors=1)
    return DeviceModel(decoder, runner.cache, decode, TritonPrefill(runner.cache, spec))


def runner_for(path: Path) -> HostRunner:
    return load(path, max_num_seqs=4, max_model_len=96, kernels="torch")


FAMILIES = ("qwen3", "mistral", "qwen2")
PRODUCTS = ("tiles", "library")


@pytest.mark.parametrize("family", some(FAMILIES, usual=1))
def test_a_model_says_the_same_in_kernels(tiny_model: MakeModel, family: str) -> None:
    """Chunked prompts, mixed batches, poisoned pages; a window of 24, biases, QK norm. Products by the
    library, and by our tiles with norms and gates in them: one family by one of them, and by command each
    by both."""
    path = tiny_model(family)
    outputs = []
    chosen = PRODUCTS[FAMILIES.index(family) % len(PRODUCTS)]
    for kernels in ("torch", *(PRODUCTS if IS_WHOLE else [chosen])):
        runner = runner_for(path)
        if kernels != "torch":
            runner.model = device_model(path, runner)
            if kernels == "tiles":
                runner.model.decoder.table = all_by_tiles(runner.model.decoder.linears)
        driver = Driver(runner)
        asked = [SamplingParams(seed=slot, max_tokens=8, temperature=slot / 2) for slot in range(2)]
        prompts = (40, 3)
        lives = [
            driver.seat(s, range(2, 2 + n), own)
            for s, (n, own) in enumerate(zip(prompts, asked, strict=True))
        ]
        driver.finish([0, 1], 2, chunk=30)
        outputs.append([life.output for life in lives])
    assert len(outputs) > 1
    assert all(output == outputs[0] for output in outputs)


LIKE_OTHERS = {"exaone4", "granitemoehybrid", "hunyuan_v1_dense", "phi3", "seed_oss", "ministral", "olmo2"}
"""Families whose decoders consist of pieces that others have, too: these are compared by command."""


@pytest.mark.parametrize("family", [name for name in BY_KERNELS if IS_WHOLE or name not in LIKE_OTHERS])
def test_a_family_says_in_kernels_what_transformers_says(tmp_path: Path, family: str) -> None:
    """A prompt, then one token after another: norms on both sides, two ropes, layers without one, windows,
    GELU, factors, a cap, gates, states. Products by tiles or by the library; by command by both."""
    path = Weights(family).saved(tmp_path, **BY_KERNELS[family])
    expected = their_logprobs(path, torch.float32)
    for by_tiles in (True, False) if IS_WHOLE else [list(BY_KERNELS).index(family) % 2 == 0]:
        torch.testing.assert_close(_logprobs(path, by_tiles), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def _logprobs(path: Path, by_tiles: bool) -> Tensor:
    """[TOKENS, vocab]"""
    config = read_model_config(path)
    source = Checkpoint(checkpoint_files(path), torch.float32)
    decoder = DeviceDecoder(config, source, CPU)
    if by_tiles:
        decoder.table = all_by_tiles(decoder.linears)
    geometry = KVGeometry(len(config.attentions), config.kv_heads, 16, config.head_dim, torch.float32)
    cache, pages, spec = KVCache(geometry, 4), 3, AttentionSpec.of(config)
    slots = DeviceSlots(1, TOKENS, 16, config.vocab_size, pages, CPU)
    tokens = oracle_tokens(config.vocab_size)
    start = SlotAssignment.of(0, tokens, TOKENS, SamplingParams(seed=0, max_tokens=1))
    slots.apply(Plan(0, [], [start], [(0, list(range(pages)))], [], [], [], []))
    decode, states = (
        TritonDecode(cache, spec, rows_max=2, multiprocessors=1),
        StateGeometry.of(config, torch.float32),
    )
    model = DeviceModel(decoder, cache, decode, TritonPrefill(cache, spec), States(states, 2))
    plan = Plan(0, [], [], [], [0], [0], [PROMPT_LEN], [Want.NOTHING])
    hidden = model.forward(DeviceBatch.of(plan, slots))
    found = [model.logits(hidden)]
    for at in range(PROMPT_LEN, TOKENS):
        inputs = DecodeInputs(torch.tensor([0], dtype=torch.int32), torch.tensor([at + 1], dtype=torch.int32))
        kept = StepTables(slots.tokens, slots.page_table, cache, decode, model.states)
        stream = decoder.decode(inputs, kept)
        found.append(decoder.logits(stream).clone())
    return torch.cat(found).log_softmax(-1)


@pytest.mark.parametrize("tiles", some([True, False], usual=1))
def test_decode_steps_from_the_device_go_on_where_the_runner_stopped(
    tiny_model: MakeModel, tiles: bool
) -> None:
    """Prefill by the runner; then tokens, places, sampling and feedback on the device, with padding."""
    path = tiny_model("qwen3")
    asked = [
        SamplingParams(seed=slot, max_tokens=8, temperature=slot / 2, top_k=50 * slot) for slot in range(3)
    ]
    prompts = [list(range(2, 2 + length)) for length in (20, 3, 15)]
    runner = runner_for(path)
    model = device_model(path, runner)
    driver = Driver(runner, poison=False)
    lives = [
        driver.seat(slot, prompt, own) for slot, (prompt, own) in enumerate(zip(prompts, asked, strict=True))
    ]
    driver.finish([0, 1, 2], 1)
    # What lies on the device by slot, and a padding slot with a page of its own behind the others'.
    slots, padding, vocab = runner.slots, runner.info.slots, runner.info.vocab_size
    tokens = torch.cat((slots.tokens, torch.zeros_like(slots.tokens[:1])))
    table = torch.cat((slots.page_table, torch.zeros_like(slots.page_table[:1])))
    spare = sorted(set(range(runner.info.pages)) - {page for life in lives for page in life.pages})
    table[padding, 0] = spare.pop()
    sampling = DeviceSampling.empty(padding + 1, vocab, CPU)
    for slot, (life, own) in enumerate(zip(lives, asked, strict=True)):
        output = torch.tensor(life.output)
        seat(sampling, slot, own, torch.tensor(prompts[slot]), output)
        table[slot, len(life.pages)] = spare.pop()
    scratch = SamplingScratch.empty(4, vocab, model.decoder.dtype, CPU)
    if tiles:
        model.decoder.table = all_by_tiles(model.decoder.linears)
    kept = StepTables(tokens, table, runner.cache, model.decode)
    step = DecodeStep(kept, DeviceSampler(model.decoder, kept.tokens, sampling, scratch, kept.states))
    graphs = DecodeGraphs(step, batch_buckets(4), padding, CPU)
    lengths = [len(life.tokens) for life in lives]
    found = [graphs.run([0, 1, 2], [length + i for length in lengths])[0][:3].tolist() for i in range(3)]

    whole = Driver(runner_for(path))
    expected = [
        whole.seat(slot, prompt, own) for slot, (prompt, own) in enumerate(zip(prompts, asked, strict=True))
    ]
    whole.finish([0, 1, 2], 4)
    assert [list(row) for row in zip(*found, strict=True)] == [life.output[1:] for life in expected]


def test_fp8_weights_stay_near(tiny_model: MakeModel) -> None:
    """The log-probabilities of a prompt are off by a few percent, as the weights are; not by more."""
    path = tiny_model("llama")
    asked = SamplingParams(seed=0, max_tokens=2, temperature=0.0, prompt_logprobs=0)
    said = []
    for fp8 in (False, True):
        runner = runner_for(path)
        runner.model = device_model(path, runner, fp8=fp8)
        driver = Driver(runner)
        life = driver.seat(0, range(2, 26), asked)
        driver.finish([0], 1)
        said.append(torch.tensor([entry.logprob for entry in life.prompt_logprobs]))
    exact, near = said
    assert not torch.equal(exact, near)
    assert (exact - near).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("clear_tails", [False, True])
def test_torch_stores_what_the_kernel_stores(dtype: torch.dtype, clear_tails: bool) -> None:
    """A page that goes on, one that is filled, one that is begun and left; with scales, beyond fp8's
    range."""
    qkv, heads = torch.randint(-8, 9, (21, 4, 16)) * 16.0, (2, 1, 1)  # exact in fp8, but for the largest
    qkv[:, :, 3] = 1000.0
    places = [(0, at) for at in range(13, 16)] + [(2, at) for at in range(16)] + [(1, 0), (1, 1)]
    pages, offsets = torch.tensor(places).T.contiguous()
    still = torch.ones(21, 8), torch.zeros(21, 8)
    caches = [KVCache(KVGeometry(1, 1, 16, 16, dtype), 4, [(0.5, 2.0)]) for _ in range(2)]
    for cache in caches:
        cache.clear_tails = clear_tails
        cache.pool.fill_(7.0)
    kernel, ours = caches
    norm_rotate_store(
        qkv.flatten(1),
        still,
        None,
        kernel.keys[0],
        kernel.values[0],
        pages,
        offsets,
        kv_scales=kernel.scales[0],
        clear_tails=clear_tails,
    )
    step = StepTokens(pages, offsets, pages, offsets)
    q, k, v = qkv.split(heads, dim=1)
    assert torch.equal(Storing(ours, step, lambda _, q: q)(0, q, k, v), q)
    found, expected = (cache.pool.view(torch.uint8)[:, :, :3] for cache in (ours, kernel))
    assert torch.equal(found, expected)


LENGTHS = (5, 17, 1, 30)


@pytest.mark.parametrize("kind", some([KINDS[3], KINDS[0]], usual=1), ids=str)
def test_each_module_and_in_chunks(tmp_path: Path, kind: Kind) -> None:
    path, given = make_embedder("qwen3", tmp_path / "model", kind, **SMALL), prompts(5, LENGTHS)
    runner = load_fake(path, FakeCard(), max_num_seqs=8, kv_cache_memory=1 << 20, enforce_eager=True)
    assert runner.info.vector_len == (32 if kind is KINDS[0] else 48)
    expected = reference_vectors(path, kind, given)
    assert apart(vectors(runner, given), expected) < 1e-5
    assert apart(vectors(runner, given, chunk=9, at_once=3), expected) < 1e-5

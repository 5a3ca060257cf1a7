"""How many pages: what memory allows, never more than could be used, never too few to run. And what is
copied to host memory and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.setup.model_errors import DoesNotFit
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step import kv_cache
from engine.runtime.step.kv_cache import (
    HostPages,
    KVCache,
    KVGeometry,
    host_page_count,
    page_count,
    step_bytes,
)
from shared.process.setting_values import ConfigError
from tests.engine.runtime.device.waits import no_waits
from tests.engine.runtime.test_model_config import BASE

MODEL = parse_model_config(json.dumps({"model_type": "llama"} | BASE).encode())
GEOMETRY = KVGeometry(len(MODEL.layers), MODEL.kv_heads, 16, MODEL.head_dim, torch.float32)
CONFIG = RunnerConfig("m", page_size=16, max_num_seqs=4, max_step_tokens=64)


def pages(available: int, config: RunnerConfig = CONFIG) -> int:
    return page_count(config, MODEL, GEOMETRY, 100, available)


def test_page_bytes() -> None:
    assert GEOMETRY.page_bytes == 2 * 3 * 2 * 16 * 16 * 4


def test_a_small_model_takes_what_its_slots_can_use_and_a_quarter_more() -> None:
    assert pages(1 << 40) == 4 * 7 * 5 // 4


def test_a_share_of_what_a_step_leaves() -> None:
    step = step_bytes(CONFIG, MODEL)
    assert pages(step + 20 * GEOMETRY.page_bytes) == 10
    with pytest.raises(DoesNotFit, match="raise --kv-cache-memory, or lower --max-step-tokens"):
        pages(step - 1)


def test_explicit_bytes_need_no_measuring() -> None:
    config = RunnerConfig(
        "m", page_size=16, max_num_seqs=4, max_step_tokens=64, kv_cache_memory=5 * GEOMETRY.page_bytes
    )
    assert pages(0, config) == 5
    with pytest.raises(DoesNotFit):
        pages(0, RunnerConfig("m", page_size=16, max_num_seqs=4, max_step_tokens=64, kv_cache_memory=1))


def test_host_pages_as_told_and_else_never_more_than_the_slots_can_own() -> None:
    def host_pages(swap_memory: int | None, available: int = 1 << 40) -> int:
        config = RunnerConfig("m", page_size=16, max_num_seqs=4, max_step_tokens=64, swap_memory=swap_memory)
        return host_page_count(config, GEOMETRY, 100, available)

    assert host_pages(0) == 0
    assert host_pages(5 * GEOMETRY.page_bytes + 1) == 5
    assert host_pages(100 * GEOMETRY.page_bytes) == 100
    assert host_pages(None) == 4 * 7
    assert host_pages(None, available=40 * GEOMETRY.page_bytes) == 10


def some_pages(cache: KVCache, host: HostPages) -> list[torch.Tensor]:
    """One layer of each, filled with what tells every page and layer from the others."""
    pools = [*cache.keys, *cache.values, *host.keys, *host.values]
    for pool, tensor in enumerate(pools):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + pool * 1e6)
    return [tensor.clone() for tensor in pools]


def test_copies_move_whole_pages_of_every_layer_and_touch_no_others() -> None:
    cache = KVCache(GEOMETRY, 4)
    host = HostPages(cache, 3)
    before = some_pages(cache, host)
    layers = 2 * GEOMETRY.layers
    host.copy([(2, 0), (0, 1)], [])
    hosts, devices, olds = [*host.keys, *host.values], before[:layers], before[layers:]
    for layer, device, old in zip(hosts, devices, olds, strict=True):
        assert torch.equal(layer, torch.stack([device[2], device[0], old[2]]))
    host.copy([], [(0, 3)])
    for layer, device in zip((*cache.keys, *cache.values), before[:layers], strict=True):
        assert torch.equal(layer, torch.stack([device[0], device[1], device[2], device[2]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [16, 3])  # with 3, a page of fp8 fills no words
@pytest.mark.parametrize("staged_pages", [0, 1, 4, 100])
def test_staged_copies_are_as_those_page_by_page(
    dtype: torch.dtype, head_dim: int, staged_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = KVGeometry(2, 1, 5, head_dim, dtype)
    monkeypatch.setattr(kv_cache, "STAGING_BYTES", staged_pages * geometry.page_bytes)
    rng = random.Random(staged_pages)
    made: list[list[torch.Tensor]] = []
    plain, staged = (HostPages(KVCache(geometry, 12), 9, stages=stages) for stages in (False, True))
    for _ in range(20):
        out = list(zip(rng.sample(range(12), 6), rng.sample(range(9), 6), strict=True))
        back = list(zip(rng.sample(range(9), 5), rng.sample(range(12), 5), strict=True))
        source, target = rng.sample(range(12), 2)
        forks = [(source, target, 2)]
        made.clear()
        for host in (plain, staged):
            cache = host._cache
            for number, pool in enumerate((cache.pool, host._pool)):
                raw = pool.view(torch.uint8)
                raw.copy_((torch.arange(raw.numel()) * (7 + number) % 251).view_as(raw))
            with no_waits():
                host.copy(out, back, forks)
            made.append([pool.view(torch.uint8) for pool in (cache.pool, host._pool)])
        for ours, theirs in zip(*made, strict=True):
            assert torch.equal(ours, theirs)


def test_neighbours_in_host_memory_are_moved_together() -> None:
    assert list(kv_cache._runs([(2, 9), (3, 1), (4, 5), (7, 0), (9, 2), (10, 3)])) == [
        (0, 2, 3),
        (3, 7, 1),
        (4, 9, 2),
    ]
    assert not list(kv_cache._runs([]))


def test_what_goes_out_goes_before_what_comes_back() -> None:
    """Two sequences change places in one plan, through the same page; one comes back that just left."""
    cache = KVCache(GEOMETRY, 3)
    host = HostPages(cache, 2)
    before = some_pages(cache, host)
    layers = 2 * GEOMETRY.layers
    host.copy([(1, 0)], [(1, 1), (0, 2)])
    for layer, device, other in zip((*cache.keys, *cache.values), before, before[layers:], strict=False):
        assert torch.equal(layer, torch.stack([device[0], other[1], device[1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("clears", [False, True])
def test_forks_copy_pages_in_their_order_and_clear_tails_where_they_must_be(
    dtype: torch.dtype, clears: bool
) -> None:
    cache = KVCache(replace(GEOMETRY, dtype=dtype), 5)
    pool = cache.pool.view(torch.uint8)
    pool.copy_(torch.arange(pool.numel()).view_as(pool) % 251)
    before = pool.clone()
    cache.clear_tails = clears
    cache.fork([(2, 0, 3), (0, 4, 1), (3, 3, 2)])
    expected = before.clone()
    for page, source, length in ((0, 2, 3), (4, 2, 1), (3, 3, 2)):
        expected[:, :, page] = before[:, :, source]
        if clears:
            expected[:, :, page, :, length:] = 0
    assert torch.equal(pool, expected)


def test_a_fork_comes_after_what_goes_out_and_before_what_comes_back() -> None:
    """A page goes to the host and becomes a copy; its source is the place of a page that comes back."""
    cache = KVCache(GEOMETRY, 3)
    host = HostPages(cache, 2)
    before = some_pages(cache, host)
    layers = 2 * GEOMETRY.layers
    size = GEOMETRY.page_size
    host.copy([(1, 0)], [(1, 2)], [(2, 1, size)])
    for layer, device, other in zip((*cache.keys, *cache.values), before, before[layers:], strict=False):
        assert torch.equal(layer, torch.stack([device[0], device[2], other[1]]))
    for layer, device in zip((*host.keys, *host.values), before, strict=False):
        assert torch.equal(layer[0], device[1])


def test_measuring_copies_leaves_the_cache_as_it_was() -> None:
    cache = KVCache(GEOMETRY, 3)
    host = HostPages(cache, 2)
    before = some_pages(cache, host)
    assert host.measure() > 0.0
    for layer, was in zip((*cache.keys, *cache.values), before, strict=False):
        assert torch.equal(layer, was)
    assert HostPages(cache, 0).measure() == 0.0


def test_settings_out_of_range_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(
            "m",
            dtype="int3",  # type: ignore[arg-type]
            page_size=48,
            max_num_seqs=5000,
            gpu_memory_utilization=0,
            threads=0,
            swap_memory=-1,
        )
    wrong = ["dtype", "threads", "page_size", "gpu_memory_utilization", "swap_memory", "max_num_seqs"]
    assert [problem.partition(":")[0] for problem in caught.value.problems] == wrong


def test_a_step_has_a_token_for_each_sequence() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-step-tokens \(64\) must be at least --max-num-seqs \(100\)"
    ):
        RunnerConfig("m", max_num_seqs=100, max_step_tokens=64)

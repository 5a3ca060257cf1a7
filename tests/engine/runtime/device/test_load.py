"""Loading on a card: what it tells, what it sets aside, what is left for the cache, and what it
says when there is too little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.contract.messages import RunnerInfo
from engine.runtime.device import device_shard as loading
from engine.runtime.device.card import CudaCard, MemoryReading
from engine.runtime.device.device_shard import enough_memory, largest_plans
from engine.runtime.device.graphs import batch_buckets
from engine.runtime.device.memory import MemoryProfile, kv_page_count
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.setup.model_errors import DoesNotFit
from engine.runtime.setup.runner_config import RunnerConfig
from tests.engine.models import reference_greedy
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, fake_config, load_fake, load_on_card
from tests.engine.runtime.device.test_runner import GREEDY, SMALL
from tests.engine.runtime.driver import Driver

MIB = 1 << 20
PAGE_BYTES = 2 * 16 * 16 * 4
READINGS = [
    # total, free, reserved, peak
    MemoryReading(1000 * MIB, 900 * MIB, 0, 0),  # before anything
    MemoryReading(1000 * MIB, 700 * MIB, 150 * MIB, 150 * MIB),  # weights and tables; libraries took 50
    MemoryReading(1000 * MIB, 690 * MIB, 150 * MIB, 250 * MIB),  # a step; libraries took 10 more
    MemoryReading(1000 * MIB, 690 * MIB, 150 * MIB, 0),  # before any graph
    MemoryReading(1000 * MIB, 670 * MIB, 170 * MIB, 0),  # after the largest
    MemoryReading(1000 * MIB, 667 * MIB, 170 * MIB, 0),  # after the smallest
]


@pytest.fixture
def config(tiny_model: MakeModel) -> RunnerConfig:
    return fake_config(tiny_model("qwen3", **SMALL), max_model_len=48)


def test_what_the_largest_step_and_the_graphs_take_is_set_aside(
    config: RunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles: list[MemoryProfile] = []

    def count(
        profile: MemoryProfile, utilization: float, page_bytes: int, useful: int, *states_bytes: int
    ) -> int:
        assert (utilization, page_bytes, useful) == (0.9, PAGE_BYTES, 4 * 3 * 5 // 4)
        assert not any(states_bytes), "the model has no states"
        profiles.append(profile)
        return 7

    monkeypatch.setattr(loading, "kv_page_count", count)
    stages: list[str] = []
    runner = load_on_card(config, FakeCard(list(READINGS)), stages.append)
    assert profiles == [
        MemoryProfile(
            total=1000 * MIB,
            free_at_start=900 * MIB,
            weights=150 * MIB - 2 * PAGE_BYTES,
            step_peak=100 * MIB,
            outside_torch=60 * MIB,
            graphs=20 * MIB + 3 * 3 * MIB,  # buckets 4, 2, 1, and one that is compared
        )
    ]
    assert (runner.info.pages, runner.cache.pages, runner.info.is_async) == (7, 8, True)
    assert stages.pop(2).startswith("kernels compiled meanwhile, in ")
    assert stages == [
        "loading Qwen3ForCausalLM in float32 on a CPU in a GPU's place",
        "attention: prefill by triton, decode by triton",
        "measuring which kernels multiply fastest",
        "measuring the largest step",
        "allocating 7 KV pages of 16 tokens",
        *(f"capturing decode steps, {done} of 3" for done in range(4)),
        "planning attention of long prompts",
        "warming up",
    ]
    # Nothing that was measured or warmed up is left behind.
    driver = Driver(runner)
    lives = [driver.seat(slot, [slot + 9, 5, 3], GREEDY) for slot in range(4)]
    driver.finish(range(4), 2)
    expected = reference_greedy(Path(config.model), [[slot + 9, 5, 3] for slot in range(4)], 2)
    assert [life.output for life in lives] == expected


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
def test_steps_overlap_where_that_is_faster(config: RunnerConfig, capability: tuple[int, int]) -> None:
    """And where the card can: the log says for which numbers of rows."""
    runs = iter([3.0, 9.0, 9.0, 3.0, 3.0, 9.0])  # overlapping, plain, the largest bucket first
    card = FakeCard(capability=capability, replay_us=lambda run: next(runs))
    stages: list[str] = []
    runner = load_fake(Path(config.model), card, stages.append, max_model_len=48, kv_cache_memory=MIB)
    assert [stage for stage in stages if "overlap" in stage] == (
        [
            "compiling kernels that overlap",
            "kernels that overlap: faster for 1, 4 rows",
            "kernels that overlap: not faster for 2 rows",
        ]
        if capability == (9, 0)
        else []
    )
    if capability == (9, 0):
        driver = Driver(runner)
        life = driver.seat(0, [9, 5, 3], GREEDY)
        driver.finish([0], 3)
        assert life.output == reference_greedy(Path(config.model), [[9, 5, 3]], 3)[0]


def test_a_card_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    h200 = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    cards = [CudaCard(torch.device("cuda")), CudaCard(torch.device("cuda", 1))]
    assert [card.device.index for card in cards] == chosen == [3, 1]
    assert (cards[0].name, cards[0].capability, cards[0].multiprocessors) == ("H200", (9, 0), 132)


def test_too_little_memory_says_what_to_change(config: RunnerConfig) -> None:
    small = MemoryReading(MIB, MIB // 2, 0, 0)
    with pytest.raises(DoesNotFit, match=r"set --gpu-memory-utilization to at most 0\.5"):
        load_on_card(config, FakeCard([small]), lambda stage: None)


def test_memory_that_ends_on_the_way_does_too() -> None:
    with (
        pytest.raises(DoesNotFit, match="while loading weights: use fp8 weights"),
        enough_memory("loading weights", "use fp8 weights"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")


@pytest.mark.parametrize(
    "said",
    [
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    ],
)
def test_whoever_finds_no_memory(said: str) -> None:
    with pytest.raises(DoesNotFit, match="use less"), enough_memory("measuring", "use less"):
        raise RuntimeError(said)


def test_a_capture_that_memory_broke_off() -> None:
    """What ends the capture raises in turn."""

    def capture() -> None:
        try:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB. GPU 0 has ...")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(DoesNotFit, match=r"use less \(Tried to allocate"), enough_memory("it", "use less"):
        capture()
    with pytest.raises(RuntimeError, match="illegal"), enough_memory("it", "use less"):
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("slots", "context", "tokens", "lengths"),
    [
        (4, 100, 32, [[8] * 4, [32]]),
        (4, 20, 400, [[19] * 4, [19]]),
        (8, 100, 8, [[1] * 8, [8]]),
        (4, 1, 32, []),
    ],
)
def test_the_largest_step_has_the_most_rows_and_then_the_longest(
    slots: int, context: int, tokens: int, lengths: list[list[int]]
) -> None:
    info = RunnerInfo(1, 16, slots, context, 320, "float32", 0.0, 0.0)
    plans = list(largest_plans(info, tokens))
    assert [plan.lengths for plan in plans] == lengths
    assert all(sum(plan.lengths) <= max(tokens, slots * 19) for plan in plans)
    assert {page for plan in plans for _, pages in plan.grown for page in pages} <= {0}


@pytest.mark.parametrize(
    ("slots", "context", "tokens", "lengths"),
    [
        (4, 100, 32, [5, 5, 5, 5]),
        (4, 100, 18, [3, 5, 5, 5]),
        (4, 10, 64, [1, 1, 1, 1]),
        (3, 100, 64, [5, 5, 5]),
        (8, 100, 64, [1, 1, 1, 3, 5, 5, 5, 5]),
    ],
)
def test_between_them_is_one_of_as_many_tokens_behind_drafts(
    slots: int, context: int, tokens: int, lengths: list[int]
) -> None:
    """It follows from the one before, within the pages that that has given."""
    together = min(slots * 4, 18)
    info = RunnerInfo(1, 16, slots, context, 320, "float32", 0.0, 0.0, drafts_max=4, drafts_together=together)
    first, verifying, _ = largest_plans(info, tokens)
    assert sorted(verifying.lengths) == lengths
    own = DeviceSlots(slots, context, 16, 320, 1, torch.device("cpu"), together)
    for plan in (first, verifying):
        own.apply(plan)
        assert DeviceBatch.of(plan, own).tokens <= tokens
        own.append(plan.slots)


def test_graphs_of_steps_with_drafts_are_set_aside_too(
    config: RunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are numbers of tokens and tiles of attention."""
    profiles: list[MemoryProfile] = []

    def count(profile: MemoryProfile, *_: float) -> int:
        profiles.append(profile)
        return 7

    monkeypatch.setattr(loading, "kv_page_count", count)
    more = [*READINGS, MemoryReading(1000 * MIB, 666 * MIB, 170 * MIB, 0)]
    drafting = replace(config, max_drafts=1, max_num_seqs=2)
    runner = load_on_card(drafting, card := FakeCard(more), lambda stage: None)
    shapes = len(batch_buckets(2)) + len(runner.steps.verified)
    assert runner.steps.verified == [(2, 2), (3, 2), (4, 2)]
    assert profiles[0].graphs == 20 * MIB + 3 * MIB * shapes
    assert len(card.captured.outputs) == shapes


def test_the_smallest_of_everything_loads(config: RunnerConfig) -> None:
    """A context of two tokens: warm-up has no room, and a request fills everything."""
    sizes = {"max_num_seqs": 2, "max_model_len": 2, "max_step_tokens": 2, "kv_cache_memory": 2 * PAGE_BYTES}
    tiny = fake_config(Path(config.model), **sizes)
    driver = Driver(load_on_card(tiny, FakeCard(), lambda stage: None))
    life = driver.seat(0, [7], GREEDY)
    driver.finish([0], 1)
    assert life.output == reference_greedy(Path(config.model), [[7]], 1)[0]


GIB = 1 << 30
H200 = MemoryProfile(
    total=140 * GIB,
    free_at_start=139 * GIB,
    weights=15 * GIB,
    step_peak=2 * GIB,
    outside_torch=1 * GIB,
    graphs=1 * GIB,
)
PAGE = 8 << 20
MANY = 1 << 40


def test_what_is_left_is_for_pages() -> None:
    assert kv_page_count(H200, 0.9, PAGE, MANY) == (126 - 19) * GIB // PAGE
    assert kv_page_count(H200, 0.9, PAGE, useful=100) == 100


def test_snapshots_of_states_take_what_is_of_use_and_no_more_than_the_pages() -> None:
    assert kv_page_count(H200, 0.9, PAGE, MANY, 20 * GIB) == (126 - 19 - 20) * GIB // PAGE
    assert kv_page_count(H200, 0.9, PAGE, MANY, 20 * GIB, 10 * GIB) == (126 - 19 - 30) * GIB // PAGE
    left = (126 - 19) * GIB - ((126 - 19) * GIB - 4 * PAGE) // 3
    assert kv_page_count(H200, 0.9, PAGE, MANY, 0, 200 * GIB) == left // PAGE
    assert kv_page_count(H200, 0.9, PAGE, MANY, 200 * GIB) == (126 - 19) * GIB // 2 // PAGE
    with pytest.raises(DoesNotFit, match="do not hold"):
        kv_page_count(replace(H200, weights=130 * GIB), 0.9, PAGE, MANY, 20 * GIB)


def test_others_on_the_card_are_named_with_the_setting_that_fits() -> None:
    shared = replace(H200, free_at_start=70 * GIB)
    with pytest.raises(DoesNotFit, match=r"only 70.00 GiB are free.*at most 0.5"):
        kv_page_count(shared, 0.9, PAGE, MANY)
    assert kv_page_count(shared, 0.5, PAGE, MANY) > 0


def test_too_large_a_model_is_told_what_to_change() -> None:
    with pytest.raises(DoesNotFit, match="raise --gpu-memory-utilization, lower --max-step-tokens"):
        kv_page_count(replace(H200, weights=130 * GIB), 0.9, PAGE, MANY)

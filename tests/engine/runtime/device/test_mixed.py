"""Steps with parts of prompts as graphs: on a CPU in a GPU's place, beside the same steps without."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from torch import Tensor

from engine.contract.messages import Plan, SlotAssignment, Want
from engine.runtime.collective.shard import Shard
from engine.runtime.device import device_shard as loading
from engine.runtime.device.card import MemoryReading
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.device.device_shard import load_shard
from engine.runtime.device.memory import MemoryProfile
from engine.runtime.device.mixed import CHUNKS_MAX, MixedGraphs, MixedInputs, MixedShape, listed
from engine.runtime.device.rehearsal import Unjoined
from engine.runtime.device.slots import DeviceBatch
from engine.runtime.step.batch import Row
from engine.runtime.step.protocols import AttentionSpec
from tests.effort import some
from tests.engine.models import reference_greedy
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import FakeCard, fake_config, load_fake
from tests.engine.runtime.device.test_runner import COMPANY, GREEDY, SMALL, assert_same, lead
from tests.engine.runtime.device.waits import no_waits
from tests.engine.runtime.driver import Driver

CPU = torch.device("cpu")
MIB = 1 << 20
PADDING = 9
SPEC = AttentionSpec(heads=8, kv_heads=2, head_dim=16, windows=(None, 20, None))


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that the interpreter can take."""
    monkeypatch.setattr(loading, "TOKEN_COUNTS", (2, 8, 16, 32))


def card_on_which(*graphs_are_faster: bool) -> FakeCard:
    """Buckets are compared the largest first; the launches come before the replay. Kernels do not overlap."""
    us = cycle(time for faster in graphs_are_faster for time in (10.0, 9.0 if faster else 9.9))
    return FakeCard(capability=(8, 9), replay_us=lambda run: next(us))


def graphs_of(runner: DeviceRunner) -> MixedGraphs:
    found = runner.forward.__self__  # type: ignore[attr-defined]
    assert isinstance(found, MixedGraphs)
    return found


def watch(runner: DeviceRunner) -> list[int]:
    """The numbers of tokens of the steps that are replayed from now on; each is compared with the same step
    launched kernel by kernel, to the bit, and with a step that is not padded."""
    graphs, replayed = graphs_of(runner), list[int]()
    eager, shapes = graphs._eager, graphs._shapes

    def forward(batch: DeviceBatch) -> Tensor:
        launched: list[DeviceBatch] = []
        graphs._eager = lambda batch: launched.append(batch) or eager(batch)  # type: ignore[func-returns-value]
        found = graphs.forward(batch).clone()
        if launched:
            return found
        replayed.append(batch.tokens)
        shape = next(shape for shape in shapes[1:] if batch.tokens <= shape.tokens)
        assert torch.equal(found, graphs.eager(batch, shape))
        torch.testing.assert_close(found, eager(batch), atol=1e-4, rtol=1e-4)
        return found

    runner.forward = forward
    return replayed


@pytest.mark.parametrize("family", some(["mistral", "qwen3"], usual=1))
def test_a_step_by_a_graph_is_the_step_by_launches(tiny_model: MakeModel, family: str) -> None:
    """With a window or not: prompts in chunks beside decodes, pages shuffled and poisoned, tokens and
    log-probabilities as a CPU's."""
    path, slots = tiny_model(family, **SMALL), len(COMPANY) + 2
    expected = lead(load(path, max_num_seqs=slots, max_model_len=128, kernels="torch"), 2)
    runner = load_fake(path, card_on_which(True), max_num_seqs=slots, kv_cache_memory=MIB)
    assert graphs_of(runner).kept == [8, 16, 32]
    replayed = watch(runner)
    assert_same(lead(runner, 2), expected)
    assert len(replayed) > 3
    assert len({next(n for n in (8, 16, 32) if tokens <= n) for tokens in replayed}) > 1


def test_a_bucket_is_kept_where_replays_are_faster(tiny_model: MakeModel) -> None:
    """Two hundredths are noise. Steps of the other buckets are launched."""
    stages: list[str] = []
    path = tiny_model("qwen3", **SMALL)
    card = card_on_which(True, False, True)
    runner = load_fake(path, card, stages.append, max_num_seqs=2, kv_cache_memory=MIB)
    assert graphs_of(runner).kept == [8, 32]
    assert [stage for stage in stages if "prompts" in stage and "long" not in stage] == [
        *(f"capturing steps with prompts, {done} of 3" for done in range(4)),
        "steps with prompts that are faster as graphs, in tokens: 8, 32",
    ]
    replayed = watch(runner)
    driver = Driver(runner)
    life = driver.seat(0, range(2, 43), GREEDY)
    for chunk in (5, 16, 20):
        driver.step([(0, chunk)])
    driver.finish([0], 3)
    assert replayed == [5, 20]
    assert life.output == reference_greedy(path, [list(range(2, 43))], 3)[0]


@pytest.mark.parametrize("what", ["no timer", "enforce_eager"])
def test_steps_are_launched_where_replays_cannot_be_timed_or_are_not_wanted(
    tiny_model: MakeModel, what: str
) -> None:
    card = FakeCard() if what == "no timer" else card_on_which(True)
    is_eager = what == "enforce_eager"
    path = tiny_model("qwen3", **SMALL)
    runner = load_fake(path, card, max_num_seqs=2, kv_cache_memory=MIB, enforce_eager=is_eager)
    assert runner.forward == runner.model.forward


def test_ranks_launch_steps_with_prompts(tiny_model: MakeModel) -> None:
    """Each would choose for itself, and padded steps exchange more than others."""
    shape = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = fake_config(
        tiny_model("llama", **shape), max_num_seqs=2, kv_cache_memory=MIB, tensor_parallel_size=2
    )
    stages: list[str] = []
    with torch.inference_mode():
        shard = load_shard(config, card_on_which(True), stages.append, Unjoined(Shard(1, 2)))
        runner = shard.build(shard.info(shard.page_count()), stages.append)
    assert runner.forward == runner.model.forward


def test_launching_waits_for_nothing(tiny_model: MakeModel) -> None:
    path = tiny_model("qwen3", **SMALL)
    runner = load_fake(path, card_on_which(True), max_num_seqs=2, kv_cache_memory=MIB)
    prompt = list(range(2, 14))
    seated = [SlotAssignment(0, prompt, len(prompt), GREEDY)]
    plans = [
        Plan(0, [], seated, [(0, [3])], [0], [0], [5], [Want.NOTHING]),
        Plan(1, [], [], [], [0], [5], [7], [Want.SAMPLE]),
    ]
    with no_waits():
        flights = [runner.launch(plan) for plan in plans]
    assert flights[1].collect().tokens == reference_greedy(path, [prompt], 1)[0]


def test_more_chunks_than_a_graph_has_room_for_are_launched(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.device.mixed.CHUNKS_MAX", 1)
    path = tiny_model("qwen3", **SMALL)
    runner = load_fake(path, card_on_which(True), max_num_seqs=2, kv_cache_memory=MIB)
    replayed = watch(runner)
    driver = Driver(runner)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    lives = [driver.seat(slot, prompt, GREEDY) for slot, prompt in enumerate(prompts)]
    driver.step([(0, 3), (1, 4)])
    assert not replayed
    driver.finish([0, 1], 2)
    assert [life.output for life in lives] == reference_greedy(path, prompts, 2)


def test_the_graphs_memory_is_set_aside(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the largest, and for each bucket that of the smallest."""
    profiles: list[MemoryProfile] = []

    def count(profile: MemoryProfile, *_: object) -> int:
        profiles.append(profile)
        return 7

    monkeypatch.setattr(loading, "kv_page_count", count)
    free = [900, 700, 690]  # at the start, weights, a step
    free += [690, 680, 679]  # decode steps of 2 rows and of 1
    free += [679, 659, 656]  # steps of 32 tokens and of 8
    card = card_on_which(True)
    card.readings = [MemoryReading(1000 * MIB, n * MIB, 0, 0) for n in free]
    load_fake(tiny_model("qwen3", **SMALL), card, max_num_seqs=2)
    assert [profile.graphs for profile in profiles] == [(10 + 2 * 1 + 20 + 3 * 3) * MIB]


def test_a_steps_rows_as_a_graph_reads_them() -> None:
    shape = MixedShape.of(16, 4, SPEC)
    assert (shape.decode_rows, shape.windows, shape.tile_tokens) == (4, (None, 20), 32)
    rows = [Row(3, 40, 1, 0), Row(0, 7, 1, 1), Row(2, 5, 3, 2), Row(1, 0, 6, 5)]
    memory = torch.from_numpy(listed(rows, 2, shape, PADDING))
    inputs = MixedInputs.within(memory, shape)
    assert inputs.slots.tolist() == [3, 0, *[2] * 3, *[1] * 6, *[PADDING] * 5]
    assert inputs.ends.tolist() == [41, 8, 6, 7, 8, 1, 2, 3, 4, 5, 6, *[1] * 5]
    assert inputs.lengths.tolist() == [41, 8, 0, 0]
    assert inputs.chunks.tolist() == [[5, 3, 2], [0, 6, 5], *[[0, 0, 0]] * (CHUNKS_MAX - 1)]
    assert inputs.chunk_slots.tolist() == [2, 1, *[PADDING] * (CHUNKS_MAX - 1)]
    for window in (None, 20):
        tiles = inputs.tiles[window].tolist()
        assert tiles == [[0, 0], [1, 0], *[[CHUNKS_MAX, 0]] * (shape.tiles - 2)]
    parts = (
        inputs.slots,
        inputs.ends,
        inputs.lengths,
        inputs.chunks,
        inputs.chunk_slots,
        *inputs.tiles.values(),
    )
    assert all((part.data_ptr() - memory.data_ptr()) % 16 == 0 for part in parts)
    assert len(memory) >= sum(part.numel() for part in parts)


def test_a_bucket_has_tiles_for_any_chunks_that_fit() -> None:
    """The most: chunks that each end one token behind a tile."""
    shape = MixedShape.of(512, 256, SPEC)
    each = shape.tile_tokens + 1
    lengths = [each] * (512 // each)
    lengths += [1] * min(CHUNKS_MAX - len(lengths), 512 - sum(lengths))
    rows = [Row(0, 0, length, sum(lengths[:i])) for i, length in enumerate(lengths)]
    assert len(listed(rows, 0, shape, PADDING)) == shape.ends[-1]

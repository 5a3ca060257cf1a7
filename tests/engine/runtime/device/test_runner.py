"""The device's runner says what the CPU's says: every kind of sampling, chunks, mixed steps, swaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract.messages import NUMERIC_FAILURE, Plan, SamplingParams, SlotAssignment, Want
from engine.contract.packing import Biases
from engine.runtime.device import device_decoder
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.host.host_runner import HostRunner
from tests.effort import some
from tests.engine.models import VOCAB_SIZE, reference_greedy
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.device.waits import no_waits
from tests.engine.runtime.driver import Driver, Life

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
"""The interpreter takes its time for every head of every layer."""
GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0)
COMPANY: Sequence[dict[str, Any]] = (
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": Biases.of(((3, 2.0), (319, -1.0)))},
    {"temperature": 1.0, "min_p": 0.1, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3)), "min_tokens": 9},
)


@pytest.fixture
def path(tiny_model: MakeModel) -> Path:
    """Its checkpoint has a head of its own, and config.json says that it has none."""
    return tiny_model("qwen3", own_head=True, **SMALL)


def company(seed: int = 3) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (rng.choices(range(VOCAB_SIZE), k=length), SamplingParams(**{"seed": slot, "max_tokens": 9} | asked))
        for slot, (length, asked) in enumerate(zip((21, 40, 1, 16, 3), COMPANY, strict=True))
    ]


def lead(runner: HostRunner | DeviceRunner, outputs: int) -> list[Life]:
    """Prompts in chunks, one after another, beside decodes; then decodes alone; pages shuffled, poisoned."""
    driver = Driver(runner)
    lives = [driver.seat(slot, *asked) for slot, asked in enumerate(company())]
    driver.finish(range(len(lives)), outputs, chunk=24)
    return lives


def assert_same(found: Sequence[Life], expected: Sequence[Life]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.output == other.output
        for ours, theirs in (own.logprobs, other.logprobs), (own.prompt_logprobs, other.prompt_logprobs):
            assert [entry.top_ids for entry in ours] == [entry.top_ids for entry in theirs]
            for entry, expected_entry in zip(ours, theirs, strict=True):
                assert entry.logprob == pytest.approx(expected_entry.logprob, abs=1e-4)
                assert entry.top_logprobs == pytest.approx(expected_entry.top_logprobs, abs=1e-4)


def test_torch_computes_what_the_kernels_lack_a_piece_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, by the reference network, without graphs; the log says so."""
    slots, heard = len(COMPANY) + 2, list[str]()
    card = FakeCard()
    expected = lead(load(path, max_num_seqs=slots, max_model_len=128, kernels="torch"), 5)
    lacking = device_decoder.IMPLEMENTED - {"attention.qk_norm heads"}
    monkeypatch.setattr(device_decoder, "IMPLEMENTED", lacking)
    found = lead(load_fake(path, card, heard.append, max_num_seqs=slots, kv_cache_memory=1 << 20), 5)
    assert_same(found, expected)
    assert not card.captured.outputs
    assert any("torch's operations" in line and "attention.qk_norm heads" in line for line in heard)


def test_all_that_can_be_asked_for_is_as_on_a_cpu_by_graphs_and_eager(path: Path) -> None:
    slots = len(COMPANY) + 2
    expected = lead(load(path, max_num_seqs=slots, max_model_len=128, kernels="torch"), 5)
    assert expected[0].output == reference_greedy(path, [company()[0][0]], 5)[0]
    card = FakeCard()
    replayed = lead(load_fake(path, card, max_num_seqs=slots, kv_cache_memory=1 << 20), 5)
    assert_same(replayed, expected)
    assert card.captured.replays > 3
    eager = lead(load_fake(path, max_num_seqs=slots, kv_cache_memory=1 << 20, enforce_eager=True), 5)
    assert [(life.output, life.logprobs) for life in eager] == [
        (life.output, life.logprobs) for life in replayed
    ]


def lead_by_drafts(
    runner: DeviceRunner, answers: Sequence[Sequence[int]], right: float, most: int
) -> list[Life]:
    """`lead`, with drafts."""
    driver = Driver(runner)
    lives = [driver.seat(slot, *asked) for slot, asked in enumerate(company())]
    drafted = driver.finish_by(dict(enumerate(answers)), right, random.Random(8), chunk=24, most=most)
    assert drafted > 9
    return lives


@pytest.mark.parametrize(
    ("way", "right", "most"),
    some([("graphs", 0.7, 3), ("eager", 0.7, 15), ("torch", 1.0, 3), ("graphs", 0.0, 15)], usual=1),
)
def test_drafts_change_nothing_that_can_be_asked_for(path: Path, way: str, right: float, most: int) -> None:
    """Beside chunks and alone, in tiles with room for all tokens of a row and of a few; by torch's attention,
    to which each token is a row, and which computes chunks of them beside prompts."""
    slots = len(COMPANY) + 2
    expected = lead(load(path, max_num_seqs=slots, max_model_len=128, kernels="torch"), 9)
    card = FakeCard()
    settings: dict[str, Any] = {"max_num_seqs": slots, "kv_cache_memory": 1 << 20, "max_drafts": most}
    settings |= {"enforce_eager": way == "eager"} | ({"attention_backend": "torch"} if way == "torch" else {})
    runner = load_fake(path, card, **settings)
    assert runner.info.drafts_max == most
    assert bool(runner.info.verify_shapes) == (way != "eager")
    replays = card.captured.replays
    found = lead_by_drafts(runner, [life.output for life in expected], right, most)
    assert_same(found, expected)
    assert (card.captured.replays > replays + 2) == (way != "eager")


def test_launching_waits_for_nothing(path: Path) -> None:
    """Seats, prompts, log-probabilities, replays, swaps, forks, drafts: all are queued. Results are collected
    late, when later plans have taken their place on the device."""
    runner = load_fake(path, max_num_seqs=len(COMPANY), kv_cache_memory=1 << 20, max_drafts=1)
    asked = company()
    seated = [SlotAssignment.of(slot, ids, len(ids), params) for slot, (ids, params) in enumerate(asked)]
    grown = [(slot, [3 * slot, 3 * slot + 1, 3 * slot + 2]) for slot in range(len(asked))]
    slots, known = list(range(len(asked))), [len(ids) for ids, _ in asked]
    plans = [Plan(0, [], seated, grown, slots, [0] * len(slots), known, [Want.SAMPLE] * len(slots))]
    for step in range(1, 4):
        ones = [1] * len(slots)
        positions = [n + step - 1 for n in known]
        moves = [(15, 0)] if step == 2 else [], [(0, 16)] if step == 3 else []
        forks = [(0, 16, 3), (16, 17, 2)] if step == 1 else []
        wants = [Want.SAMPLE] * len(slots)
        plans.append(Plan(step, [], [], [], slots, positions, ones, wants, *moves, forked=forks))
    verify = slots, [n + 3 for n in known], [2] * len(slots), [Want.VERIFY] * len(slots)
    masks = [b"\xff" * (VOCAB_SIZE // 8), b""] * len(slots)
    plans.append(Plan(4, [], [], [], *verify, drafts=[[VOCAB_SIZE - 1]] * len(slots), masks=masks))
    with no_waits():
        flights = [runner.launch(plan) for plan in plans]
    *decoded, drafted = (flight.collect().tokens for flight in flights)
    tokens = [list(column) for column in zip(*decoded, drafted[::2], strict=True)]
    expected = lead(load(path, max_num_seqs=len(slots), max_model_len=128, kernels="torch"), 5)
    assert tokens == [life.output for life in expected]


def test_a_wait_would_be_noticed() -> None:
    x = torch.arange(4)
    waits: list[Callable[[], object]] = [
        lambda: x.tolist(),
        lambda: x.sum().item(),
        lambda: bool(x[0] == 0),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: x.cpu(),
        lambda: x.numpy(),
    ]
    for wait in waits:
        with pytest.raises(AssertionError, match="waits"), no_waits():
            wait()


def test_swapped_sequences_go_on_where_they_were(path: Path) -> None:
    runner = load_fake(path, max_num_seqs=2, kv_cache_memory=1 << 20)
    driver = Driver(runner)
    prompts = [list(range(5, 43)), list(range(60, 90))]
    first, second = (driver.seat(slot, prompt, GREEDY) for slot, prompt in enumerate(prompts))
    driver.step([(0, 38), (1, 17)])
    assert driver.swap_out(1) is second
    driver.finish([0], 3)
    driver.swap_out(0)
    driver.swap_in(0, second)
    driver.finish([0], 2)
    driver.swap_in(1, first)
    driver.finish([0, 1], 5)
    assert [first.output, second.output] == reference_greedy(path, prompts, 5)


@pytest.mark.parametrize("length", some([16, 37, 1, 15, 20], usual=1))
def test_forked_sequences_go_on_as_those_that_computed_it_all(path: Path, length: int) -> None:
    """By a graph, where each computes one token, and beside a chunk. Nobody's pages hold NaN."""
    runner = load_fake(path, max_num_seqs=3, kv_cache_memory=1 << 20)
    driver = Driver(runner)
    prompt = list(range(5, 43))
    first = driver.seat(0, prompt, GREEDY)
    driver.step([(0, 38)])
    driver.step([(0, 1)])
    second = driver.fork(1, first, length, GREEDY)
    driver.step([(0, 1), (1, 38 - length)])
    third = driver.fork(2, second, 37, GREEDY)
    driver.finish([0, 1, 2], 6)
    expected = reference_greedy(path, [prompt], 6)[0]
    assert [first.output[:6], second.output, third.output[:6]] == [expected] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, where a row is not finite
def test_a_numeric_failure_ends_its_row_alone(path: Path) -> None:
    driver = Driver(load_fake(path, max_num_seqs=2, kv_cache_memory=1 << 20), poison=False)
    sick, sound = driver.seat(0, [4, 5, 6], GREEDY), driver.seat(1, [4, 5, 6], GREEDY)
    driver.finish([0, 1], 2)
    with torch.inference_mode():
        driver.runner.cache.keys[0][sick.pages[0]] = torch.nan
    result = driver.step([(0, 1), (1, 1)])
    assert result.tokens[0] == NUMERIC_FAILURE
    driver.leave(0)
    heir = driver.seat(0, [4, 5, 6], GREEDY)
    driver.finish([0, 1], 4)
    assert heir.output == sound.output


def test_more_rows_than_graphs_are_for_go_kernel_by_kernel(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.device.device_shard.GRAPH_ROWS_MAX", 1)
    card = FakeCard()
    driver = Driver(load_fake(path, card, max_num_seqs=2, kv_cache_memory=1 << 20))
    lives = [driver.seat(slot, [slot + 2, 5], GREEDY) for slot in range(2)]
    replays = card.captured.replays
    driver.finish([0, 1], 3)
    assert card.captured.replays == replays
    driver.finish([0], 4)
    assert card.captured.replays == replays + 1
    assert [life.output[:3] for life in lives] == reference_greedy(path, [[2, 5], [3, 5]], 3)


HYBRID: dict[str, Any] = {
    "max_position_embeddings": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""A delta net, then attention with an output gate and a rope for half of each head."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Weights("qwen3_5_text").saved(tmp_path_factory.mktemp("hybrid"), **HYBRID)


def lead_few(
    runner: HostRunner | DeviceRunner,
    outputs: int,
    answers: Callable[[int], list[list[int]]] | None = None,
    right: float = 0.0,
    most: int = 0,
) -> list[Life]:
    """Prompts in chunks beside decodes; a slot that is taken by another sequence, which finds no state.
    `answers`: those of so many, that are drafted."""
    rng, driver = random.Random(5), Driver(runner)
    lives = []
    for lengths in ((21, 40, 1), (3,)):
        for slot, length in enumerate(lengths):
            asked = SamplingParams(seed=slot, max_tokens=9, temperature=slot % 2 / 2, logprobs=1)
            lives.append(driver.seat(slot, rng.choices(range(64), k=length), asked))
        if answers is None:
            driver.finish(range(len(lengths)), outputs, chunk=24)
        else:
            own = dict(enumerate(answers(len(lengths))))
            assert driver.finish_by(own, right, random.Random(8), chunk=24, most=most) > 0
        driver.leave(0)
    return lives


@pytest.mark.parametrize("way", some(["graphs", "torch", "eager"], usual=1))
def test_a_model_with_states_says_on_a_device_what_it_says_on_a_cpu(
    hybrid: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, and by torch's operations where they lack a piece; nothing waits."""
    expected = lead_few(load(hybrid, max_num_seqs=3, max_model_len=128, kernels="torch"), 4)
    if way == "torch":
        lacking = device_decoder.IMPLEMENTED - {"deltanet.gate silu"}
        monkeypatch.setattr(device_decoder, "IMPLEMENTED", lacking)
    card = FakeCard()
    settings: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_memory": 1 << 20}
    runner = load_fake(hybrid, card, **settings, enforce_eager=way == "eager")
    assert runner.info.state_bytes == 4 * (2 * 16 * 16 + 3 * 4 * 16)
    assert bool(card.captured.outputs) == (way == "graphs")
    assert_same(lead_few(runner, 4), expected)


@pytest.mark.parametrize("way", ["kernels", "torch"])
def test_no_launch_with_states_waits(hybrid: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        lacking = device_decoder.IMPLEMENTED - {"deltanet.gate silu"}
        monkeypatch.setattr(device_decoder, "IMPLEMENTED", lacking)
    runner = load_fake(hybrid, max_num_seqs=2, kv_cache_memory=1 << 20)
    seated = [SlotAssignment.of(slot, [slot, 5, 6], 3, GREEDY) for slot in range(2)]
    slots, grown, wants = [0, 1], [(0, [0]), (1, [1])], [Want.SAMPLE] * 2
    plans = [Plan(0, [], seated, grown, slots, [0, 0], [3, 3], wants)]
    plans.append(Plan(1, [], [], [], slots, [3, 3], [1, 1], wants, saved=[(0, 2, 0), (1, 3, 0)]))
    seated = [SlotAssignment.of(slot, [slot, 5, 6, 7], 4, GREEDY) for slot in range(2)]
    own = slots, [3, 3], [1, 1], wants
    plans += [Plan(step, slots, seated, grown, *own, restored=[(2, 0), (3, 1)]) for step in (2, 3)]
    with no_waits():
        flights = [runner.launch(plan) for plan in plans]
    found = [flight.collect().tokens for flight in flights]
    assert all(len(tokens) == 2 for tokens in found)
    assert found[2] == found[3], "from the same states"


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "right", "most"), [("graphs", 0.7, 3), ("eager", 0.7, 3), ("torch", 1.0, 5)])
def test_drafts_change_nothing_of_a_model_with_states(
    hybrid: Path, way: str, right: float, most: int
) -> None:
    """Beside chunks and alone; by attention that computes drafts as chunks, too. Slots are taken again, whose
    states are in any cell."""
    expected = lead_few(load(hybrid, max_num_seqs=3, max_model_len=128, kernels="torch"), 6)
    settings: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_memory": 1 << 20, "max_drafts": most}
    settings |= {"enforce_eager": way == "eager"} | ({"attention_backend": "torch"} if way == "torch" else {})
    card = FakeCard()
    runner = load_fake(hybrid, card, **settings)
    assert runner.info.drafts_max == most
    assert runner.info.state_windows == runner.info.drafts_together == max(3, most)
    replays, answers = card.captured.replays, iter([life.output for life in expected])
    found = lead_few(runner, 6, lambda count: [next(answers) for _ in range(count)], right, most)
    assert_same(found, expected)
    assert (card.captured.replays > replays + 2) == (way != "eager")
    assert runner.states is not None
    assert runner.states.order is not None
    assert runner.states.order.tolist() != sorted(runner.states.order.tolist()), "no draft was right"


def test_what_drafts_passed_is_saved_as_long_as_the_slot_has_it(hybrid: Path) -> None:
    """The states behind the last right draft, the one before and the newest token, when the slot is left:
    from each of them a sequence goes on as the first did."""
    prompt, driver = [4, 5, 6], Driver(load(hybrid, max_num_seqs=1, max_model_len=128, kernels="torch"))
    known = driver.seat(0, prompt, GREEDY).tokens
    driver.finish([0], 5)
    runner = load_fake(hybrid, max_num_seqs=3, kv_cache_memory=1 << 20, max_drafts=3, enforce_eager=True)

    def run(step: int, slots: list[int], starts: list[int], lengths: list[int], **rest: Any) -> list[int]:
        plan = Plan(step, rest.pop("left", []), rest.pop("seated", []), rest.pop("grown", []), slots, starts,
                    lengths, rest.pop("wants", [Want.SAMPLE] * len(slots)), **rest)  # fmt: skip
        return runner.run(plan).tokens

    def seat(slot: int, tokens: list[int]) -> dict[str, Any]:
        return {"seated": [SlotAssignment.of(slot, tokens, 3, GREEDY)], "grown": [(slot, [0])]}

    assert run(0, [0], [0], [3], **seat(0, prompt)) == known[3:4]
    drafts = [*known[4:6], (known[6] + 1) % 64]
    verified = run(1, [0], [3], [4], wants=[Want.VERIFY], drafts=[drafts])
    assert verified[:3] == known[4:7]
    heirs = [seat(slot, known[: 7 - slot]) for slot in range(3)]
    seated = {name: [each for heir in heirs for each in heir[name]] for name in ("seated", "grown")}
    moves: dict[str, Any] = {"saved": [(0, place, place) for place in range(3)]}
    moves |= {"restored": [(slot, slot) for slot in range(3)]}
    assert run(2, [0, 1, 2], [6, 5, 4], [1] * 3, left=[0], **seated, **moves) == known[7:4:-1]

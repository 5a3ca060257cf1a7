"""Models with states: a sequence has the same bits however it is cut into chunks, and whatever is computed
beside it, after a start from the beginning in any slot; and Qwen3.5's checkpoints load as in transformers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.contract.messages import Finished, Plan, SamplingParams, SlotAssignment, Want
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.setup.model_errors import DoesNotFit, UnsupportedModel
from engine.runtime.setup.runner_config import Kernels, RunnerConfig
from engine.runtime.step.batch import PackedBatch
from tests import effort
from tests.bench.engine.core_window import draft_by
from tests.core_laws import check
from tests.engine.runtime.config_oracle import Weights
from tests.fake_drafts import FakeDrafts

MODEL = Weights("qwen3_5_text", layers=4, heads=4, kv_heads=2)
Answers = Mapping[int, list[Any]]
"""By handle, the tokens of a sequence and their log-probabilities, and behind them why it ended."""
PAGE, SLOTS, LEN, LEN_PAGES = 16, 4, 90, 6
STOPS = (5,)
WHOLE: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 60,
    "vision_config": {"depth": 1},
}


def saved(path: Path, *, whole: bool = False) -> Path:
    """A checkpoint, of the text alone or of a whole with other tensors beside."""
    path.mkdir()
    config, tensors = MODEL.config(max_position_embeddings=128), MODEL.tensors()
    if whole:
        config = {**WHOLE, "tie_word_embeddings": config["tie_word_embeddings"], "text_config": config}
        tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
        tensors |= {"model.visual.patch.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def loaded(path: Path, dtype: Any = "float32", kernels: Kernels = "native", **options: Any) -> HostRunner:
    options["kernels"] = kernels
    config = RunnerConfig(
        str(path),
        device="cpu",
        dtype=dtype,
        page_size=PAGE,
        max_num_seqs=SLOTS,
        max_model_len=LEN,
        threads=1,
        **options,
    )
    runner = load_runner(config, lambda _: None)
    assert isinstance(runner, HostRunner)
    return runner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("states") / "text")


class Rows:
    """Sequences in a runner's slots, whose rows are computed as a test says."""

    def __init__(self, runner: HostRunner) -> None:
        self.runner, self.step = runner, 0

    @torch.inference_mode()
    def seat(self, slot: int, tokens: list[int]) -> None:
        own = list(range(slot * 6, slot * 6 + 6))
        start = SlotAssignment.of(slot, tokens, len(tokens), SamplingParams(seed=0, max_tokens=1))
        self.runner.slots.apply(Plan(0, [], [start], [(slot, own)], [], [], [], []))

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        self.runner.slots.apply(Plan(0, [slot], [], [], [], [], [], []))

    @torch.inference_mode()
    def compute(self, rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """The hidden states of rows (slot, position, length)."""
        slots, positions, lengths = map(list, zip(*rows, strict=True))
        plan = Plan(0, [], [], [], slots, positions, lengths, [Want.NOTHING] * len(rows))
        hidden = self.runner.model.forward(PackedBatch.of(plan, self.runner.slots))
        logits = self.runner.model.logits(hidden)
        return list(torch.cat((hidden.float(), logits), dim=1).split(lengths))


def cold(rows: Rows, tokens: list[int]) -> Tensor:
    """In one chunk, alone."""
    rows.seat(0, tokens)
    (found,) = rows.compute([(0, 0, len(tokens))])
    rows.leave(0)
    return found


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_chunks_any_batch_and_any_slot_have_the_same_bits(
    checkpoint: Path, dtype: str, kernels: Kernels
) -> None:
    rows = Rows(loaded(checkpoint, dtype, kernels))
    rng = random.Random(7)
    for _ in range(effort.drawn(3, whole=200)):
        prompts = [[rng.randrange(64) for _ in range(rng.randint(1, LEN))] for _ in range(SLOTS)]
        expected = [cold(rows, prompt) for prompt in prompts]
        order = rng.sample(range(SLOTS), SLOTS)
        done, found = dict.fromkeys(order, 0), {slot: list[Tensor]() for slot in order}
        for slot, prompt in zip(order, prompts, strict=True):
            rows.seat(slot, prompt)
        again = rng.choice(order)  # it is preempted once, somewhere
        while left := [slot for slot, prompt in zip(order, prompts, strict=True) if done[slot] < len(prompt)]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            lens = [len(prompts[order.index(slot)]) - done[slot] for slot in chosen]
            step = [
                (slot, done[slot], min(rest, rng.choice([1, 1, 2, 3, 7, 33, LEN])))
                for slot, rest in zip(chosen, lens, strict=True)
            ]
            step.sort(key=lambda row: row[2] > 1)  # decodes are before chunks
            for (slot, _, length), hidden in zip(step, rows.compute(step), strict=True):
                found[slot].append(hidden)
                done[slot] += length
            if again in chosen and rng.random() < 0.3:
                done[again], found[again], again = 0, [], -1
        for slot, own in zip(order, expected, strict=True):
            assert torch.equal(torch.cat(found[slot]), own)
            rows.leave(slot)


def test_a_model_of_text_and_images_has_the_bits_of_its_text(tmp_path: Path, checkpoint: Path) -> None:
    whole = saved(tmp_path / "whole", whole=True)
    tokens = [(7 * i) % 64 for i in range(40)]
    assert torch.equal(cold(Rows(loaded(whole)), tokens), cold(Rows(loaded(checkpoint)), tokens))


def test_states_are_part_of_the_memory_of_the_cache(checkpoint: Path) -> None:
    runner = loaded(checkpoint)
    channels, heads = 2 * 2 * 16 + 4 * 16, 4 * 16 * 16
    assert runner.info.state_bytes == 2 * 4 * (heads + 3 * channels)
    states = SLOTS * runner.info.state_bytes
    page_bytes, state_bytes = runner.info.page_bytes, runner.info.state_bytes
    few = loaded(checkpoint, kv_cache_memory=states + 7 * page_bytes, max_drafts=0)
    assert few.info.pages == 3
    assert few.info.state_places == 3 * page_bytes // state_bytes >= 1
    pages, along = runner.info.pages, LEN_PAGES * page_bytes // state_bytes
    assert runner.info.state_places == pages * page_bytes // state_bytes < SLOTS * (2 + along) * 5 // 4
    assert loaded(checkpoint, prefix_cache=False).info.state_places == 0
    with pytest.raises(DoesNotFit, match="states"):
        loaded(checkpoint, kv_cache_memory=states)


@pytest.mark.parametrize("pages", [4, 5, 7, 20, 60, 400])
def test_windows_for_drafts_are_part_of_the_memory_of_the_cache(checkpoint: Path, pages: int) -> None:
    """Their number is that of the slots, or one row's drafts, and no more than half of what pages take: then
    fewer are drafted."""
    info = loaded(checkpoint).info
    memory = SLOTS * info.state_bytes + pages * info.page_bytes
    some = loaded(checkpoint, kv_cache_memory=memory).info
    beside_bytes = max(0, some.pages - 4) * info.page_bytes
    assert some.state_windows == min(15, beside_bytes // 2 // info.state_bytes)
    assert some.drafts_max == min(15, some.state_windows)
    states = SLOTS + some.state_places + some.state_windows
    assert some.pages * info.page_bytes + states * info.state_bytes <= memory
    assert loaded(checkpoint, max_drafts=2).info.state_windows == SLOTS
    assert loaded(checkpoint, max_drafts=2, kernels="torch").info.drafts_max == 2
    assert loaded(checkpoint, max_drafts=0).info.state_windows == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "text_config"),
        ({"tie_word_embeddings": not MODEL.config()["tie_word_embeddings"]}, "tie_word_embeddings"),
        ({"is_causal": False}, "is_causal"),
        ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "architectures"),
    ],
)
def test_what_is_beside_the_text_is_accounted_for(changes: Mapping[str, Any], named: str) -> None:
    plain = {**WHOLE, "text_config": MODEL.config()}
    assert parse_model_config(json.dumps(plain).encode()).unread == ("vision_config",)
    with pytest.raises(UnsupportedModel, match=named):
        parse_model_config(json.dumps({**plain, **changes}).encode())


def scheduled(runner: HostRunner, rng: random.Random | None = None) -> Scheduler:
    """A scheduler with a prefix cache, as a seed says, or without one. The runner's slots are empty."""
    runner.slots._seats = [None] * SLOTS
    config = SchedulerConfig(step_tokens_max=64, queue_len_max=64, prefix_cache=False)
    if rng is not None:
        every, budget = rng.choice([1, 32, 512]), rng.choice([9, 24, 64])
        config = replace(config, step_tokens_max=budget, prefix_cache=True, state_every_len=every)
    # What steps took while warming up would have drafts pay on some machines, and on others not.
    return Scheduler(config, msgspec.structs.replace(runner.info, timed_steps=(), guess_share=0.01))


def drafting(
    scheduler: Scheduler, added: list[AddSequence], answers: Answers, right_share: float
) -> list[FakeDrafts]:
    """Let sequences draft their answers, such a share of them right. Returns their drafters."""
    prompts = {message.handle: message.prompt_ids for message in added}
    drafters: list[FakeDrafts] = []

    def drafter_of(sequence: Sequence) -> FakeDrafts:
        whole = [*prompts[sequence.handle], *(said[0] for said in answers[sequence.handle][:-1])]
        drafters.append(FakeDrafts(whole, STOPS, 64, right_share, random.Random(sequence.handle)))
        return drafters[-1]

    draft_by(scheduler, drafter_of)
    return drafters


def served(
    scheduler: Scheduler,
    runner: HostRunner,
    added: list[AddSequence],
    rng: random.Random | None = None,
    plans: list[Plan] | None = None,
    ends: list[Finished] | None = None,
) -> Answers:
    """Each sequence's tokens and their log-probabilities, then why it ended; in a history some come later,
    and pause for a while."""
    found = {message.handle: list[Any]() for message in added}
    coming, now = list(added), scheduler._now
    while coming or scheduler.has_work or scheduler._paused:
        now += 1.0
        if coming and (not scheduler.has_work or rng is None or rng.random() < 0.6):
            scheduler.add(coming.pop(0), now)
        if rng is not None and scheduler._sequences and rng.random() < 0.2:
            scheduler.pause([rng.choice([*scheduler._sequences])], now)
        if scheduler._paused and (rng is None or rng.random() < 0.4 or not scheduler.has_work):
            scheduler.resume([*scheduler._paused], now)
        plan = scheduler.plan(now)
        if plan is not None:
            if plans is not None:
                plans.append(plan)
            scheduler.commit(plan, runner.launch(plan).collect(), now + 0.5)
            assert runner.states is not None
            assert len({*runner.states.at}) == len(runner.states.at), "two slots have one state"
        check(scheduler)
        report = scheduler.report()
        for row, handle in enumerate(report.handles if report else ()):
            assert report is not None
            found[handle].append((report.tokens[row], report.logprobs[row]))
        for end in report.finished if report else ():
            found[end.handle].append(end.reason)
            if ends is not None:
                ends.append(end)
    assert scheduler.stats().pages_owned == 0
    return found


def conversations(rng: random.Random, runner: HostRunner) -> tuple[list[AddSequence], Answers]:
    """Sequences of a few prefixes, choices and next turns among them, and what each brings alone, without a
    cache."""
    alone, prefixes = scheduled(runner), [rng.choices(range(64), k=rng.randint(16, 40)) for _ in range(2)]
    added, expected = list[AddSequence](), dict[int, list[Any]]()
    while len(added) < 7:
        prompt = rng.choice(prefixes) + rng.choices(range(64), k=rng.randint(1, 8))
        for _ in range(rng.randint(1, 3)):  # turns
            if len(prompt) > LEN - 24:
                break
            for choice in range(rng.choice([1, 1, 2])):
                handle, max_tokens = len(added), rng.randint(1, 24)
                sampling = SamplingParams(
                    choice, max_tokens, temperature=choice / 2, logprobs=1, stop_token_ids=STOPS
                )
                added.append(AddSequence(handle, "req", prompt, sampling, tenant=f"t{choice}"))
                expected[handle] = served(alone, runner, added[-1:])[handle]
            answer = [token for token, _ in expected[handle][:-1]]
            prompt = prompt + answer + rng.choices(range(64), k=rng.randint(1, 6))
    return added, expected


@pytest.mark.parametrize(
    ("dtype", "kernels", "right_share"),
    [
        ("float32", "native", 0.6),
        ("bfloat16", "native", 0.9),
        ("bfloat16", "native", 0.0),
        ("bfloat16", "native", 1.0),
        *effort.some([("float32", "torch", 0.8), ("bfloat16", "torch", 0.8)], usual=1),
    ],
)
def test_any_history_has_the_bits_of_sequences_alone(
    checkpoint: Path, dtype: str, kernels: Kernels, right_share: float
) -> None:
    """With prefixes that are found, preempted and stalled sequences, in pools that are too small for all, and
    drafts that are right or wrong."""
    rng, seen = random.Random(3), Counter[str]()
    cold = loaded(checkpoint, dtype, kernels)
    page_bytes, state_bytes = cold.info.page_bytes, cold.info.state_bytes
    runners = [
        loaded(
            checkpoint, dtype, kernels, kv_cache_memory=pages * page_bytes + (SLOTS + states) * state_bytes
        )
        for pages, states in ((14, 12), (44, 24))
    ]
    for _ in range(effort.drawn(2 if kernels == "native" else 1, whole=50)):
        added, expected = conversations(rng, cold)
        runner = rng.choice(runners)
        scheduler = scheduled(runner, rng)
        drafters = drafting(scheduler, added, expected, right_share)
        assert served(scheduler, runner, added, rng) == expected
        stats = scheduler.stats()
        seen += Counter(hits=stats.prefix_hit_tokens, preemptions=stats.preemptions)
        seen += Counter(saved=stats.states.saved, restored=stats.states.restored)
        seen += Counter(drafted=sum(each.verified for each in drafters))
        seen += Counter(right=sum(each.right for each in drafters))
    assert seen["drafted"] > 15
    assert right_share - 0.5 < seen["right"] / seen["drafted"] < right_share + 0.1
    assert min(seen["hits"], seen["preemptions"], seen["saved"], seen["restored"]) > 0, seen


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_turn_goes_on_from_the_end_of_a_page_that_drafts_passed(checkpoint: Path, kernels: Kernels) -> None:
    runner, plans = loaded(checkpoint, "bfloat16", kernels), list[Plan]()
    prompt, sampling = [(7 * i) % 60 for i in range(20)], SamplingParams(0, 60, temperature=1.0, logprobs=1)
    first = AddSequence(0, "req", prompt, sampling)
    said = served(scheduled(runner), runner, [first])
    turn = AddSequence(
        1, "req", [*prompt, *(own[0] for own in said[0][:-1]), 9], SamplingParams(0, 9, logprobs=0)
    )
    alone = {**said, **served(scheduled(runner), runner, [turn])}
    scheduler = scheduled(runner, random.Random(1))
    drafting(scheduler, [first, turn], alone, 1.0)
    found = {**served(scheduler, runner, [first], plans=plans), **served(scheduler, runner, [turn])}
    assert found == alone
    assert scheduler.stats().prefix_hit_tokens == 64
    backs = [back for plan in plans for _, _, back in plan.saved]
    assert max(backs) > 0, "no row passed the end of a page"

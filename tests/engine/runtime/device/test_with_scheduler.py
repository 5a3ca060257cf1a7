"""The real scheduler, one step ahead of the device's runner, in a pool so small that sequences are preempted:
recomputed, swapped, found in the prefix cache, with snapshots of states where the model keeps them. A CPU's
runner, one step after another, must say the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contract.messages import FinishReason, Pending, Plan, RunnerInfo, SamplingParams
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.runtime.device.device_runner import DeviceRunner
from tests.bench.engine.core_window import draft_by
from tests.effort import some
from tests.engine.core.harness import COPIES_ARE_CHEAP, knowing
from tests.engine.models import VOCAB_SIZE
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import load_fake
from tests.engine.runtime.device.test_runner import HYBRID, SMALL
from tests.engine.runtime.device.waits import no_waits
from tests.engine.runtime.test_oracle import TOLERANCE
from tests.engine.runtime.test_with_scheduler import all_said, serve, serve_overlapped
from tests.fake_drafts import FakeDrafts
from tests.fake_grammars import FakeGrammars
from tests.gpu.loop import vacate

CONFIG = SchedulerConfig(step_tokens_max=40, queue_len_max=64)
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_step_tokens": 40, "max_model_len": 64}
PAGES = 5
COMPANY: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 5)), "min_tokens": 3},
)


def requests(outputs: int = 24) -> list[AddSequence]:
    rng = random.Random(11)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in (30, 31, 29, 15)]
    prompts.append(prompts[0] + [7, 8, 9])
    asked = [COMPANY[handle % len(COMPANY)] for handle in range(len(prompts))]
    return [
        AddSequence(
            handle, f"req-{handle}", prompt, SamplingParams(**{"seed": handle, "max_tokens": outputs} | own)
        )
        for handle, (prompt, own) in enumerate(zip(prompts, asked, strict=True))
    ]


def seen(info: RunnerInfo, swaps: bool) -> RunnerInfo:
    """Fewer pages than there are, and host pages where `swaps` says so."""
    return msgspec.structs.replace(info, pages=PAGES, host_pages=info.host_pages if swaps else 0)


@dataclass
class Unwaiting:
    """Launches wait for nothing."""

    runner: DeviceRunner
    info: RunnerInfo = field(init=False)

    def __post_init__(self) -> None:
        self.info = self.runner.info

    def launch(self, plan: Plan) -> Pending:
        with no_waits():
            return self.runner.launch(plan)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Weights("qwen3_5_text", vocab=VOCAB_SIZE).saved(tmp_path_factory.mktemp("hybrid"), **HYBRID)


@pytest.mark.parametrize("way", ["states", *some(["swaps", "recomputes"], usual=0)])
def test_one_step_ahead_on_a_device_is_a_cpu_step_by_step(
    tiny_model: MakeModel, hybrid: Path, way: str
) -> None:
    path, swaps = hybrid if way == "states" else tiny_model("qwen3", **SMALL), way == "swaps"
    outputs = 8 if way == "states" else 24
    host = load(path, kernels="torch", **SETTINGS)
    scheduler = knowing(Scheduler(CONFIG, seen(host.info, swaps)), COPIES_ARE_CHEAP)
    tokens, logprobs = all_said(serve(scheduler, host, requests(outputs)))

    device = load_fake(path, kv_cache_memory=1 << 20, **SETTINGS)
    scheduler = knowing(Scheduler(CONFIG, seen(device.info, swaps)), COPIES_ARE_CHEAP)
    steps = serve_overlapped(scheduler, Unwaiting(device), requests(outputs))
    tokens_ahead, logprobs_ahead = all_said(steps)
    assert tokens_ahead == tokens
    assert {own[-1] for own in tokens.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert logprobs.keys() == logprobs_ahead.keys()
    for handle, values in logprobs.items():
        assert logprobs_ahead[handle] == pytest.approx(values, abs=TOLERANCE)
    last = steps[-1].stats
    assert last.preemptions > 0
    assert (last.swaps_in > 0) == swaps
    assert last.prefix_hit_tokens > 0
    assert (last.states.restored > 0) == (way == "states")
    assert last.pages_owned == 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, where what a mask forbids is tempered
@pytest.mark.parametrize(
    ("right_share", "overlap", "has_states"),
    [
        *((share, True, states) for share in (0.7, 0.0, 1.0) for states in (False, True)),
        *((0.7, False, states) for states in (False, True)),
    ],
)
def test_drafts_change_no_token_on_a_device(
    tiny_model: MakeModel, hybrid: Path, right_share: float, overlap: bool, has_states: bool
) -> None:
    """With grammars, in a pool in which sequences are preempted, of a model with states with their snapshots:
    those that a CPU says without drafts. Plans wait for steps in flight, or do not; launches wait for
    nothing."""
    path, rng = hybrid if has_states else tiny_model("qwen3", **SMALL), random.Random(4)
    added = []
    for handle, asked in enumerate((*COMPANY, *COMPANY[:3])):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice((1, 15, 16, 30)))
        sampling = SamplingParams(**{"seed": handle, "max_tokens": 20, "logprobs": handle % 2} | asked)
        grammar = f"grammar {handle}" if handle % 3 == 1 else ""
        added.append(AddSequence(handle, f"req-{handle}", prompt, sampling, grammar=grammar))
    host = load(path, kernels="torch", **SETTINGS)
    device = load_fake(path, kv_cache_memory=1 << 20, max_drafts=5, enforce_eager=True, **SETTINGS)
    drafters: list[FakeDrafts] = []
    answers: dict[int, list[int]] = {}

    def drafter_of(sequence: Sequence) -> FakeDrafts:
        own = [*added[sequence.handle].prompt_ids, *answers[sequence.handle]]
        stops, own_rng = sequence.sampling.stop_token_ids, random.Random(sequence.handle)
        drafters.append(FakeDrafts(own, stops, VOCAB_SIZE, right_share, own_rng))
        return drafters[-1]

    def scheduler_of(info: RunnerInfo) -> Scheduler:
        grammars = FakeGrammars(lambda: 0.0, VOCAB_SIZE)
        own = seen(info, swaps=not has_states)
        return knowing(Scheduler(CONFIG, own, grammars=grammars), COPIES_ARE_CHEAP)

    tokens, logprobs = all_said(serve(scheduler_of(host.info), host, added))
    answers |= {handle: own[:-1] for handle, own in tokens.items()}
    scheduler = scheduler_of(device.info)
    draft_by(scheduler, drafter_of)
    if overlap:
        steps = serve_overlapped(scheduler, Unwaiting(device), added, 0.05)
    else:
        steps = serve(scheduler, Unwaiting(device), added)
    tokens_drafted, logprobs_drafted = all_said(steps)
    assert tokens_drafted == tokens
    assert logprobs.keys() == logprobs_drafted.keys()
    for handle, values in logprobs.items():
        assert logprobs_drafted[handle] == pytest.approx(values, abs=TOLERANCE)
    assert steps[-1].stats.preemptions > 0
    assert (steps[-1].stats.states.saved > 0) == has_states
    verified, right = sum(each.verified for each in drafters), sum(each.right for each in drafters)
    assert verified > 40
    assert right >= 0.2 * right_share * verified


def test_a_prompt_that_goes_on_from_a_snapshot_says_what_it_says_cold(hybrid: Path) -> None:
    """The snapshot lies where a chunk of the delta nets begins, at 64 tokens."""
    settings: dict[str, Any] = {"max_num_seqs": 1, "page_size": 64, "enforce_eager": True}
    runner, rng = Unwaiting(load_fake(hybrid, kv_cache_memory=1 << 20, **settings)), random.Random(2)
    first = rng.choices(range(VOCAB_SIZE), k=70)
    sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0, logprobs=1)
    other, said, restored = [*first[:64], 7, 8], [], []
    for prefix_cache, prompts in ((True, (first, first, other)), (False, (other,))):
        config = SchedulerConfig(step_tokens_max=80, queue_len_max=8, prefix_cache=prefix_cache)
        scheduler = knowing(Scheduler(config, runner.info), COPIES_ARE_CHEAP)
        for prompt in prompts:
            steps = serve(scheduler, runner, [AddSequence(0, "req", prompt, sampling)])
            said.append(all_said(steps))
            restored.append((steps[-1].stats.states.restored, steps[-1].stats.prefix_hit_tokens))
        vacate(runner.runner)
    assert restored == [(0, 0), (1, 64), (2, 128), (0, 0)]
    for (cold, cold_logprobs), (warm, warm_logprobs) in ((said[0], said[1]), (said[3], said[2])):
        assert warm == cold
        assert warm_logprobs[0] == pytest.approx(cold_logprobs[0], abs=TOLERANCE, rel=0.0)

"""The real scheduler, one step ahead of the device's runner, in a pool so small that sequences are preempted:
recomputed, swapped, found in the prefix cache. A CPU's runner, one step after another, must say the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from engine.contract.messages import FinishReason, Pending, Plan, RunnerInfo, SamplingParams
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.runtime.device.device_runner import DeviceRunner
from tests.effort import some
from tests.engine.core.harness import COPIES_ARE_CHEAP, knowing
from tests.engine.models import VOCAB_SIZE
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import load_fake
from tests.engine.runtime.device.test_runner import SMALL
from tests.engine.runtime.device.waits import no_waits
from tests.engine.runtime.test_oracle import TOLERANCE
from tests.engine.runtime.test_with_scheduler import all_said, serve, serve_overlapped

CONFIG = SchedulerConfig(step_tokens_max=40, queue_len_max=64)
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_step_tokens": 40, "max_model_len": 64}
PAGES = 5
COMPANY = (
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 5)), "min_tokens": 3},
)


def requests() -> list[AddSequence]:
    rng = random.Random(11)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in (30, 31, 29, 15)]
    prompts.append(prompts[0] + [7, 8, 9])
    asked = [COMPANY[handle % len(COMPANY)] for handle in range(len(prompts))]
    return [
        AddSequence(
            handle, f"req-{handle}", prompt, SamplingParams(**{"seed": handle, "max_tokens": 24} | own)
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


@pytest.mark.parametrize("swaps", some([True, False], usual=1))
def test_one_step_ahead_on_a_device_is_a_cpu_step_by_step(tiny_model: MakeModel, swaps: bool) -> None:
    path = tiny_model("qwen3", **SMALL)
    host = load(path, kernels="torch", **SETTINGS)
    scheduler = knowing(Scheduler(CONFIG, seen(host.info, swaps)), COPIES_ARE_CHEAP)
    tokens, logprobs = all_said(serve(scheduler, host, requests()))

    device = load_fake(path, kv_cache_memory=1 << 20, **SETTINGS)
    scheduler = knowing(Scheduler(CONFIG, seen(device.info, swaps)), COPIES_ARE_CHEAP)
    steps = serve_overlapped(scheduler, Unwaiting(device), requests())
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
    assert last.pages_owned == 0

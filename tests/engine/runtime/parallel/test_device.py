"""The device's runner on two ranks, graphs and one step ahead, says what a CPU says alone, step by step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import Runner
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.runtime import load as loading
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.parallel import leader
from engine.runtime.parallel import ranks as parallel_ranks
from engine.runtime.setup.runner_config import RunnerConfig
from tests.engine.models import VOCAB_SIZE
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.device.card import cold
from tests.engine.runtime.device.test_runner import HYBRID, SMALL
from tests.engine.runtime.device.test_with_scheduler import requests
from tests.engine.runtime.parallel import device_rank
from tests.engine.runtime.test_with_scheduler import all_said, serve, serve_overlapped

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 16,
    "max_num_seqs": 2,
    "max_step_tokens": 16,
    "max_model_len": 64,
}
TOLERANCE = 1e-4


def scheduler_of(runner: Runner) -> Scheduler:
    return Scheduler(SchedulerConfig(step_tokens_max=16, queue_len_max=64), runner.info)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("has_states", [True, False])
def test_two_ranks_with_graphs(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_states: bool
) -> None:
    """One key-value head, so both have it. Room for pages is measured by a step that both run."""
    hybrid = HYBRID | {"linear_num_key_heads": 2}
    saved = partial(Weights("qwen3_5_text", vocab=VOCAB_SIZE).saved, tmp_path)
    path: Path = saved(**hybrid) if has_states else tiny_model("qwen3", **SMALL)
    monkeypatch.setattr(parallel_ranks, "MODULE", device_rank.__name__)
    monkeypatch.setattr(loading, "load_shard", device_rank.load_shard)
    alone = load(path, kernels="torch", **SETTINGS)
    tokens, logprobs = all_said(serve(scheduler_of(alone), alone, requests(5)[:2]))
    config = RunnerConfig(str(path), tensor_parallel_size=2, threads=1, **SETTINGS)
    reasons: list[str] = []
    with cold():
        runner = leader.lead(config, lambda stage: None, reasons.append)
    try:
        assert isinstance(runner.own, DeviceRunner)
        assert runner.info.is_async
        found, found_logprobs = all_said(serve_overlapped(scheduler_of(runner), runner, requests(5)[:2]))
    finally:
        runner.close()
    assert found == tokens
    for handle, values in logprobs.items():
        assert found_logprobs[handle] == pytest.approx(values, abs=TOLERANCE)
    assert not reasons

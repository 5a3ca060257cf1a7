from __future__ import annotations

import pytest

from engine.core.scheduler_config import SchedulerConfig
from tests.fake_runner import runner_info


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_tokens_max": 0},
        {"queue_len_max": 0},
        {"watermark": -0.1},
        {"watermark": 1.0},
        {"preemptions_max": 0},
        {"stall_deadline_s": 0.0},
    ],
)
def test_limits_are_asserted(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        SchedulerConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["pages", "page_size", "slots"])
def test_a_runner_without_anything_is_refused(field: str) -> None:
    with pytest.raises(AssertionError):
        SchedulerConfig().check_against(runner_info(**{field: 0}))


def test_limits_are_asserted_against_the_runners() -> None:
    SchedulerConfig(step_tokens_max=8).check_against(runner_info(slots=8))
    with pytest.raises(AssertionError, match="token in every step"):
        SchedulerConfig(step_tokens_max=7).check_against(runner_info(slots=8))

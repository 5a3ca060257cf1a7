"""The scheduler's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.core.messages import RunnerInfo


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    step_tokens_max: int = 2048
    """The token budget of one step: what all its rows may compute together."""
    queue_len_max: int = 256
    """Sequences that may wait. One more is rejected at once."""
    queue_tokens_max: int = 1 << 30
    """Prompt tokens that may wait for their first admission. One that waits alone may have more."""
    watermark: float = 0.02
    """Share of the pages that an admission leaves available, so that those who run can grow a while
    before somebody must be preempted. Rounded up to whole pages."""
    preemptions_max: int = 3
    """A sequence preempted so often is admitted again only when nobody can be preempted after it."""
    prefix_cache: bool = True
    stall_deadline_s: float = 60.0
    """A sequence that stays paused for so long ends."""
    paused_max: int = 256
    """Sequences that may be paused at once: one more, and the one paused for longest ends before its
    deadline. What readers who do not read can hold is so bounded, however many there are."""
    step_time_target_s: float = math.inf
    """How long a step may take as far as prompts decide it: the longest gap that running streams see.
    Few prompts take less, and where decodes alone come near it prompts take a share of their time all the
    same (`policy.prompt_room_s`). What it buys in tokens is learned, and `step_tokens_max` is its cap.
    Infinite: prompts may take whatever the budget of tokens allows."""

    def __post_init__(self) -> None:
        assert self.step_tokens_max >= 1
        assert self.queue_len_max >= 1
        assert self.queue_tokens_max >= 1
        assert 0.0 <= self.watermark < 1.0
        assert self.preemptions_max >= 1
        assert self.stall_deadline_s > 0.0
        assert self.paused_max >= 1
        assert self.step_time_target_s > 0.0

    def check_against(self, runner: RunnerInfo) -> None:
        """The relations between our limits and the runner's."""
        assert runner.pages >= 1
        assert runner.page_size >= 1
        assert runner.slots >= 1
        assert self.step_tokens_max >= runner.slots, "each running sequence needs a token in every step"

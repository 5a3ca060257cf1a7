"""The scheduler's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.contract.messages import RunnerInfo, ServiceClass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits and settings of a scheduler."""

    step_tokens_max: int = 2048
    """The token budget of one step: the tokens that all its rows may compute together."""
    queue_len_max: int = 256
    """Sequences that may wait for their first admission. One more is rejected at once."""
    queue_tokens_max: int = 1 << 30
    """Prompt tokens that may wait for their first admission. One that waits alone may have more."""
    watermark: float = 0.02
    """The share of the pages that an admission leaves available, rounded up to whole pages, so that running
    sequences can grow a while before one must be preempted."""
    preemptions_max: int = 3
    """Preemptions of one sequence. One that was preempted so often is admitted again only when no running
    sequence need be preempted after it."""
    prefix_cache: bool = True
    state_every_len: int = 512
    """The least distance of the snapshots of a long prompt, in tokens, of a model that has states. It is at
    least as many as have pages of a state's size (`fitting`)."""
    session_keep_s: float = 30.0
    """The time for which the pages of a session's request are kept for its next turn, in seconds; 0.0: they
    are cached like any other."""
    stall_deadline_s: float = 60.0
    """The time for which a sequence may stay paused before it ends, in seconds."""
    paused_max: int = 256
    """Sequences that may be paused at once. With one more, the one paused for longest ends before its
    deadline, so that clients that do not read hold a bounded number of sequences."""
    gap_targets_s: tuple[float, ...] = (math.inf,) * len(ServiceClass)
    """For each class, FLEX first: the longest gap that its streams are to see beside prompts, in seconds.
    Infinite: `step_tokens_max` alone bounds prompts. (`engine.core.estimate.pace`)"""
    prompt_share: float = 0.5
    """The least share of the time that prompts have beside decodes when no gap target can be kept."""

    drafts_max: int = 15
    """The most drafts that a row verifies, where the runner can; 0: none. How many pay,
    `engine.core.drafts.price` says."""

    def __post_init__(self) -> None:
        assert self.step_tokens_max >= 1
        assert self.queue_len_max >= 1
        assert self.queue_tokens_max >= 1
        assert 0.0 <= self.watermark < 1.0
        assert self.preemptions_max >= 1
        assert self.state_every_len >= 1
        assert 0.0 <= self.session_keep_s < math.inf
        assert self.stall_deadline_s > 0.0
        assert self.paused_max >= 1
        assert len(self.gap_targets_s) == len(ServiceClass)
        assert min(self.gap_targets_s) > 0.0
        assert 0.0 < self.prompt_share < 1.0
        assert self.drafts_max >= 0

    def fitting(self, runner: RunnerInfo) -> SchedulerConfig:
        """These settings as the runner allows them. Of a model with states, pages are of no use to others
        where there is no place for states; where there is, a long prompt's states take no more memory than
        its pages."""
        if not runner.state_bytes:
            return self
        worth_len = runner.page_size * -(-runner.state_bytes // max(1, runner.page_bytes))
        return replace(
            self,
            prefix_cache=self.prefix_cache and runner.state_places > 0,
            state_every_len=max(self.state_every_len, worth_len),
        )

    def check_against(self, runner: RunnerInfo) -> None:
        """Assert the relations between these limits and the runner's."""
        assert runner.pages >= 1
        assert runner.page_size >= 1
        assert runner.slots >= 1
        assert self.step_tokens_max >= runner.slots, "each running sequence needs a token in every step"

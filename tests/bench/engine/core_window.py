"""The one window of benches and tests on what the core keeps for itself: who holds what, and a request of one
sequence."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.messages import AddPrompt, AddRequest
from engine.contract.packing import packed
from engine.core.drafts.drafter import Drafts
from engine.core.queue.newcomers import AddSequence
from engine.core.queue.tenants import TenantHoldings
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence


def alone(sequence: AddSequence) -> AddRequest:
    """The request of one sequence."""
    sampling = sequence.sampling
    prompt = AddPrompt(packed(sequence.prompt_ids), sampling.max_tokens, sampling.min_tokens, [sampling.seed])
    return AddRequest(
        sequence.handle,
        sequence.request_id,
        [prompt],
        sampling,
        sequence.cache_salt,
        sequence.tenant,
        sequence.service_class,
        sequence.first_token_s,
        grammar=sequence.grammar,
        has_next_turn=sequence.has_next_turn,
    )


def due(scheduler: Scheduler) -> list[Sequence]:
    """The waiting sequences that nothing holds back."""
    return scheduler._waiting.due


def is_following(scheduler: Scheduler, sequence: Sequence) -> bool:
    """True if a waiting sequence lacks the prompt that another computes."""
    return scheduler._waiting.is_following(sequence)


def in_slot(scheduler: Scheduler, slot: int) -> Sequence:
    """The sequence that holds this slot."""
    return scheduler._allocator.running[slot]


def holdings(scheduler: Scheduler) -> TenantHoldings:
    """The slots and pages that the running sequences of each tenant hold."""
    return scheduler._allocator.holdings


def draft_by(scheduler: Scheduler, drafter_of: Callable[[Sequence], Drafts]) -> None:
    """Let sequences have these drafters."""
    assert scheduler._drafting is not None
    scheduler._drafting.drafter_of = drafter_of

"""The schedulers that Penstock's is compared with: other orders of the queue, and another plan of a step.

`FIFO` and `priority`, which is vLLM's (the class orders the queue), plan a step as Penstock does: decodes
first, then prompts for as long as a step may take. `prefill-first` is what vLLM V0, Mini-SGLang and nano-vllm
do: a step computes prompts, as many tokens as its budget allows, or decodes when there are none. `shortest`
is the best that short prompts can have, and starves long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from engine.contract.messages import StepOutput
from engine.core.queue import policy
from engine.core.queue.policy import Circumstances, Discipline
from engine.core.sequence import Sequence, Status
from engine.core.step.plan_builder import PlanBuilder
from engine.core.step.planner import Planner
from tests.bench.engine.virtual import UNBOUNDED_GAPS, Engine

FIFO: Final = "FIFO"
PRIORITY: Final = "priority"
PREFILL_FIRST: Final = "prefill-first"
SHORTEST: Final = "shortest"
OURS: Final = "penstock"
NAMES: Final = (FIFO, PRIORITY, PREFILL_FIRST, SHORTEST, OURS)

NEVER: Final = 1 << 60


class PrefillFirst(Planner):
    """Plans prompts alone as long as there are any, else decodes."""

    def fill(self, builder: PlanBuilder, news: StepOutput, now: float) -> None:
        self.allocator.grow(builder, now)
        for sequence in self.allocator.running.values():
            if sequence.pending_len > 1:
                sequence.expected_len = sequence.pending_len
                builder.prefills.append(sequence)
        self._plan_prompts(builder, news, now)
        if not builder.rows:
            self._plan_decodes(builder, now)


def served_by(name: str, engine: Engine) -> Engine:
    """`engine` with the discipline called `name`."""
    if name == PREFILL_FIRST:
        return replace(engine, discipline=policy.FIFO, planner=PrefillFirst, gap_targets_s=UNBOUNDED_GAPS)
    return replace(engine, discipline=_DISCIPLINES[name])


def _by(key: Callable[[Sequence], float]) -> Discipline:
    """A discipline: running and resumed sequences, then preempted ones, then new ones; each by `key`, then by
    arrival."""

    def order(sequences: Iterable[Sequence], _: Circumstances) -> list[Sequence]:
        return sorted(sequences, key=lambda s: (_rank(s), key(s), s.arrived_at, s.handle))

    return Discipline(order, NEVER)


def _rank(sequence: Sequence) -> int:
    if sequence.status is Status.WAITING:
        return 2
    return int(sequence.status not in (Status.RUNNING, Status.STALLED))


_DISCIPLINES: Final = {
    FIFO: policy.FIFO,
    PRIORITY: _by(lambda sequence: -sequence.service_class),
    SHORTEST: _by(lambda sequence: sequence.expected_len),
    OURS: policy.RESPONSE_RATIO,
}

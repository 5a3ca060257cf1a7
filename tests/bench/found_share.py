"""What a kind of requests found in prefix caches, and how long its first tokens took."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.bench.figures import quantile


@dataclass(slots=True)
class Seen:
    """What one kind of requests saw."""

    possible: int = 0
    """The prompt tokens that a turn before had, or another with the same system prompt."""
    found: int = 0
    first_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.found / self.possible

    def ttft(self, q: float) -> float:
        """A quantile of the times to the first token, in seconds."""
        return quantile(self.first_s, q)

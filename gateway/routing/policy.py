"""The choice among several replicas. Pure.

Load is the tokens in flight: a request weighs what it reserved, so that one long prompt counts for more than
one short question. If requests were counted, the next long one would go to the replica that holds the last.
"""

from __future__ import annotations

from collections.abc import Sequence


def least_loaded(loads: Sequence[int], turn: int) -> int:
    """The index of the least load; among equals the first at or after `turn`, which goes round."""
    assert loads
    return min(range(len(loads)), key=lambda index: (loads[index], (index - turn) % len(loads)))

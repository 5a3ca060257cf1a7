"""What is still there although nobody needs it: objects that refer to each other in a circle."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Left = Callable[[], list[object]]
"""The objects of the kinds in question that were made since the beginning and are not gone."""


@contextmanager
def uncollected(*kinds: type) -> Iterator[Left]:
    """Nothing is garbage collected in here: what goes, goes because nothing refers to it any more. Yields a
    function that lists the objects of exactly these types that were made in here and are still there."""

    wanted = frozenset(kinds)

    def alive() -> list[object]:
        return [one for one in gc.get_objects() if type(one) in wanted]

    gc.collect()
    before = alive()  # kept, so that nothing made later has the id of one of them
    known = {id(one) for one in before}
    gc.disable()
    try:
        yield lambda: [one for one in alive() if id(one) not in known]
    finally:
        gc.enable()

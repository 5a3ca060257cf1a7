"""What is still there although nobody needs it: objects that refer to each other in a circle."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Left = Callable[..., list[object]]
"""`left(Stream, Report)`: the objects of these types that were made since and are not gone."""


@contextmanager
def uncollected() -> Iterator[Left]:
    """Nothing is garbage collected in here: what goes, goes because nothing refers to it any more."""
    gc.collect()
    gc.freeze()  # what was there before is not looked at
    gc.disable()
    try:
        yield lambda *kinds: [one for one in gc.get_objects() if type(one) in kinds]
    finally:
        gc.enable()
        gc.unfreeze()

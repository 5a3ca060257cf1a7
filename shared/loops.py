"""Which event loop a service runs on: uvloop where it is installed, else asyncio's own.

uvloop spends less CPU on an event. The line with which a service says that it is ready names the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """For `asyncio.Runner`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def loop_name() -> str:
    """The package of the loop that runs: `uvloop` or `asyncio`."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]

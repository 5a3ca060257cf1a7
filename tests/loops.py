"""The event loops on which the services can run."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on asyncio's event loop and on uvloop's."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**given))

    own = inspect.signature(test)
    first = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    functools.update_wrapper(run, test)
    vars(run)["__signature__"] = own.replace(parameters=[first, *own.parameters.values()])
    del vars(run)["__wrapped__"]  # pytest looks at the signature of what is run
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    marked: Callable[..., None] = pytest.mark.parametrize(
        "loop_factory", factories, ids=["asyncio", "uvloop"]
    )(run)
    return marked

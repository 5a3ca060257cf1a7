from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
ONE_LOOP = {"test_load": "uvloop", "test_interop": "asyncio"}  # these are long


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What is tested on sockets is tested on both event loops."""
    one = ONE_LOOP.get(item.path.stem)
    return {one: FACTORIES[one]} if one else FACTORIES

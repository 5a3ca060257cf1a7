"""Cleaning up while one is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from shared.process.shield import shielded
from tests.uncollected import uncollected


class Held:
    """What the frame of whoever cleans up refers to."""


async def test_a_cancellation_is_raised_once_the_work_is_done() -> None:
    go_on, results = asyncio.Event(), list[bool]()
    task = asyncio.create_task(shielded(go_on.wait(), results.append))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert results == [True]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_an_error_of_shielded_work_leaves_no_reference_cycle(is_cancelled: bool) -> None:
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        if not is_cancelled:
            raise OSError

    async def cleaning_up() -> None:
        held = Held()
        await shielded(work())
        del held

    with uncollected(Held) as left:
        task = asyncio.create_task(cleaning_up())
        await asyncio.sleep(0)
        if is_cancelled:
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else OSError):
            await task
        del task
        await asyncio.sleep(0)
        assert not left()

"""The watch over the services of `penstock up`: one of several engines that ends is started again.

The gateway keeps the engine's place meanwhile, and its requests go to the others. The end of the gateway, or
of an only engine, is the end of all; so is that of an engine which ends `ROW_MAX` times in a row, as the
machine may have no room for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from shared.cli.supervisor import RunningService, ServiceDied
from shared.process.clock import Clock

RESTART_S_MIN: Final = 1.0
"""The time before the first restart in a row, in seconds; it doubles."""
ROW_MAX: Final = 5
STEADY_S: Final = 60.0
"""The time after which an engine that was ready ends no row any more, in seconds."""

Say = Callable[[str], None]


async def raise_first_death(services: list[RunningService], say: Say, clock: Clock) -> None:
    """Keep the services running, until one ends for good. Raises ServiceDied. Those that are started again
    take their places in the list."""
    watches = [asyncio.create_task(_keep(services, at, say, clock)) for at in range(len(services))]
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        raise done.pop().result()
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _keep(services: list[RunningService], at: int, say: Say, clock: Clock) -> ServiceDied:
    row = 0
    while True:
        began_s = clock.monotonic()
        death = await services[at].failed()
        spec = services[at].spec
        row = 1 if clock.monotonic() - began_s >= STEADY_S else row + 1
        if not spec.restarts or row > ROW_MAX:
            return death
        pause_s = RESTART_S_MIN * 2 ** (row - 1)
        say(f"{death}\nThe {spec.name} is started again in {pause_s:g} s.")
        await clock.sleep(pause_s)
        await services[at].kill()  # it may have failed without ending
        services[at] = await RunningService.start(spec, clock)
        try:
            await services[at].ready(lambda _: None)
        except ServiceDied:
            continue  # `failed` says at once how
        say(f"The {spec.name} is ready again.")

"""The gateway as a process: its signals, and its exit status.

On SIGTERM or SIGINT the gateway drains (`gateway.app`), and a second one ends what is still open. On SIGHUP
the parts of the configuration that can be read again, certificates and issuers' keys are. With several
workers, the supervisor does the same to all of them, and each of them is such a process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.app import Gateway
from gateway.background import Background
from gateway.config.whole import GatewayConfig
from gateway.listen.listener import ListenFailed
from gateway.listen.listener_tls import ListenerTls, tls_of
from gateway.operators.listener import listen_for_operators
from gateway.request.salts import new_secret
from gateway.workers.channel import WorkerStart
from gateway.workers.process import ChildWorker, Worker
from shared.process import descriptors, logs
from shared.process.exit_codes import ExitCode
from shared.process.files import FileVersion
from shared.process.lifecycle import ORPHANED, Phase, on_stop_signals
from shared.process.loops import watch_lag
from shared.process.socket_directory import SocketDirectory

if TYPE_CHECKING:
    from gateway.workers.accepted import Accepted
    from gateway.workers.place import Launch
    from gateway.workers.supervisor import Supervisor

SOCKETS_PREFIX: Final = "penstock-gateway-"
YOUNG_MAX: Final = 5_000
"""The number of objects made and not dropped yet after which the young ones are looked through. As many take
0.1 ms. A few requests have more than Python's own 700, nearly all of which are dropped with the requests."""

log = logs.get(__name__)


async def serve(
    config: GatewayConfig, path: Path, worker: WorkerStart | None = None, *, seen: FileVersion | None = None
) -> ExitCode:
    """Run a gateway until a stop signal; a second one ends the drain. `worker` says which of several workers
    it is. `seen` is the version of the file that the configuration was read from. Raises ConfigError,
    ListenFailed and UnusableTls."""
    stop, hurry = _stop_signals()
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    watch_lag()
    _take_descriptors(config)
    async with Gateway(config, path=path, seen=seen, worker=worker) as gateway:
        reloading = asyncio.create_task(_reload_at(hangup, gateway.reload))
        collect_rarely()
        await stop.wait()
        is_clean = await gateway.drain(hurry)
        reloading.cancel()
    return ExitCode.CLEAN if is_clean else ExitCode.DRAIN_CUT


def _take_descriptors(config: GatewayConfig) -> None:
    """Let this process open all files that it may, and say so where these are too few."""
    descriptors.raise_limit()
    asked = config.limits.connections_max
    if (taken := descriptors.fitting(asked)) < asked:
        told = {"open_files_max": descriptors.limit(), "connections_max": asked, "taken": taken}
        log.warning("gateway.descriptors_few", **told, reason=descriptors.few(asked))


def collect_rarely() -> None:
    """Set Python's garbage collector as a gateway that has started needs it."""
    gc.collect()
    gc.freeze()  # a full collection would look through all modules, and stop every stream for 15 ms
    gc.set_threshold(YOUNG_MAX)


async def _reload_at(hangup: asyncio.Event, reload: Callable[[], Awaitable[object]]) -> None:
    """Reload at each signal."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await reload()
        except Exception:
            log.exception("gateway.reload_failed")


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first stop signal and the second one set. The end of the parent is a first one."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    on_stop_signals(lambda _: (hurry if stop.is_set() else stop).set())
    asyncio.get_running_loop().add_signal_handler(ORPHANED, stop.set)
    return stop, hurry


# -- several workers ------------------------------------------------------------------------------


async def supervise(config: GatewayConfig, path: Path, *, seen: FileVersion | None = None) -> ExitCode:
    """Run several workers until a stop signal; a second one hurries their drain. `seen` is as in `serve`.
    Raises ConfigError, ListenFailed and UnusableTls."""
    from gateway.workers.accepted import Accepted
    from gateway.workers.place import GaveUp
    from gateway.workers.supervisor import Supervisor  # a single gateway has no use for it

    stop, hurry = _stop_signals()
    watch_lag()
    descriptors.raise_limit()
    async with AsyncExitStack() as stack:
        accepted, hangup = Accepted(config, path, seen=seen), asyncio.Event()
        launch, port = _launcher(stack, config, accepted, path)
        drain_s = config.timeouts.drain_delay_s + config.timeouts.drain_s
        supervisor = Supervisor(config.workers, launch, drain_s)
        admin_tls = tls_of(config.admin.tls)
        again = partial(_reload_at, hangup, accepted.reload)
        await stack.enter_async_context(Background({"configuration": accepted.watch, "hangups": again}))
        admin_port = await _front(stack, supervisor, config, admin_tls, accepted)
        stack.push_async_callback(supervisor.kill)
        hang_up = partial(_hang_up, supervisor, admin_tls, hangup)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        try:
            await supervisor.start(stop)
            if supervisor.lifecycle.phase is Phase.READY:
                ports = {"port": port, "admin_port": admin_port}
                log.info("gateway.listening", host=config.listen.host, **ports, workers=config.workers)
            await supervisor.run(stop)
        except GaveUp as error:
            log.error("gateway.gave_up", reason=str(error), status=error.code.name)
            await supervisor.drain(hurry)
            return error.code
        return await supervisor.drain(hurry)


def _launcher(
    stack: AsyncExitStack, config: GatewayConfig, accepted: Accepted, path: Path
) -> tuple[Launch, int]:
    """The function that starts workers, and the port that they share. Raises ListenFailed."""
    from gateway.workers.supervisor import hold_port

    address = config.listen
    try:
        held = hold_port(address.host, address.port)
    except OSError as error:
        raise ListenFailed(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}"
        ) from error
    stack.callback(held.close)
    try:
        directory = SocketDirectory.make(SOCKETS_PREFIX)
    except OSError as error:
        raise ListenFailed(f"cannot make sockets for workers: {error}") from error
    stack.callback(directory.remove)
    port: int = held.getsockname()[1]
    starts, salts = itertools.count(), new_secret()

    async def launch(index: int, drained: Sequence[str]) -> Worker:
        socket, text = str(directory.path / f"{index}-{next(starts)}"), await accepted.text()
        return await ChildWorker.start(WorkerStart(text, index, port, socket, drained, salts), path)

    return launch, port


def _hang_up(supervisor: Supervisor, admin_tls: ListenerTls | None, hangup: asyncio.Event) -> None:
    """Have everything read again, as SIGHUP asks."""
    hangup.set()
    supervisor.hang_up()
    if admin_tls is not None:
        admin_tls.reload()


async def _front(
    stack: AsyncExitStack,
    supervisor: Supervisor,
    config: GatewayConfig,
    tls: ListenerTls | None,
    accepted: Accepted,
) -> int | None:
    """Open the admin listener. Returns its port; None where there is none. Raises ListenFailed."""
    from gateway.workers.front import Front

    if tls is not None:
        await stack.enter_async_context(Background({"admin listener's certificates": tls.watch}))
    shares_usage, names = config.quotas.store == "redis", config.admin.called
    front = Front(supervisor, accepted.reload, shares_usage=shares_usage, names=names)
    return await listen_for_operators(stack, front.handle, config, tls)

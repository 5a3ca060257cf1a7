"""Billing: one line for each settled request.

Rules:

1. No request waits for its line. It is put into a queue in memory, and a task hands the queue to the file in
   a thread, at once and in one write; it asks the disk to keep it (fsync) at most once a second. So a process
   that is killed loses the lines of its last moment; a machine that fails, those of its last second as well;
   and a stop that is asked for loses none. The usage in Redis has all of them: what it has beyond the lines
   is what was lost. Requests that were in progress in a killed process have their lines from another one
   (`gateway.billing.unsettled`).
2. Nothing here grows without a bound: the queue has `QUEUE_MAX` lines, the file of a webhook `spool_max`
   bytes. What does not fit is dropped and counted.
3. Where usage is counted in memory, a gateway that starts counts the lines in its file again, the last
   `RECOUNTED_LEN_MAX` bytes of them, or where `file_max` bounds it all of them and those that were rotated
   away (`gateway.billing.sums`): a restart forgets none of it, unless a webhook has emptied the file.
4. The id of a line is its request's reservation, which no other request of any gateway has: lines may come
   twice (`gateway.billing.spool`), and the id tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.admission.quota import ReservationId
from gateway.admission.usage import Payer, UsageRows, Used
from gateway.billing.spool import Spool
from gateway.billing.sums import Sums
from gateway.config.accounting import AccountingConfig
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Counter, Gauge
from shared.wire.ids import KeyId, RequestId, TenantId
from shared.wire.undecodable import UNDECODABLE

QUEUE_MAX: Final = 65_536
RECOUNTED_LEN_MAX: Final = 32 * 1024 * 1024
"""Bytes, of some 100,000 requests."""
SYNC_S: Final = 1.0
RETRY_S: Final = 1.0
"""The time from a write that failed to the next, in seconds."""

LINES: Final = Counter("penstock_gateway_billing_lines", "Billing lines.", ["outcome"])
QUEUED: Final = Gauge("penstock_gateway_billing_queued_lines", "Billing lines that are not in the file yet.")
WAITING: Final = Gauge("penstock_gateway_billing_waiting_bytes", "Bytes that the webhook has not taken yet.")

_EPOCH: Final = date(1970, 1, 1)

log = logs.get(__name__)


class BillingLine(Struct, frozen=True, omit_defaults=True):
    """The charge for a settled request."""

    id: ReservationId
    """Unique among all lines."""
    ts: datetime
    """When it was settled, on this gateway's clock."""
    day: date
    """The day (UTC) on which its tokens were reserved, on the same clock."""
    request_id: RequestId | None
    """The `x-request-id` of its answer, which the caller may have chosen. None where its gateway did not live
    to settle it."""
    tenant: TenantId
    key_id: KeyId
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated_tokens: int
    """Tokens that are charged without an engine's report."""
    accepted_prediction_tokens: int = 0
    """The part of the completion's tokens that was taken from what the caller predicted."""
    rejected_prediction_tokens: int = 0
    """The part that was tried from there, and is in no answer."""


def _count(rows: UsageRows, data: bytes) -> None:
    """Count what a line says."""
    try:
        line = msgspec.json.decode(data, type=BillingLine)
    except UNDECODABLE:  # somebody else's
        return
    used = Used(line.prompt_tokens, line.cached_tokens, line.completion_tokens, line.estimated_tokens)
    rows.count(Payer(line.tenant, line.key_id, line.model), (line.day - _EPOCH).days, used)


class Billing:
    """The lines of this process: `note` for each settled request, `write` as a background task."""

    def __init__(self, config: AccountingConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises ConfigError when the file cannot be written."""
        self._sums: Sums | None = None
        self.spool: Spool | None = None
        if config.file is not None:
            path = Path(config.file)
            if config.file_max is not None:
                self._sums = Sums(path, config.days, _count)
            len_max = None if config.webhook is None else config.spool_max
            self.spool = Spool(path, len_max, file_max=config.file_max, sums=self._sums)
        self._is_emptied: Final = config.webhook is not None
        self.is_recounted = False
        """True if the file has all that is counted in memory, for the next start."""
        self._clock: Final = clock
        self._queue: list[bytes] = []
        self._noted = asyncio.Event()
        self._noted_lines = 0
        """Lines that were ever queued."""
        self._progress = asyncio.Event()
        self._sync_due_s = float("inf")
        QUEUED.set_function(lambda: len(self._queue))
        if (spool := self.spool) is not None and config.webhook is not None:
            WAITING.set_function(lambda: spool.waiting)

    def recount(self, rows: UsageRows) -> None:
        """Count what the file's lines say. Blocking calls, for the start."""
        if self.spool is None or self._is_emptied:
            return
        self.is_recounted = True
        if self._sums is None:
            lines = self.spool.last_lines(RECOUNTED_LEN_MAX)
        else:
            lines = self.spool.all_lines()
            try:
                self._sums.count_into(rows)
            except OSError as error:
                self.is_recounted = False
                log.error("billing.not_recounted", problem=str(error))
        for data in lines:
            _count(rows, data)

    async def written(self) -> None:
        """Wait until the lines that are queued now are in the file, or dropped."""
        last = self._noted_lines
        while self._noted_lines - len(self._queue) < last:
            self._progress.clear()
            await self._progress.wait()

    def note(
        self, id_: ReservationId, request_id: RequestId | None, payer: Payer, used: Used, reserved_s: float
    ) -> None:
        """Queue the line of a request whose tokens were reserved at `reserved_s`, seconds of the wall
        clock."""
        if self.spool is None:
            return
        if len(self._queue) >= QUEUE_MAX:
            LINES.inc("dropped")
            return
        line = BillingLine(
            id_,
            datetime.fromtimestamp(self._clock.wall(), UTC),
            datetime.fromtimestamp(reserved_s, UTC).date(),
            request_id,
            payer.tenant,
            payer.key,
            payer.model,
            used.prompt,
            used.cached,
            used.completion,
            used.estimated,
            used.predicted,
            used.mispredicted,
        )
        self._queue.append(msgspec.json.encode(line) + b"\n")
        self._noted_lines += 1
        self._noted.set()

    async def write(self) -> None:
        """Write the lines as they come, until cancelled."""
        spool = self.spool
        while spool is not None:
            wait_s = self._sync_due_s - self._clock.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == float("inf") else max(0.0, wait_s)):
                    await self._noted.wait()
            self._noted.clear()
            try:
                await self._write(spool)
            except OSError as error:
                log.error("billing.not_written", problem=str(error), queued=len(self._queue))
                await self._clock.sleep(RETRY_S)
                self._noted.set()

    async def aclose(self) -> None:
        """Write what is queued, and close the file. `write` has been cancelled."""
        if self.spool is None:
            return
        try:
            await self._write(self.spool)
        except OSError as error:
            log.error("billing.not_written", problem=str(error), queued=len(self._queue))
            LINES.inc("dropped", by=len(self._queue))
        await asyncio.to_thread(self.spool.close)

    async def _write(self, spool: Spool) -> None:
        """Write the queue, and sync where that is due. The lines stay queued until they are written, so that
        a cancellation loses none of them."""
        if lines := self._queue[:]:
            writing = asyncio.ensure_future(asyncio.to_thread(spool.append, lines))
            try:
                written = await asyncio.shield(writing)
            except asyncio.CancelledError:
                written = await writing
                self._written(lines, written)
                raise
            self._written(lines, written)
        if self._clock.monotonic() >= self._sync_due_s:
            await asyncio.to_thread(spool.sync)
            self._sync_due_s = float("inf")

    def _written(self, lines: list[bytes], written: int) -> None:
        del self._queue[: len(lines)]
        self._progress.set()
        LINES.inc("written", by=written)
        LINES.inc("dropped", by=len(lines) - written)
        self._sync_due_s = min(self._sync_due_s, self._clock.monotonic() + SYNC_S)

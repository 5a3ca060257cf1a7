"""An engine's report of its load, by which gateways choose among replicas.

It stands in the header `LOAD_HEADER` of every answer, in the closing comment of a stream (shared.wire.sse),
and in frames that the engine pushes on the connections of gateways (shared.http2.stream). Its form on the
wire is JSON, at most `REPORT_LEN_MAX` bytes.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.wire.undecodable import UNDECODABLE

LOAD_HEADER: Final = "x-penstock-load"
INTERVAL_MS: Final = 100
"""The longest time between two reports on a connection of an engine that has something to do."""
IDLE_INTERVAL_MS: Final = 1000
"""The longest time between two reports of an engine that has nothing to do. Each report costs both ends a
wake-up."""
PUSH_CHANGED_S: Final = INTERVAL_MS / 2 / 1000
"""The time between two reports while the load changes: with 16 workers, reports that come half as often cost
the slowest hundredth of first tokens a tenth more time (`python -m tests.bench routing`)."""
REPORT_LEN_MAX: Final = 512
"""Bytes; longer ones are no report."""
FLEX, DEFAULT, PRIORITY = range(3)
"""The service classes, in the order of `LoadReport.waiting`; the higher the sooner."""

Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
Interval = Annotated[int, Meta(ge=1, le=60_000)]


class LoadReport(msgspec.Struct, frozen=True, omit_defaults=True):
    waiting: tuple[Amount, Amount, Amount] = (0, 0, 0)
    """Prompt tokens that are to be computed and are not, by class, those of requests that have begun
    included, and those that the cache has left out."""
    sequences: Amount = 0
    """The sequences that have not ended, waiting ones included."""
    draining: bool = False
    """True if the engine finishes what it has, and takes no more."""
    computed: Amount = 0
    """Prompt tokens that it has computed since it started: while they rise, it works on what waits."""
    started_s: Amount = 0
    """When it started, in seconds since 1970: another number is another process, whose cache was empty. 0
    from one that does not say."""
    interval_ms: Interval = INTERVAL_MS
    """The longest time until the next report, by which a gateway knows how long to believe this one. Engines
    that do not say it report at intervals of `INTERVAL_MS`; gateways that do not read it take it for that."""

    @property
    def is_idle(self) -> bool:
        """True if the engine has nothing to do."""
        return not self.sequences and not any(self.waiting)


_decode: Final = msgspec.json.Decoder(LoadReport).decode
encode_load: Final = msgspec.json.Encoder().encode


def parse_load(text: str | bytes | None) -> LoadReport | None:
    """The report in a text. None where it is none."""
    if text is None or len(text) > REPORT_LEN_MAX:
        return None
    try:
        return _decode(text)
    except UNDECODABLE:
        return None

"""The exit statuses of the services, which say to whoever started one how it ended.

| status | it ended because                                                           |
|--------|----------------------------------------------------------------------------|
| 0      | it was stopped, and every open request came to its end; or it was loading   |
| 1      | it could not listen, or could not be started for another reason            |
| 2      | its configuration or command line is unusable, or Python has no assertions |
| 3      | it was stopped, and requests that outlasted the drain ended with an error  |
| 4      | its workers died again and again                                           |
| 5      | the engine's core died                                                     |
| 130    | it was interrupted while it was still being loaded (`shared.process.interrupts`)   |
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """A status, by its name."""

    CLEAN = 0
    FAILED = 1
    UNUSABLE_CONFIG = 2
    DRAIN_CUT = 3
    CRASH_LOOP = 4
    CORE_DIED = 5

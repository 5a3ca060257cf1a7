"""The console script `penstock`: it can be stopped before the modules of its commands are imported."""

from __future__ import annotations

import sys
from typing import Final

from shared.process import interrupts

RUN_UNTIL_STOPPED: Final = ("engine", "gateway", "up")
"""The commands that a SIGTERM ends as it should. It interrupts the others in their work, and the kernel's own
action tells so."""


def main() -> int:
    """Run one command. Returns the process's exit code."""
    if sys.argv[1:2] and sys.argv[1] in RUN_UNTIL_STOPPED:
        interrupts.end_when_stopped()
    from shared import cli

    return cli.main()

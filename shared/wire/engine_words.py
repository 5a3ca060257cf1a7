"""The sentences by which an engine of ours says what became of it: fixed texts, so that logs may repeat them.

An engine of another make may say anything, also what was asked. What it says is not repeated.
"""

from __future__ import annotations

from typing import Final

STARTING: Final = "The engine is still starting."
STOPPING: Final = "The engine is shutting down."
STOPPED: Final = "The engine is shutting down and could not wait for this answer."
FAILED: Final = "The engine has failed and takes no requests."
FAILED_IN: Final = "The engine failed while it worked on this request."
HANGS: Final = "The engine does not get on."
HUNG_BEFORE: Final = "The engine hung before it began this request."
HUNG_IN: Final = "The engine hung while it worked on this request."
OTHERS_DO: Final = "others do meanwhile"
"""A gateway's note on an engine that it has given up: it answers nothing."""

MEANINGS: Final = {
    STARTING: "was starting",
    STOPPING: "was shutting down",
    STOPPED: "shut down, and could not wait for this answer",
    FAILED: "had failed",
    FAILED_IN: "failed while it worked on this",
    HANGS: "hung: its core does not answer",
    HUNG_BEFORE: "hung before it began this: its core does not answer",
    HUNG_IN: "hung while it worked on this: its core does not answer",
    OTHERS_DO: "answered nothing, while others did",
}
"""The words that each state has for the engine, behind its name."""

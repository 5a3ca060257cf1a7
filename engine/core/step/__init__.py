"""One step: its plan, the slots and pages that it takes, its results and its record."""

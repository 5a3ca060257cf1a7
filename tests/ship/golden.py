"""The rendered presets as they are kept beside the tests: a change of the chart shows in them.

`python -m tests.ship.golden` writes them again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from helm.make.values_schema import ROOT
from tests.ship.rendering import NEWEST, PRESETS, template

_MADE: Final = re.compile(
    r"sk_(?:live|admin)_\w+|(?<=id = \\\")[a-z0-9]{12}|(?<=sha256:)[0-9a-f]{64}(?=\\\")"
)
"""What of a key that the chart makes differs each time."""
GOLDEN: Final = ROOT / "tests/ship/golden"


def file_of(preset: str) -> Path:
    """The file of a preset."""
    return GOLDEN / f"{preset}.yaml"


def rendered(preset: str) -> str:
    """The preset as helm renders it today, but for the dashboards, and the keys that the chart makes."""
    done = template(preset, NEWEST, "--set", "monitoring.dashboards.enabled=false")
    assert done.returncode == 0, done.stderr
    text = _MADE.sub("MADE", done.stdout)
    kept = [document for document in text.split("---\n") if not _is_described_elsewhere(document)]
    return "".join(f"{line.rstrip()}\n" for line in "---\n".join(kept).splitlines())


def _is_described_elsewhere(document: str) -> bool:
    """True for dashboards and rules, which `helm.make.boards` describes."""
    return "kind: PrometheusRule" in document or "app.kubernetes.io/component: dashboards" in document


def main() -> None:
    """Write all."""
    GOLDEN.mkdir(exist_ok=True)
    for preset in PRESETS:
        file_of(preset).write_text(rendered(preset))


if __name__ == "__main__":
    main()

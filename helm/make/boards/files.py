"""The files that are made of the descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml

from helm.make.boards.alerts import rules, runbook
from helm.make.boards.dashboards import DASHBOARDS
from helm.make.boards.panels import grafana

HELM: Final = Path(__file__).parent.parent.parent.parent / "helm"
RULES: Final = HELM / "alerts/penstock.yaml"
HEAD: Final = "# Made by `python -m helm.make.boards`. Do not edit.\n"


def contents() -> dict[Path, str]:
    """Each file's text."""
    made = {HELM / f"dashboards/{name}.json": grafana(one) for name, one in DASHBOARDS.items()}
    made[RULES] = HEAD + yaml.safe_dump(rules(), sort_keys=False, width=100)
    made[HELM / "RUNBOOK.md"] = runbook()
    return made

"""The parts of the dashboards' expressions."""

from __future__ import annotations

from typing import Final

RATE: Final = "[$__rate_interval]"
OF: Final = 'model=~"$model", tenant=~"$tenant"'
MODEL: Final = 'model=~"$model"'
INSTANCE: Final = 'instance=~"$instance"'
GATEWAY: Final = "penstock_gateway_"
ENGINE: Final = "penstock_engine_"


def rate(name: str, matchers: str = "", by: str = "") -> str:
    """The rate of a counter, added up by a label."""
    group = f"sum by ({by})" if by else "sum"
    return f"{group} (rate({name}{{{matchers}}}{RATE}))"


def share(part: str, whole: str) -> str:
    """A share, and nothing where there is nothing to share."""
    return f"{part} / ({whole} > 0)"

"""The place that series are of: a cluster, a namespace and a release, so that two releases are not summed.

Rules:

1. Prometheus' operator adds `namespace` to what it scrapes, and the chart's monitors the release. Federation
   or external labels add `cluster`. Where a label is missing, as beside compose.yaml, its matcher fits.
2. Alerts have each series by these labels, and one matcher that the chart replaces by the release's own.
"""

from __future__ import annotations

import re
from typing import Final

RELEASE: Final = "app_kubernetes_io_instance"
PLACE: Final = ("cluster", "namespace", RELEASE)
ANY_PLACE: Final = 'namespace=~".*"'
"""The matcher of all alerts, in whose place the chart has its release's."""
_SELECTOR: Final = re.compile(r"\b(penstock_\w+)(?:\{([^{}]*)\})?")
_BY: Final = re.compile(r"\bby \(")
_ALONE: Final = re.compile(r"\b(sum|count|min|max) \(")


def matched(expr: str, matchers: str) -> str:
    """The expression with further matchers for each of its series."""
    return _SELECTOR.sub(lambda one: f"{one[1]}{{{', '.join(filter(None, (matchers, one[2])))}}}", expr)


def by_place(expr: str) -> str:
    """The expression with all of its sums by place, too."""
    names = ", ".join(PLACE)
    return matched(_ALONE.sub(rf"\1 by ({names}) (", _BY.sub(f"by ({names}, ", expr)), ANY_PLACE)

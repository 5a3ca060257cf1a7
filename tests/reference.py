"""The reference pages, made from the code: `python -m tests.reference` writes them all.

gateway/docs/settings.md   engine/docs/settings.md   every setting
gateway/docs/api.md                                  public operations, and codes of errors
shared/METRICS.md                                    every metric
helm/README.md             helm/values.schema.json   every value of the chart
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gateway.openapi import public
from helm.make import values_schema
from shared.cli.service import CONFIGS
from shared.cli.settings import text_of
from shared.wire.errors import ApiError
from tests import metrics_page

ROOT: Final = Path(__file__).parent.parent
MADE: Final = "Made by `python -m tests.reference`; do not edit.\n"
HEADS: Final = {
    "gateway": "# Settings of the gateway\n\nOf its TOML file; with the prefix `PENSTOCK_GATEWAY_`, and two "
    "underscores for a dot, also of the environment, which wins. `penstock init` writes a file, and "
    "`penstock gateway --check FILE.toml` says all that is wrong with one. ",
    "engine": "# Settings of the engine\n\nAn option (`--max-model-len 4096`), a variable or a key of the "
    "TOML file that `--config` names; the first of the three that is given wins. ",
}


def settings(service: str) -> str:
    """The page of a service's settings."""
    return f"{HEADS[service]}{MADE}\n{text_of(service, 'table')}"


def api() -> str:
    """The page of the public operations and of the codes of errors."""
    paths: dict[str, Any] = json.loads(public.document())["paths"]
    lines = [
        f"# The API, in tables\n\n{MADE}",
        "What fields mean: [the API](../../shared/API.md). The whole, with",
    ]
    lines.append(
        "schemas, is the gateway's `GET /openapi.json`.\n\n## Operations\n\n| operation | |\n|---|---|"
    )
    lines += [
        f"| `{method.upper()} {path}` | {told['summary']} |"
        for path, methods in paths.items()
        for method, told in methods.items()
        if "summary" in told
    ]
    lines.append("\n## Errors\n\n| code | status | type | `x-should-retry` |\n|---|---|---|---|")
    lines += sorted(
        {
            f"| `{kind.code}` | {int(kind.status)} | `{kind.type}` | {str(kind.retryable).lower()} |"
            for kind in _kinds(ApiError)
        }
    )
    return "\n".join(lines) + "\n"


def _kinds(kind: type[ApiError]) -> Iterator[type[ApiError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def contents() -> dict[Path, str]:
    """Each page's text."""
    made = {ROOT / service / "docs/settings.md": settings(service) for service in CONFIGS}
    made[ROOT / "gateway/docs/api.md"] = api()
    made[metrics_page.PAGE] = metrics_page.text()
    made[values_schema.README] = values_schema.readme_text()
    made[values_schema.SCHEMA] = values_schema.schema_text()
    return made


def main() -> None:
    """Write all."""
    for path, text in contents().items():
        path.write_text(text)


if __name__ == "__main__":
    main()

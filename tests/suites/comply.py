"""llm-comply's tests of chat completions, of responses and of Messages on `penstock up`: answers against
OpenAI's own schemas, those of Open Responses, and Anthropic's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.bench.figures import Figure, figure
from tests.suites.cache import SuiteFailed, environment
from tests.suites.judging import Kind, Outcome, figures_of
from tests.suites.serving import KEY, MODEL, Served, up

SUMMARY: Final = "llm-comply's tests of chat completions, responses and Messages"
PACKAGES: Final = ("llm-comply==0.5.0",)
FORMATS: Final = ("openai-chat", "open-responses", "anthropic")
NOT_SERVED: Final = dict.fromkeys(
    ("chat-image-input", "image-input", "anth-image-input"), "images are not served"
)
"""Tests of what is refused by name: llm-comply tells the status and not the message."""


def run(cache: Path) -> list[Figure]:
    python = environment(cache, "comply", *PACKAGES)
    with up() as served:
        results = [one for format_ in FORMATS for one in _results(python, served, format_)]
    warnings = [
        figure(f"warning: {warning} ({result['id']})", 1, "tests")
        for result in results
        for warning in result.get("warnings", [])
    ]
    return [*figures_of(map(_outcome, results)), *warnings]


def _results(python: Path, served: Served, format_: str) -> Iterator[dict[str, Any]]:
    """What comes of all tests of one API."""
    options = [
        "--timeout",
        "300",
        "--format",
        format_,
        "--base-url",
        served.url,
        "--api-key",
        KEY,
        "--model",
        MODEL,
    ]
    done = subprocess.run(
        [str(python.with_name("llm-comply")), *options, "--json"],
        capture_output=True,
        text=True,
        env=served.environment,
    )
    try:
        yield from json.loads(done.stdout)["results"]
    except ValueError as error:
        raise SuiteFailed(f"llm-comply printed no results: {done.stdout}{done.stderr}") from error


def _outcome(result: dict[str, Any]) -> Outcome:
    test, status, errors = result["id"], result["status"], "; ".join(result.get("errors", []))
    if status == "failed" and test in NOT_SERVED and "HTTP 400" in errors:
        return Outcome(test, Kind.REFUSED, NOT_SERVED[test])
    kind = {"passed": Kind.RIGHT, "skipped": Kind.SKIPPED}.get(status, Kind.WRONG)
    return Outcome(test, kind, errors)

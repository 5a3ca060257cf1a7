"""The tests of OpenAI's own SDK for Python, of chat, completions and models, against `penstock up`.

All tests that create, list or retrieve are run, none left out: 20 of them send every parameter there is, with
values that the specification gives as examples and the API itself refuses (`max_tokens: 0`, or `suffix`
beside `echo`). The same requests are sent again without what was refused, until there is an answer, and every
parameter that was refused is told.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from tests.bench.figures import Figure, at_most, figure
from tests.suites.cache import environment, sdist
from tests.suites.judging import figures_of, pytest_outcomes
from tests.suites.serving import KEY, Served, up

SUMMARY: Final = "the tests of OpenAI's SDK, of chat, completions and models"
OPENAI: Final = ("openai", "3.57.0", "5a0a89d6a542efc85e2a8cec701ca9265b795d578c777828e10fafdf80e333b6")
PACKAGES: Final = ("openai[aiohttp]==3.57.0", "pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0")
FOLDER: Final = "tests/api_resources"
PATHS: Final = {"chat/test_completions.py": "/chat/completions", "test_completions.py": "/completions"}
SELECTED: Final = "create or (Models and not delete)"
"""Stored completions, and deleting a model, are other parts of the API."""


def run(cache: Path) -> list[Figure]:
    sources, python = sdist(cache, *OPENAI), environment(cache, "openai", *PACKAGES)
    files = [f"{FOLDER}/{name}" for name in (*PATHS, "test_models.py")]
    with up() as served:
        outcomes = pytest_outcomes(
            python,
            ["--override-ini=addopts=", "-k", SELECTED, *files],
            folder=sources,
            environment={**served.environment, "TEST_API_BASE_URL": served.url},
            up_to_the_model={},
        )
        peeled = [
            figures
            for name, path in PATHS.items()
            for figures in _peeled(served, path, list(_all_parameters(sources / FOLDER / name)))
        ]
    return [*figures_of(outcomes), *peeled]


def _all_parameters(file: Path) -> Iterator[dict[str, Any]]:
    """The bodies that a file's tests with all parameters send."""
    [sync, *_] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    for test in sync.body:
        if isinstance(test, ast.FunctionDef) and "with_all_params_overload" in test.name:
            calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
            [sent] = [call for call in calls if any(keyword.arg == "model" for keyword in call.keywords)]
            yield {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in sent.keywords}


def _peeled(served: Served, path: str, bodies: list[dict[str, Any]]) -> Iterator[Figure]:
    """The parameters that are refused, one after another, until the rest of each request is served."""
    refused: Counter[str] = Counter()
    failed = 0
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        for body in bodies:
            while (answer := client.post(served.url + path, json=body, timeout=60)).status_code == 400:
                error = answer.json()["error"]
                name = re.split(r"[.\[]", error["param"] or "")[0]
                if name not in body:
                    break
                refused[error["message"]] += 1
                del body[name]
            failed += answer.status_code != 200
    title = f"{path} with all parameters"
    yield figure(f"{title}: parameters served", sum(map(len, bodies)), "parameters")
    for message, count in refused.items():
        yield figure(f"{title}: refused by name: {message}", count, "parameters")
    yield figure(f"{title}: failed", failed, "requests", at_most(0))

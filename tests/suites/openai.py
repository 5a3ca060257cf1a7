"""The tests of OpenAI's own SDK for Python, of chat, completions, responses, embeddings, decisions and
models, on `penstock up`, whose model makes vectors, too.

All tests that create, count, list or retrieve are run, and those that delete or cancel responses, which the
gateway keeps; none left out but those of stored completions. Some send every parameter there is, with values
that the specification gives as examples and the API itself refuses (`max_tokens: 0`, or `suffix` beside
`echo`). The same requests are sent again without what was refused, until there is an answer, and every
parameter that was refused is told. Tests of responses name no model, which a mock alone answers, and ask for
responses that nobody has made: `scripts/seeded.py` gives them a model, and makes a response for each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.bench.figures import Figure
from tests.suites.cache import environment, sdist
from tests.suites.judging import SCRIPTS, figures_of, pytest_outcomes
from tests.suites.peeling import all_parameters, peeled
from tests.suites.serving import up

SUMMARY: Final = "the tests of OpenAI's SDK, of chat, completions, embeddings, responses and decisions"
OPENAI: Final = ("openai", "3.57.0", "5a0a89d6a542efc85e2a8cec701ca9265b795d578c777828e10fafdf80e333b6")
PACKAGES: Final = ("openai[aiohttp]==3.57.0", "pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0")
FOLDER: Final = "tests/api_resources"
PATHS: Final = {
    "chat/test_completions.py": "/chat/completions",
    "test_completions.py": "/completions",
    "test_responses.py": "/responses",
    "responses/test_input_tokens.py": "/responses/input_tokens",
    "test_embeddings.py": "/embeddings",
}
OTHERS: Final = ("test_models.py", "test_decisions.py", "responses/test_input_items.py")
SELECTED: Final = (
    "create or count or (Models and not delete) or (InputItems and list)"
    " or (Responses and (retrieve or delete or cancel))"
)
"""Stored completions, compacting a response, and deleting a model are other parts of the API."""
KEEPS: Final = {
    "PENSTOCK_GATEWAY_RESPONSES__STORE": "memory",
    "PENSTOCK_ENGINE_EMBEDDINGS": "mean",
    "PENSTOCK_ENGINE_EMBEDDING_DIMENSIONS": "any",
}


def run(cache: Path) -> list[Figure]:
    sources, python = sdist(cache, *OPENAI), environment(cache, "openai", *PACKAGES)
    files = [f"{FOLDER}/{name}" for name in (*PATHS, *OTHERS)]
    with up(**KEEPS) as served:
        outcomes = pytest_outcomes(
            python,
            ["--override-ini=addopts=", "-p", "seeded", "-k", SELECTED, *files],
            folder=sources,
            environment={
                **served.environment,
                "TEST_API_BASE_URL": served.url,
                "PYTHONPATH": os.pathsep.join(map(str, (sources, SCRIPTS))),
            },
            up_to_the_model={},
        )
        of_parameters = [
            each
            for name, path in PATHS.items()
            for each in peeled(served, path, list(all_parameters(sources / FOLDER / name)))
        ]
    return [*figures_of(outcomes), *of_parameters]

"""The tests of Anthropic's own SDK for Python, of Messages, counts of tokens and models, and the same of its
betas, against `penstock up`.

None is left out. Some send every parameter there is, with examples' values (a container, servers of tools).
The same requests are sent again without what was refused, until there is an answer, and every parameter that
was refused is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.bench.figures import Figure
from tests.suites.cache import environment, sdist
from tests.suites.judging import figures_of, pytest_outcomes
from tests.suites.peeling import all_parameters, peeled
from tests.suites.serving import up

SUMMARY: Final = "the tests of Anthropic's SDK, of Messages, counts of tokens and models"
ANTHROPIC: Final = ("anthropic", "2.14.0", "afb02f4df8efba429ff769bbfd71340d8b244b41ba42c073a45cc307702549fe")
PACKAGES: Final = (
    "anthropic[aiohttp]==2.14.0",
    "httpx2==2.9.1",
    "pytest==9.0.3",
    "pytest-asyncio==1.3.0",
    "http-snapshot[httpx]==0.1.9",
    "inline-snapshot==0.32.5",
)
KEY: Final = "my-anthropic-api-key"
"""The key that its tests send."""
FOLDER: Final = "tests/api_resources"
FILES: Final = ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py")
BESIDE: Final = ("betas", "user_profile_id", "workspace_id")
"""The parameters that are headers."""


def run(cache: Path) -> list[Figure]:
    sources, python = sdist(cache, *ANTHROPIC), environment(cache, "anthropic", *PACKAGES)
    files = [f"{FOLDER}/{name}" for name in FILES]
    with up(KEY) as served:
        outcomes = pytest_outcomes(
            python,
            ["--override-ini=addopts=", "-p", "tests._alias_httpx", *files],
            folder=sources,
            environment={**served.environment, "TEST_API_BASE_URL": served.root, "PYTHONPATH": str(sources)},
            up_to_the_model={},
        )
        bodies = [
            body
            for name in FILES
            if "messages" in name
            for body in all_parameters(sources / FOLDER / name, BESIDE)
        ]
        asked = [body for body in bodies if "max_tokens" in body]
        counted = [body for body in bodies if "max_tokens" not in body]
        of_parameters = [
            *peeled(served, "/messages", asked),
            *peeled(served, "/messages/count_tokens", counted),
        ]
    return [*figures_of(outcomes), *of_parameters]

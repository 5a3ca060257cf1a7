"""LangChain's integration tests of chat models and of embeddings, langchain-tests, with its ChatOpenAI and
OpenAIEmbeddings on `penstock up`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.bench.figures import Figure
from tests.suites.cache import environment
from tests.suites.judging import SCRIPTS, figures_of, pytest_outcomes
from tests.suites.serving import up

SUMMARY: Final = "LangChain's integration tests of chat models and of embeddings"
PACKAGES: Final = ("langchain-tests==1.1.9", "langchain-openai==1.7.4", "openai==3.57.0", "pytest==9.2.0")
TESTS: Final = ("langchain_chat_model.py", "langchain_embeddings.py")
OPTIONS: Final = (
    "--config-file=/dev/null",
    "--override-ini=asyncio_mode=auto",
    "--override-ini=asyncio_default_test_loop_scope=session",  # its client is shared by all tests, too
    "--override-ini=asyncio_default_fixture_loop_scope=session",
)
UP_TO_THE_MODEL: Final = {
    r"test_tool_calling(_async)?(\[.*\])?\n.*== \{'input': 3\}": "the model calls with another number",
    r"test_unicode_tool_call_integration\n.*Unicode characters not found": "the model names another customer",
    r"test_agent_loop(\[.*\])?\n(.*\n)*.*Field required": "the model's arguments are not the tool's",
    r"test_agent_loop(\[.*\])?\n.*any\(": "the model calls nothing",
    r"test_json_mode\n(.*\n)*.*Field required": "the model's object has other keys, which no schema asks for",
    r"test_structured_output\w*(\[.*\])?\n.*'setup'.*\n(.*\n)*.*Extra items in the left set": (
        "the model's object has a key more, which its schema, not strict, leaves open"
    ),
}


def run(cache: Path) -> list[Figure]:
    python = environment(cache, "langchain", *PACKAGES)
    with up(PENSTOCK_ENGINE_EMBEDDINGS="mean") as served:
        outcomes = pytest_outcomes(
            python,
            [*OPTIONS, f"--rootdir={SCRIPTS}", f"--confcutdir={SCRIPTS}", *TESTS],
            folder=SCRIPTS,
            environment=served.environment,
            up_to_the_model=UP_TO_THE_MODEL,
        )
    return figures_of(outcomes)

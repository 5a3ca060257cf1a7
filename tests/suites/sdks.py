"""What a new user runs first on `penstock up`: the examples of OpenAI's SDK, LangChain and pydantic-ai.

Four are the SDK's own files, run as they lie in its sources; the others, in `scripts/`, follow the first
pages of the guides. A script that ends with a sentence says that the model, not the server, did otherwise.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from tests.bench.figures import Figure
from tests.suites.cache import environment, sdist
from tests.suites.judging import SCRIPTS, Kind, Outcome, figures_of, judged
from tests.suites.openai import OPENAI
from tests.suites.serving import Served, up

SUMMARY: Final = "the first examples of OpenAI's SDK, LangChain and pydantic-ai"
PACKAGES: Final = (
    "openai==3.57.0",
    "rich==15.0.0",
    "langchain==1.5.2",
    "langchain-openai==1.7.4",
    "pydantic-ai-slim[openai]==2.68.0",
)
EXAMPLES: Final = ("parsing.py", "parsing_stream.py", "parsing_tools.py", "parsing_tools_stream.py")
OURS: Final = (
    "openai_tools.py",
    "openai_parse.py",
    "openai_stream_tools.py",
    "openai_stream_parse.py",
    "langchain_agent.py",
    "langchain_bind_tools.py",
    "pydantic_ai_tool.py",
    "pydantic_ai_output.py",
)
UP_TO_THE_MODEL: Final = {
    r"parsing_tools\.py\n(.*\n)*IndexError": "the model calls nothing",
    r"as the length limit was reached": "the model finds no end within its context",
}
ENDED_S: Final = 300.0
"""The time in which a script must end, in seconds."""


def run(cache: Path) -> list[Figure]:
    python = environment(cache, "sdks", *PACKAGES)
    examples = sdist(cache, *OPENAI) / "examples"
    scripts = [*(examples / name for name in EXAMPLES), *(SCRIPTS / name for name in OURS)]
    with up() as served:
        return figures_of([_outcome(python, script, served) for script in scripts])


def _outcome(python: Path, script: Path, served: Served) -> Outcome:
    name = f"{script.parent.name}/{script.name}"
    done = subprocess.run(
        [str(python), str(script)], env=served.environment, capture_output=True, text=True, timeout=ENDED_S
    )
    if done.returncode == 0:
        return Outcome(name, Kind.RIGHT)
    if "Traceback" not in done.stderr:
        return Outcome(name, Kind.MODEL, done.stderr.strip())
    raised = re.findall(r"^[\w.]+: .*(?:\n(?!During task).*)*", done.stderr, re.MULTILINE)
    return judged(name, raised[-1] if raised else done.stderr, UP_TO_THE_MODEL)

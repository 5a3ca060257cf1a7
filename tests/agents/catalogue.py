"""The agents: which versions, how they are installed, told where the model is, and given an order.

npm packages are all that is fetched, each into a folder of its own in the cache, `$PENSTOCK_AGENTS`, else
`~/.cache/penstock-agents`. An agent finds a home of its own and nothing of this machine's environment. It is
told a base URL, a key and a model by the lines of `gateway/docs/agents.md`, or as its documentation says
where the page has none, and to ask nobody's leave for what it does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tests.services import KEY, MODEL
from tests.suites.cache import SuiteFailed

PAGE: Final = Path(__file__).parents[2] / "gateway/docs/agents.md"
ORIGIN_TOLD: Final = "http://127.0.0.1:8000"
MODEL_TOLD: Final = "demo"
INSTALL_S: Final = 300.0
"""The time in which one agent must be installed, in seconds."""


class Place(NamedTuple):
    """Where an agent runs: its own home, the folder it works in, and where the model is."""

    home: Path
    folder: Path
    origin: str
    """The gateway's URL without a path."""

    @property
    def url(self) -> str:
        return f"{self.origin}/v1"


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent."""

    name: str
    package: str
    version: str
    binary: str
    """Its place in node_modules."""
    api: str
    """The path that it asks for answers."""
    order: Callable[[Place, str], list[str]]
    """The options that give it the first order of a session, a text."""
    again: Callable[[Place, str], list[str]]
    """The options that give it another order: in the same session, where it can take one up without a
    terminal."""
    settle: Callable[[Place], None] = lambda _: None
    """Writes its settings."""
    first: Callable[[Place], list[str] | None] = lambda _: None
    """The options of a command that is run once before. None if there is no such command."""
    environment: Callable[[Place], Mapping[str, str]] = lambda _: {}

    def command(self, cache: Path, options: list[str]) -> list[str]:
        return [str(self.folder(cache) / "node_modules" / self.binary), *options]

    def folder(self, cache: Path) -> Path:
        return cache / f"{self.name}-{self.version}"

    def install(self, cache: Path) -> None:
        """Install it, unless it is there. Raises SuiteFailed."""
        folder, whole = self.folder(cache), self.folder(cache) / "whole"
        if whole.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        package = f"{self.package}@{self.version}"
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        try:
            subprocess.run(
                ["npm", "install", *quiet, "--prefix", str(folder), package], check=True, timeout=INSTALL_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SuiteFailed(f"{package} cannot be installed: {error}") from error
        whole.touch()


def cache_folder() -> Path:
    folder = Path(os.environ.get("PENSTOCK_AGENTS") or Path.home() / ".cache/penstock-agents")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def told(name: str, place: Place) -> str:
    """A file that the page about agents shows, of this model at this place."""
    _, _, rest = PAGE.read_text().partition(f"<!-- file: {name} -->\n```")
    text = rest.partition("\n")[2].partition("```")[0]
    return text.replace(ORIGIN_TOLD, place.origin).replace(f'"{MODEL_TOLD}"', f'"{MODEL}"')


def variables_told(prefix: str, place: Place) -> dict[str, str]:
    """The variables that the page says to export."""
    named = re.findall(rf"\b({prefix}\w+)=(\S+)", PAGE.read_text())
    values = {"$KEY": KEY, MODEL_TOLD: MODEL, ORIGIN_TOLD: place.origin}
    return {name: values[value] for name, value in named}


def _settle_codex(place: Place) -> None:
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(told("codex.toml", place))


_CODEX: Final = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]


def _settle_opencode(place: Place) -> None:
    settings = told("opencode.json", place).replace(f"/{MODEL_TOLD}", f"/{MODEL}")
    (place.folder / "opencode.json").write_text(settings)


def _claude(_: Place, order: str) -> list[str]:
    return ["-p", order, "--allowedTools", "Bash,Read,Edit"]


def _qwen(_: Place, order: str) -> list[str]:
    return ["--auth-type", "openai", "-y", "-p", order]


AGENTS: Final = (
    Agent(
        "opencode",
        "opencode-ai",
        "1.18.33",
        ".bin/opencode",
        "/v1/chat/completions",
        settle=_settle_opencode,
        order=lambda _, order: ["run", "-m", f"penstock/{MODEL}", order],
        again=lambda _, order: ["run", "-m", f"penstock/{MODEL}", "--continue", order],
        environment=lambda _: {"KEY": KEY, "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code",
        "0.24.4",
        ".bin/qwen",
        "/v1/chat/completions",
        order=_qwen,
        again=lambda place, order: ["--continue", *_qwen(place, order)],
        environment=lambda place: {
            "OPENAI_BASE_URL": place.url,
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
        },
    ),
    Agent(
        "cline",
        "cline",
        "3.0.65",
        ".bin/cline",
        "/v1/chat/completions",
        first=lambda place: ["auth", "-p", "openai", "-k", KEY, "-m", MODEL, "-b", place.url],
        order=lambda _, order: ["-y", order],
        again=lambda _, order: ["-y", order],
    ),
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code",
        "2.1.332",
        "@anthropic-ai/claude-code-linux-x64/claude",
        "/v1/messages",
        order=_claude,
        again=lambda place, order: ["--continue", *_claude(place, order)],
        environment=lambda place: {
            **variables_told("ANTHROPIC_", place),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    Agent(
        "codex",
        "@openai/codex",
        "0.171.0",
        ".bin/codex",
        "/v1/responses",
        settle=_settle_codex,
        order=lambda _, order: ["exec", *_CODEX, order],
        again=lambda _, order: ["exec", "resume", "--last", *_CODEX, order],
        environment=lambda _: {"KEY": KEY},
    ),
)
BY_NAME: Final = {agent.name: agent for agent in AGENTS}

"""What README shows works as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from engine.config import build_parser as engine_parser
from gateway.config import load
from gateway.identity.keys import hash_key

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_gateways_file_is_a_configuration() -> None:
    [text] = blocks("toml")
    config = load(tomllib.loads(text.replace("sha256:...", hash_key("any"))), {})
    assert config.models[0].aliases == ("gpt-5.4",)
    assert config.keys[0].limits.token_budget == 50_000_000


def test_ci_runs_the_test_command_word_for_word() -> None:
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    [line] = [line for line in README.splitlines() if re.search(pattern[1], line)]
    assert line in "".join(blocks("bash"))


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tests|engine|gateway|shared)/[\w/.]+)`", README)))
)
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_option_of_the_engine_that_is_named_exists() -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", engine_parser().format_help()))
    assert set(re.findall(r"`(--[a-z][a-z-]+)`", README)) - known == {"--check"}, "which the benches have"

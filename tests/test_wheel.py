"""The wheel's contents: the product and the demo model's files, without the demo's corpus and without tests.

The wheel is described by `tool.hatch` in pyproject.toml as whole packages, so the directories of these
packages are the list of its files.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from shared.process.build import DISTRIBUTION
from tests.test_layering import SOURCES, imports

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
STRANGERS = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx)\b[^&|;\n]*[ '\"]penstock(?!-llm\b)(?=[\s'\"\[=<>~]|$)"
    r"|\bpenstock\["
    r"|(?:version|distribution|metadata|files|requires)\([\"']penstock[\"']\)",
    re.MULTILINE,
)
"""What installs, or looks up, the distribution of another project."""
TOLD = {".py", ".md", ".toml", ".yaml", ".tpl", ".sh", ".txt", ".js", ".html", ""}
DEMO_FILES = {
    "engine/demo/__init__.py",
    "engine/demo/model/config.json",
    "engine/demo/model/generation_config.json",
    "engine/demo/model/model.safetensors",
    "engine/demo/model/tokenizer.json",
    "engine/demo/model/tokenizer_config.json",
}


def test_the_wheel_ships_whole_packages_and_no_tests() -> None:
    assert WHEEL.keys() == {"packages", "artifacts", "hooks"}, "another key decides what is shipped: test it"
    assert WHEEL["packages"] == ["gateway", "engine", "shared"]


def test_the_wheel_ships_the_demo_model_and_not_its_corpus() -> None:
    files = (path for path in (ROOT / "engine" / "demo").rglob("*") if path.is_file())
    assert {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"} == DEMO_FILES


def test_nothing_in_the_wheel_imports_tests() -> None:
    for path in SOURCES:
        assert not [name for name in imports(path) if name.split(".")[0] == "tests"], path


def test_its_name_is_ours_wherever_people_are_told_to_install_it() -> None:
    assert PYPROJECT["project"]["name"] == DISTRIBUTION
    wrong = "pip install penstock", "pip install -U 'penstock>=0.1'", '"penstock[all]"', 'version("penstock")'
    for told in wrong:
        assert STRANGERS.search(told)
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for name in ("gateway", "engine", "shared", "helm", "tests"):
        files += [path for path in (ROOT / name).rglob("*") if path.suffix in TOLD and path.is_file()]
    assert len(files) > 500
    for path in files:
        lines = path.read_bytes().splitlines() if path != Path(__file__) else ()
        found = [line for line in lines if b"penstock" in line and STRANGERS.search(line.decode())]
        assert not found, path

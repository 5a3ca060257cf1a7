"""The wheel's contents: the product and the demo model's files, without the demo's corpus and without tests.

The wheel is described by `tool.hatch` in pyproject.toml as whole packages, so the directories of these
packages are the list of its files.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.test_layering import SOURCES, imports

ROOT = Path(__file__).parent.parent
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
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

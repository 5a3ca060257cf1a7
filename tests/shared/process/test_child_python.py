"""Services run our own code, whatever packages lie in the directory that they are started in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.fairness.fair_threads import at_once
from shared.process.child_python import environment
from shared.text.rendering import APART_LEN, Chat, Renderer

ROOT = Path(__file__).parent.parent.parent.parent
DECOY = "raise SystemExit('this is not Penstock')"


@pytest.fixture
def beside_decoys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with packages of our packages' names."""
    for name in ("engine", "gateway", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(DECOY)
        (tmp_path / name / "__main__.py").write_text(DECOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("service", ["engine", "gateway"])
def test_a_service_is_ours(beside_decoys: Path, service: str) -> None:
    penstock = Path(sys.executable).with_name("penstock")
    ran = subprocess.run([penstock, service, "--help"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "usage" in ran.stdout


def test_the_process_that_renders_is_ours(beside_decoys: Path) -> None:
    renderer = Renderer()
    try:
        chat = Chat("{{ messages[0].content }}", {}, [{"content": "7" * APART_LEN}], {}, 0)
        text = at_once(renderer.slices(chat, APART_LEN))
    finally:
        renderer.close()
    assert text == "7" * APART_LEN


def test_modules_are_found_where_they_are_found_here() -> None:
    places = environment({})["PYTHONPATH"].split(os.pathsep)
    assert places == list(dict.fromkeys(filter(None, sys.path)))


def modules_started(tree: ast.AST) -> list[list[str]]:
    """The words of each command line that runs a module with this interpreter, as source."""
    found = []
    for node in ast.walk(tree):
        words = (
            node.args
            if isinstance(node, ast.Call)
            else node.elts
            if isinstance(node, ast.List | ast.Tuple)
            else []
        )
        texts = [ast.unparse(word) for word in words]
        if "sys.executable" in texts and "'-m'" in texts:
            found.append(texts)
    return found


def test_no_service_starts_a_module_of_the_current_directory() -> None:
    started = [
        (path, words)
        for package in ("engine", "gateway", "shared")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "bench" not in path.parts  # they run checkouts by the current directory
        for words in modules_started(ast.parse(path.read_text()))
    ]
    assert len(started) >= 6
    for path, words in started:
        assert words[words.index("'-m'") - 1] == "'-P'", path

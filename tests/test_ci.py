"""What CI runs ends with how each part of it ended."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
STEPS = ("tests", "coverage", "guards", "torches", "processors", "console", "images", "wheels", "kube")


def _nightly(checkout: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / ".ci" / "nightly"), *steps]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout where the guards hold, containers cannot run, and every other step fails."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "nightly", tmp_path / ".ci")
    commands = {
        ".venv/bin/python": '[ "$2" = tests.guards ]',
        "tests/ship/run.sh": "exit 77",
        ".ci/torches": "false",
        ".ci/processors": "false",
        ".ci/wheels": "false",
    }
    for name, script in commands.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
    return tmp_path


def test_a_step_that_fails_stops_no_other_and_all_are_in_the_table(checkout: Path) -> None:
    done = _nightly(checkout)
    table = [line.split(maxsplit=3) for line in done.stdout.splitlines()[-len(STEPS) :]]
    assert {name: how for name, _, _, how in table} == {
        **dict.fromkeys(STEPS, "FAILED (1)"),
        "guards": "passed",
        "images": "cannot run here",
        "kube": "cannot run here",
    }
    assert done.returncode == 1


def test_a_step_may_be_run_alone(checkout: Path) -> None:
    assert _nightly(checkout, "guards").returncode == 0
    assert _nightly(checkout, "guards", "torches").returncode == 1
    assert _nightly(checkout, "gards").returncode == 2


# -- what a forge runs ----------------------------------------------------------------------------


def _workflows() -> dict[str, Any]:
    return {
        path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yaml")
    }


def test_workflows_run_what_there_is() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yaml"))
    named = set(re.findall(r"(?<![\w/])\.ci/\w+", text))
    assert named == {".ci/run", ".ci/nightly", ".ci/wheels"}
    for name in (*named, *re.findall(r"\b(?:gateway|engine)/Dockerfile", text)):
        assert (ROOT / name).is_file(), name
    nightly: Any = _workflows()["nightly"]
    assert tuple(nightly["jobs"]["step"]["strategy"]["matrix"]["step"]) == STEPS
    assert 'imageRegistry: ""' in (ROOT / "helm/values.yaml").read_text(), "a release sets it"


def test_a_workflow_may_do_no_more_than_it_needs() -> None:
    for name, workflow in _workflows().items():
        assert "permissions" in workflow, name


# -- the changelog --------------------------------------------------------------------------------

PAGE = """# Changes

## Not released yet

### New

- **Old bullet.**

## 0.1.0

### New

- **First.**
"""


def test_fragments_become_a_versions_part_of_the_changelog(tmp_path: Path) -> None:
    for folder in (".ci", ".changes", "shared"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/changelog", tmp_path / ".ci")
    page = tmp_path / "shared/CHANGELOG.md"
    page.write_text(PAGE)
    (tmp_path / ".changes/a.new.md").write_text("- **A bullet.**\n")
    (tmp_path / ".changes/b.gone.md").write_text("- **Another.**\n")
    subprocess.run([tmp_path / ".ci/changelog", "0.2.0"], check=True, timeout=60)
    assert re.findall(r"^(?:#|-).*", page.read_text(), re.MULTILINE) == [
        *("# Changes", "## Not released yet", "## 0.2.0", "### New", "- **Old bullet.**", "- **A bullet.**"),
        *("### Gone", "- **Another.**", "## 0.1.0", "### New", "- **First.**"),
    ]
    assert list((tmp_path / ".changes").iterdir()) == []
    (tmp_path / ".changes/c.md").write_text("- **Of no kind.**\n")
    done = subprocess.run([tmp_path / ".ci/changelog"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "c.md" in done.stderr


def test_every_fragment_is_a_bullet_of_a_kind() -> None:
    for path in (ROOT / ".changes").glob("*"):
        assert re.fullmatch(r"[a-z-]+\.(new|changed|gone)\.md", path.name), path.name
        assert path.read_text().startswith("- **"), path.name

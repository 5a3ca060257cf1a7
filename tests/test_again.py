"""What a run came to is recorded, and the one test that failed is run again: a second failure is final."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests import again, outcomes
from tests.again import refusal
from tests.outcomes import Outcome

ROOT = Path(__file__).parent.parent
ENDED = Outcome(
    exit_status=1, seed=7, failed=("test_some.py::test_a",), crashed=(), uncollected=(), skipped=()
)
AGAIN = """
from pathlib import Path

def test_passes_the_second_time():
    mark = Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_never_passes():
    raise AssertionError
"""
CONFTEST = """
from tests.conftest import pytest_configure, pytest_runtest_makereport
"""
CRASHES = """
import os, signal, time
import pytest

def test_fails():
    raise AssertionError

@pytest.mark.parametrize("n", [1])
def test_crashes(n):
    os.kill(os.getpid(), signal.SIGSEGV)

def test_hangs():
    time.sleep(600)

def test_is_skipped():
    pytest.skip("not today")
"""


def _checkout(root: Path, outcome: Outcome | None, **files: str) -> None:
    """A checkout whose last run ended so."""
    path = root / outcomes.RECORD
    path.parent.mkdir()
    if outcome is not None:
        path.write_bytes(msgspec.json.encode(outcome))
    (root / "pytest.ini").write_text(
        "[pytest]\nfaulthandler_timeout = 5\nfaulthandler_exit_on_timeout = true\n"
    )
    for name, source in files.items():
        (root / f"{name}.py").write_text(source)


@pytest.mark.parametrize(
    "changed",
    [
        {"failed": ()},
        {"failed": ("a", "b")},
        {"exit_status": 2},
        {"crashed": ("test_some.py::test_b",)},
        {"uncollected": ("test_other.py",)},
    ],
    ids=str,
)
def test_one_failure_is_run_again_and_nothing_else(changed: dict[str, object]) -> None:
    assert refusal(ENDED) is None
    assert refusal(msgspec.structs.replace(ENDED, **changed)) is not None
    assert refusal(None) is not None


def test_a_test_that_passes_alone_is_recorded_with_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "test_some.py::test_passes_the_second_time"
    _checkout(tmp_path, msgspec.structs.replace(ENDED, failed=(name,)), test_some=AGAIN, mark="")
    monkeypatch.setattr(again, "ROOT", tmp_path)
    (tmp_path / "mark").touch()
    again.main()
    [line] = (tmp_path / again.RECORD).read_text().splitlines()
    assert line.endswith(f"{name} --hypothesis-seed=7")


@pytest.mark.parametrize("failed", [(), ("test_some.py::test_never_passes",)], ids=["no test", "again"])
def test_what_fails_twice_or_is_no_test_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...]
) -> None:
    _checkout(tmp_path, msgspec.structs.replace(ENDED, failed=failed), test_some=AGAIN)
    monkeypatch.setattr(again, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        again.main()
    assert ended.value.code
    assert not (tmp_path / again.RECORD).exists()


def test_a_crash_a_hang_and_a_skip_are_no_plain_failures(tmp_path: Path) -> None:
    _checkout(tmp_path, None, conftest=CONFTEST, test_some=CRASHES)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--max-worker-restart", "3"]
    command += ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    ended = outcomes.last(tmp_path)
    assert ended is not None, done.stderr
    assert ended.exit_status == done.returncode == 1
    assert ended.failed == ("test_some.py::test_fails", "test_some.py::test_is_skipped")
    assert ended.crashed == ("test_some.py::test_crashes[1]", "test_some.py::test_hangs")
    assert "in test_hangs" in done.stderr


@pytest.mark.parametrize(
    "broken", ["import nothing_of_this_name", "import pytest; pytest.importorskip('nothing')"]
)
def test_a_file_that_is_not_collected_is_never_green(tmp_path: Path, broken: str) -> None:
    _checkout(tmp_path, None, conftest=CONFTEST, test_broken=broken, test_fine="def test_passes(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    ended = outcomes.last(tmp_path)
    assert ended is not None, done.stderr
    assert ended.exit_status == done.returncode != 0
    assert ended.uncollected == ("test_broken.py",)
    assert refusal(ended) is not None

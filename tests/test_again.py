"""Failed tests are run again when they are few, and a second failure is final."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import again
from tests.again import AGAIN_MAX, failed_tests, refusal

SOURCE = """
from pathlib import Path

def test_passes_the_second_time():
    mark = Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_never_passes():
    raise AssertionError
"""


def _checkout(root: Path, *failed: str) -> None:
    """A checkout whose last run left these failures."""
    cache = root / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    (root / "test_some.py").write_text(SOURCE)
    (root / "pytest.ini").write_text("[pytest]\n")


def test_few_failures_are_run_again_many_and_none_are_not(tmp_path: Path) -> None:
    assert refusal(failed_tests(tmp_path)) is not None
    _checkout(tmp_path, "test_some.py::test_never_passes")
    assert refusal(failed_tests(tmp_path)) is None
    assert refusal(map(str, range(AGAIN_MAX))) is None
    assert refusal(map(str, range(AGAIN_MAX + 1))) is not None


def test_a_test_that_passes_alone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _checkout(tmp_path, "test_some.py::test_passes_the_second_time")
    (tmp_path / "mark").touch()
    monkeypatch.setattr(again, "ROOT", tmp_path)
    again.main()
    assert "WANTS MENDING" in capfd.readouterr().out


@pytest.mark.parametrize("failed", [[], ["test_some.py::test_never_passes"]], ids=["no test", "again"])
def test_what_fails_twice_or_is_no_test_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: list[str]
) -> None:
    _checkout(tmp_path, *failed)
    monkeypatch.setattr(again, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        again.main()
    assert ended.value.code

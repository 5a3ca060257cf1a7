"""How suites that others wrote are judged."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.suites.__main__ import names
from tests.suites.judging import Kind, Outcome, figures_of, judged, pytest_outcomes

THEIRS = """
import pytest

def test_right():
    pass

def test_skipped():
    pytest.skip("not today")

@pytest.mark.parametrize("n", [1, 2])
def test_refused(n):
    raise RuntimeError(f"Error code: 400 - tools is not supported{chr(10)}and more")

def test_clever():
    assert "14" in "sunny"

def test_wrong():
    raise TimeoutError("no answer")

@pytest.fixture
def broken():
    raise OSError("unreachable")

def test_never_begun(broken):
    pass
"""


def test_the_suites_are_the_modules_with_a_summary() -> None:
    assert {"anthropic", "comply", "langchain", "openai", "sdks", "templates"} <= set(names())
    assert not {"cache", "judging", "peeling", "serving"} & set(names())


def test_a_run_of_pytest_is_judged_test_by_test(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    outcomes = pytest_outcomes(
        Path(sys.executable),
        ["--config-file=/dev/null", "theirs.py"],
        folder=tmp_path,
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        up_to_the_model={r"test_clever\n": "it tells no degrees"},
    )
    assert outcomes == [
        Outcome("theirs.test_right", Kind.RIGHT),
        Outcome("theirs.test_skipped", Kind.SKIPPED, "not today"),
        Outcome("theirs.test_refused[1]", Kind.REFUSED, "tools is not supported"),
        Outcome("theirs.test_refused[2]", Kind.REFUSED, "tools is not supported"),
        Outcome("theirs.test_clever", Kind.MODEL, "it tells no degrees"),
        Outcome("theirs.test_wrong", Kind.WRONG, "TimeoutError: no answer"),
        Outcome("theirs.test_never_begun", Kind.WRONG, 'failed on setup with "OSError: unreachable"'),
    ]
    told = {figure.name: (figure.value, figure.ok) for figure in figures_of(outcomes)}
    assert told["refused by name"] == (2, None)
    assert told["refused by name: tools is not supported (theirs.test_refused)"] == (2, None)
    assert told["wrong"] == (2, False)


ANTHROPICS = "{'type': 'invalid_request_error', 'message': 'speed is not', 'details': {'param': 'speed'}}"


def test_a_refusal_is_known_as_clients_show_it() -> None:
    body = "{'message': \"f is not there\", 'type': 'invalid_request_error', 'param': 'tools'}"
    for shown in (
        f"anthropic.BadRequestError: Error code: 400 - {{'error': {ANTHROPICS}, 'request_id': 'r'}}",
        "openai.BadRequestError: Error code: 400 - f is not there",
        f"pydantic_ai.exceptions.ModelHTTPError: status_code: 400, model_name: m, body: {body}",
    ):
        assert judged("t", shown, {".*": "never"}).kind is Kind.REFUSED
    theirs = f"anthropic.BadRequestError: Error code: 400 - {{'error': {ANTHROPICS}, 'request_id': 'r'}}"
    assert judged("t", theirs, {}).reason == "speed is not"
    assert judged("t", "openai.InternalServerError: Error code: 500 - oh", {}).kind is Kind.WRONG

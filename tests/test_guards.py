"""The tables of `python -m tests.guards`: nothing in them is out of date, and no bound is left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import pytest

from tests.guards.copies import Outcome, opened
from tests.guards.lifting import Edit, lifted
from tests.guards.removals import ROOT, bounds, bounds_of, guards, product, removals

PRODUCT = product()


@lru_cache
def text_of(file: str) -> str:
    """A file of tests. None has no text."""
    path = ROOT / file
    return path.read_text() if path.is_file() else ""


def none(problems: Iterable[str]) -> None:
    """Fail with all of them."""
    if found := sorted(problems):
        pytest.fail("\n".join(found))


def decorators_of(test: str) -> str | None:
    """What stands above a test. None where there is no such test."""
    file, _, name = test.partition("::")
    name = re.escape(re.split(r"\[|::", name)[0])
    found = re.search(rf"^(?:(?:async )?def|class) {name}\b|^{name} = ", text_of(file), re.MULTILINE)
    return None if found is None else text_of(file)[: found.start()].rpartition("\n\n\n")[2]


def draws_alone(test: str) -> bool:
    """True if a test draws all its cases, and so may draw none that notices."""
    above = decorators_of(test) or ""
    return "@given(" in above and "@example(" not in above


def test_every_guard_is_there_and_its_tests_too() -> None:
    names = Counter(one.name for one in removals())
    none(f"{name} is the name of {count}" for name, count in names.items() if count > 1)
    times = [(guard, PRODUCT.get(guard.file, "").count(guard.old)) for guard in guards()]
    none(f"{guard.name}: {guard.file} has the old text {count} times" for guard, count in times if count != 1)
    tests = {test for one in removals() for test in one.tests}
    none(f"there is no {test}" for test in tests if decorators_of(test) is None)
    none(f"{test} has no example of what it must notice" for test in tests if draws_alone(test))


def test_every_bound_is_reached_by_a_test_or_by_nothing_from_outside() -> None:
    there, told = set(bounds_of(PRODUCT)), bounds()
    reached = {(file, name) for file, names in told.reached.items() for name in names}
    inner = {(file, name) for file, names in told.inner.items() for name in names}
    none(f"not in tests/guards/bounds.toml: {file} {name}" for file, name in there - reached - inner)
    none(f"gone: {file} {name}" for file, name in (reached | inner) - there)
    none(f"in both tables: {file} {name}" for file, name in reached & inner)


def test_every_bound_bounds_something() -> None:
    uses = {path: Counter(re.findall(r"\b\w+_MAX\b", source)) for path, source in PRODUCT.items()}
    everywhere = sum(uses.values(), Counter[str]())
    none(f"{file}: nothing uses {name}" for file, name in bounds_of(PRODUCT) if everywhere[name] < 2)


ONE = '''
A_MAX = 5
"""At most `A_MAX`."""
assert A_MAX < 9
PATTERN = rf"a{{1,{A_MAX}}}"

def of(text: str) -> str:
    if len(text) > A_MAX:
        raise ValueError(f"longer than {A_MAX}")
    return f"{text[:A_MAX]}"
'''
OTHER = """
from gateway import one
from gateway.one import A_MAX as MOST
from gateway.other import A_MAX

def of(text: str) -> bool:
    return len(text) < MOST or len(text) < one.A_MAX or len(text) < A_MAX
"""


def test_a_bound_is_lifted_where_it_bounds_and_nowhere_else() -> None:
    one, other = lifted({"gateway/one.py": ONE, "shared/other.py": OTHER}, "gateway/one.py", "A_MAX")
    changed = [line for line in one.after.splitlines() if line not in ONE.splitlines()]
    assert changed == [
        'PATTERN = rf"a{{1,{(1000 * A_MAX)}}}"',
        "    if len(text) > (1000 * A_MAX):",
        '    return f"{text[:(1000 * A_MAX)]}"',
    ]
    [line] = [line for line in other.after.splitlines() if line not in OTHER.splitlines()]
    assert line == (
        "    return len(text) < (1000 * MOST) or len(text) < (1000 * one.A_MAX) or len(text) < A_MAX"
    )


def test_what_is_taken_away_is_noticed_or_not_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in a third of the time
    own, tests = "def of() -> int:\n    return 1\n", ["test_it.py::test_it"]
    (tmp_path / "it.py").write_text(own)
    (tmp_path / "test_it.py").write_text("import it\n\ndef test_it():\n    assert it.of() == 1\n")
    with opened(tmp_path, ()) as copy:
        for other, outcome in (("2", Outcome.NOTICED), ("0 + 1", Outcome.UNNOTICED), ("3", Outcome.NOTICED)):
            edit = Edit("it.py", own, own.replace("1", other))
            assert copy.tried([edit], tests).outcome is outcome
            assert (tmp_path / "it.py").read_text() == own
        assert copy.tried([], ["test_other.py"]).outcome is Outcome.BROKEN
        endless = Edit("it.py", own, own.replace("return 1", "while True: pass"))
        assert copy.tried([endless], tests, limit_s=0.2).outcome is Outcome.HUNG

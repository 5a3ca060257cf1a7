"""What tests that others wrote came to.

A test is

- *right*, where it passed;
- *skipped*, where it skips itself, or asks for what the suite says that Penstock does not have;
- *refused by name*, where the server answered 400 and said what it does not do;
- *up to the model*, where the server did as asked, and a model of 29 million parameters said something else
  than the test hopes for: a suite names these one by one, with the reason, and nothing else counts as such;
- *wrong* else.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.figures import Figure, at_most, figure
from tests.suites.cache import SuiteFailed


class Kind(Enum):
    RIGHT = "right"
    SKIPPED = "skipped"
    REFUSED = "refused by name"
    MODEL = "up to the model"
    WRONG = "wrong"


class Outcome(NamedTuple):
    test: str
    kind: Kind
    reason: str = ""


SCRIPTS: Final = Path(__file__).with_name("scripts")
"""What runs in the suites' own environments, and not in this one."""
REFUSED: Final = re.compile(
    r"Error code: 400 - \{.*'message': ['\"](.+?)['\"], 'details'"
    r"|Error code: 400 - (.+)"
    r"|status_code: 400, .*'message': (.+?), 'type'"
)
"""How the SDKs of Anthropic and OpenAI, and what is built on these, show an answer of 400."""
REASON_LEN_MAX: Final = 300


def judged(test: str, failure: str, up_to_the_model: Mapping[str, str]) -> Outcome:
    """The outcome of a test that failed with this message. `up_to_the_model`: reasons by patterns that match
    a test's name and the message of its failure, one line each."""
    if refused := REFUSED.search(failure):
        return Outcome(test, Kind.REFUSED, _short(next(filter(None, refused.groups()))))
    for pattern, reason in up_to_the_model.items():
        if re.search(pattern, f"{test}\n{failure}"):
            return Outcome(test, Kind.MODEL, reason)
    return Outcome(test, Kind.WRONG, _short(failure))


def figures_of(outcomes: Iterable[Outcome]) -> list[Figure]:
    """How many outcomes there are of each kind, and for which reasons. None may be wrong."""
    tests: dict[tuple[Kind, str], list[str]] = defaultdict(list)
    for outcome in outcomes:
        tests[outcome.kind, outcome.reason].append(outcome.test)
    found = []
    for kind in Kind:
        of_kind = {reason: names for (each, reason), names in tests.items() if each is kind}
        total = sum(map(len, of_kind.values()))
        found.append(figure(kind.value, total, "tests", at_most(0) if kind is Kind.WRONG else None))
        for reason, names in sorted(of_kind.items()):
            if reason:
                found.append(figure(f"{kind.value}: {reason} ({_listed(names)})", len(names), "tests"))
    return found


def pytest_outcomes(
    python: Path,
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    up_to_the_model: Mapping[str, str],
) -> list[Outcome]:
    """What a run of pytest comes to. Raises SuiteFailed."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        argv = [str(python), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*argv, *arguments], cwd=folder, env=dict(environment), capture_output=True, text=True
        )
        if not report.exists():
            raise SuiteFailed(f"pytest ended before it wrote its report: {done.stdout}{done.stderr}")
        return list(_reported(ElementTree.parse(report).getroot(), up_to_the_model))


def _reported(report: ElementTree.Element, up_to_the_model: Mapping[str, str]) -> Iterator[Outcome]:
    for case in report.iter("testcase"):
        test = f"{case.get('classname', '').removeprefix('tests.api_resources.')}.{case.get('name')}"
        if (failed := case.find("failure")) is None:
            failed = case.find("error")
        if failed is not None:
            yield judged(test, failed.get("message", ""), up_to_the_model)
        elif (skipped := case.find("skipped")) is not None:
            yield Outcome(test, Kind.SKIPPED, _short(skipped.get("message", "")))
        else:
            yield Outcome(test, Kind.RIGHT)


def _listed(tests: Sequence[str]) -> str:
    """The tests' names, those that differ in their parameters alone as one."""
    return ", ".join(sorted({re.sub(r"\[.*", "", test) for test in tests}))


def _short(text: str) -> str:
    return " ".join(text.split())[:REASON_LEN_MAX]

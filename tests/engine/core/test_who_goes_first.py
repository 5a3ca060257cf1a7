"""The table "Who goes first" of engine/README.md has the numbers of the code, and names tests that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from engine.core.config import SchedulerConfig

ROOT = Path(__file__).parents[3]
ROWS = 11
NUMBER = re.compile(r"`(pace|policy|tenants|deadlines|SchedulerConfig)\.(\w+)` ([\d., ]*\d)")


def table() -> list[list[str]]:
    text = (ROOT / "engine" / "README.md").read_text()
    section = text.split("### Who goes first")[1].split("\n`service_tier`")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_numbers_are_those_of_the_code() -> None:
    found = [match for row in table() for match in NUMBER.finditer(row[2])]
    assert len(found) >= ROWS
    for match in found:
        module, name, told = match.groups()
        owner = SchedulerConfig() if module == "SchedulerConfig" else import_module(f"engine.core.{module}")
        value = getattr(owner, name)
        numbers = sorted(value.values()) if isinstance(value, dict) else [value]
        assert [float(each) for each in told.split(",")] == numbers, name


def test_every_rule_is_held_by_tests() -> None:
    rows = table()
    assert len(rows) == ROWS
    for row in rows:
        names = re.findall(r"`([\w/]+\.py)`", row[3])
        assert names, row[0]
        for name in names:
            assert (ROOT / name).exists(), name

"""The table "Who goes first" of engine/README.md has the numbers of the code, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from engine.api.ask import engine_state
from engine.api.http import generate
from engine.config import EngineConfig
from engine.core.estimate import pace
from engine.core.queue import deadlines, newcomers, policy, tenants
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step import drafting, planner, victims
from shared.fairness import fair_share

ROOT = Path(__file__).parents[3]
ROWS = 13
NUMBER = re.compile(r"`(\w+)\.(\w+)` (\d[\d., ]*\d|\d)")
OWNERS = {
    "SchedulerConfig": SchedulerConfig(),
    "EngineConfig": EngineConfig("model"),
    "fair_share": fair_share,
    "generate": generate,
    "deadlines": deadlines,
    "drafting": drafting,
    "newcomers": newcomers,
    "pace": pace,
    "planner": planner,
    "policy": policy,
    "state": engine_state,
    "tenants": tenants,
    "victims": victims,
}


def table() -> list[list[str]]:
    text = (ROOT / "engine" / "README.md").read_text()
    section = text.split("### Who goes first")[1].split("\n`service_tier`")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_row_has_numbers_and_they_are_those_of_the_code() -> None:
    rows = table()
    assert len(rows) == ROWS
    for row in rows:
        found = NUMBER.findall(row[2])
        assert found, row[0]
        for owner, name, told in found:
            value = getattr(OWNERS[owner], name)
            numbers = sorted(value.values()) if isinstance(value, dict) else [value]
            assert [float(each) for each in told.split(",")] == numbers, name


def test_every_number_is_held_by_a_test_of_its_row_that_names_it() -> None:
    for row in table():
        files = [ROOT / name for name in re.findall(r"`([\w/]+\.py)`", row[3])]
        assert files, row[0]
        text = "".join(file.read_text() for file in files)
        for _, name, _ in NUMBER.findall(row[2]):
            assert name in text, f"{name} is in no test of the row {row[0]!r}"

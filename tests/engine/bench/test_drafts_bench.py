"""The row of drafts: its texts are the same every time, and what it reads of an engine's metrics."""

from __future__ import annotations

import pytest

from tests.bench.draft_texts import COUNT, KINDS, texts
from tests.bench.engine.drafts import counted


def test_the_counters_of_drafts_are_read() -> None:
    name = "penstock_engine_drafts_total"
    page = f'{name}{{outcome="right"}} 12.0\n{name}{{outcome="wrong"}} 3\n'
    assert (counted(page, "right"), counted(page, "wrong")) == (12, 3)
    assert counted("# HELP x\n", "right") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_a_kind_are_the_same_every_time_and_differ(kind: str) -> None:
    assert texts(kind) == texts(kind)
    assert len(set(texts(kind))) == COUNT


def test_an_edit_changes_one_line_of_its_file() -> None:
    for question, answer in texts("edits"):
        asked, answered = question.split("\n")[1:-1], answer.rstrip("\n").split("\n")
        assert sum(a != b for a, b in zip(asked, answered, strict=False)) == 1

"""The row of drafts: its texts are the same every time, and what it reads of an engine's metrics."""

from __future__ import annotations

import pytest

from tests.bench.client import TimedRequest
from tests.bench.draft_texts import COUNT, KINDS, texts
from tests.bench.engine.drafts import _text, _tokens, _used, counted


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


def test_the_events_of_vllm_and_llama_cpp_are_read() -> None:
    """vLLM sends null for what it does not tell, and its usage in an event without choices."""
    raw = [
        b'data: {"choices":[{"index":0,"text":"ab","logprobs":null,"token_ids":null}],"usage":null}',
        b'data: {"choices":[{"index":0,"text":"c"}],"timings":{"draft_n":2}}',
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"details":null}}',
    ]
    exchange = TimedRequest(0.0, events=raw)
    assert (_text(exchange), _used(exchange), _tokens(exchange)) == ("abc", 3, [])

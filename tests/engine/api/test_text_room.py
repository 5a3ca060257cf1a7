"""The memory of a whole answer's text: more than was reserved is held before it is kept."""

from __future__ import annotations

import pytest

from engine.api.answer import text_room
from engine.api.answer.outputs import RequestOutput
from engine.api.answer.text_room import STEP_LEN, TextRoom
from engine.api.ask import admission
from shared.apis.holding import Holding
from shared.fairness.fair_share import FairShare
from shared.wire.errors import Overloaded
from tests.engine.api.conftest import MODEL, Served

TEXT_LEN = 100
OTHERS_LEN = 7


def room_of(share: FairShare) -> TextRoom:
    """The room of an answer that holds `TEXT_LEN` bytes for its text, and some for what else it has."""
    holding = Holding(share, "acme")
    holding.hold(TEXT_LEN + OTHERS_LEN)
    return TextRoom(holding, TEXT_LEN + OTHERS_LEN, TEXT_LEN)


def test_text_that_outgrows_what_was_reserved_holds_more() -> None:
    share = FairShare(1 << 20)
    room = room_of(share)
    room.take("x" * TEXT_LEN)
    assert share.held == TEXT_LEN + OTHERS_LEN
    room.take("x")
    assert share.held == TEXT_LEN + OTHERS_LEN + STEP_LEN
    room.take("x" * (STEP_LEN - 1))
    assert share.held == TEXT_LEN + OTHERS_LEN + STEP_LEN
    room.take("🌊")  # four bytes for each character, those before it too
    assert share.held >= 4 * (TEXT_LEN + STEP_LEN + 1) + OTHERS_LEN


def test_a_request_ends_where_its_tenant_may_hold_no_more() -> None:
    output = RequestOutput(1, whole=True, room=room_of(FairShare(STEP_LEN)))
    output.keep("x" * TEXT_LEN)
    assert output.error is None
    output.keep("x")
    assert isinstance(output.error, Overloaded)


def test_another_tenants_answer_has_room_beside_one_that_takes_all_it_may() -> None:
    share = FairShare(16 * STEP_LEN)
    greedy = room_of(share)
    output = RequestOutput(1, whole=True, room=greedy)
    for _ in range(16):
        output.keep("x" * STEP_LEN)
    assert isinstance(output.error, Overloaded)
    victim = Holding(share, "victim")
    victim.hold(TEXT_LEN)
    TextRoom(victim, TEXT_LEN, TEXT_LEN).take("x" * STEP_LEN)


async def test_answers_that_are_not_streamed_hold_their_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "TEXT_BYTES", 1)
    monkeypatch.setattr(text_room, "STEP_LEN", served.engine.state.config.request_memory)
    served.says("the quick brown fox")
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    whole = await served.http.post("/v1/completions", json=body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "queue_full")
    stream = await served.http.post("/v1/completions", json={**body, "stream": True})
    assert stream.text.endswith("\n\n")
    assert "data: [DONE]" in stream.text

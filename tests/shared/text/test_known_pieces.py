"""Pieces of long prompts that are known from the turn before: the same ids, within a bound, and each tenant's
own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.fairness.fair_threads import at_once
from shared.text.known_pieces import KEPT_LEN_MAX, KnownPieces
from shared.text.prompts import prompt_slices
from shared.text.text_slices import SLICE_LEN
from shared.text.tokenizer import Tokenizer
from tests.shared.text.test_prompts import CHATTY, TEMPLATE, finish
from tests.shared.text.toy_tokenizers import bundle_of, byte_level, with_bos

OTHER = Tokenizer(bundle_of(with_bos(byte_level()), TEMPLATE))


def conversation(turns: int) -> ChatPrompt:
    """Turns of a few thousand words each, no two alike."""
    texts = (
        f"turn {turn} " + " ".join(f"{turn * number:x}" for number in range(4000)) for turn in range(turns)
    )
    return ChatPrompt([ChatMessage("user", text) for text in texts])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that tokenizers have encoded."""
    seen: list[str] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    return seen


def test_a_turn_encodes_what_is_new_and_says_the_same(encoded: list[str]) -> None:
    known = KnownPieces().of("acme")
    for turns in range(1, 8):
        encoded.clear()
        chat = conversation(turns)
        ids = at_once(prompt_slices(CHATTY, chat, None, known))
        # no more than the turn, and the piece that it goes on from
        assert sum(map(len, encoded)) <= len(chat.messages[-1].text) + 2 * SLICE_LEN
        assert ids == at_once(prompt_slices(CHATTY, chat, None))


def test_known_pieces_do_not_hold_the_thread_for_long() -> None:
    known = KnownPieces().of("acme")
    _, first = finish(prompt_slices(CHATTY, conversation(20), None, known))
    _, again = finish(prompt_slices(CHATTY, conversation(20), None, known))
    assert 2 <= again < first


@pytest.mark.parametrize(("tenant", "tokenizer"), [("rival", CHATTY), ("acme", OTHER)])
def test_pieces_are_one_tenants_and_one_tokenizers(
    encoded: list[str], tenant: str, tokenizer: Tokenizer
) -> None:
    pieces, chat = KnownPieces(), conversation(4)
    at_once(prompt_slices(CHATTY, chat, None, pieces.of("acme")))
    encoded.clear()
    found = at_once(prompt_slices(tokenizer, chat, None, pieces.of(tenant)))
    assert sum(map(len, encoded)) >= sum(len(message.text) for message in chat.messages)
    assert found == at_once(prompt_slices(tokenizer, chat, None))


def pieces_of(tenant: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{tenant} {number} " * 50
        number += 1


def test_a_tenant_that_sends_much_forgets_its_own(encoded: list[str]) -> None:
    known = KnownPieces(64 * 1024)
    own = [*islice(pieces_of("victim"), 8)]
    for piece in own:
        known.of("victim").encode(CHATTY, piece)
    for piece in islice(pieces_of("flood"), 400):
        known.of("flood").encode(CHATTY, piece)
        assert known.kept_len <= 64 * 1024
    encoded.clear()
    assert all(known.of("victim").encode(CHATTY, piece)[1] for piece in own)
    assert not encoded


def test_what_was_asked_for_last_is_kept_and_nothing_too_large_is() -> None:
    known, acme = KnownPieces(16 * 1024), KnownPieces(16 * 1024).of("acme")
    first, *others = islice(pieces_of("acme"), 60)
    for piece in others:
        acme.encode(CHATTY, first)
        acme.encode(CHATTY, piece)
    assert acme.encode(CHATTY, first)[1]
    assert not acme.encode(CHATTY, others[0])[1]
    known.of("acme").encode(CHATTY, "word " * 20_000)
    assert known.kept_len == 0
    known = KnownPieces()
    known.keep("acme", b"digest", array("i", bytes(KEPT_LEN_MAX)))
    assert known.kept_len == 0


def test_no_text_is_kept() -> None:
    known: Any = KnownPieces()
    known.of("acme").encode(CHATTY, "a secret that nobody else may read " * 600)
    [digests] = known._by_tenant.values()
    assert all(len(digest) == 16 for digest in digests)

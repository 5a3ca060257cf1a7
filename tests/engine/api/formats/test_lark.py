"""Texts in grammars."""

from __future__ import annotations

from engine.api.formats import lark
from engine.contract.grammars import compiled
from tests.engine.api import walks


def test_a_value_has_its_end_in_it_in_no_white_space() -> None:
    rules = lark.Rules()
    rules.add("start", lark.text_before(rules, ["\n</p>\n"]))

    def accepts(text: str) -> bool:
        matcher = compiled(walks.vocabulary(), str(rules))
        tokens = walks.tokenizer().encode(text).ids
        return all(map(matcher.consume_token, tokens)) and matcher.is_accepting()

    assert accepts("a\n\n </p\n</p>\n")
    assert not accepts("a</p>\n</p>\n"), "the machine would end the value at the first"
    assert not accepts("a\n</p>\nb\n</p>\n")

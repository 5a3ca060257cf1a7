"""Prompts with a suffix: the tokens of each family that fills in, and no others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Raw

from shared.apis.prompt import TextPrompt
from shared.fairness.fair_threads import at_once
from shared.text.fill import FORMS, FillForm
from shared.text.prompts import prompt_slices
from shared.text.text_slices import SLICE_LEN
from shared.text.tokenizer import Tokenizer
from shared.wire.errors import ContextLengthExceeded, InvalidRequest, NotInPlace
from shared.wire.room import Room
from tests.shared.text.toy_tokenizers import BYTE_LEVEL, bundle_of, byte_level, sentencepiece, with_bos

PREFIX, SUFFIX = "def valve(", "  return water\n"


def filling(made: Raw, *tokens: str) -> Tokenizer:
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(bundle_of(with_bos(made)))


def ids_of(tokenizer: Tokenizer, prompt: TextPrompt, room: Room | None = None) -> list[list[int]]:
    return at_once(prompt_slices(tokenizer, prompt, room))


@pytest.mark.parametrize("form", FORMS[:-1], ids=lambda form: form.prefix)
def test_prefix_and_suffix_stand_between_the_tokens_of_the_family(form: FillForm) -> None:
    names = (form.prefix, form.suffix, form.middle or "")
    tokenizer = filling(byte_level(), *names)
    first, second, third = map(tokenizer.raw.token_to_id, names)
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    bos = tokenizer.raw.token_to_id("<s>")
    expected = [bos, first, *prefix, second, *suffix, third]
    assert ids_of(tokenizer, TextPrompt(PREFIX, suffix=SUFFIX)) == [expected]
    with pytest.raises(NotInPlace):
        tokenizer.prompt_ids(TextPrompt(PREFIX, suffix=SUFFIX))


def test_where_the_prefix_comes_last_the_answer_follows_it() -> None:
    tokenizer = filling(byte_level(), "[PREFIX]", "[SUFFIX]")
    [ids] = ids_of(tokenizer, TextPrompt(PREFIX, suffix=SUFFIX))
    assert tokenizer.decode(ids, False) == f"<s>[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}"


def test_the_suffix_has_no_space_that_a_tokenizer_would_put_before_a_text() -> None:
    tokenizer = filling(sentencepiece(), "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
    [ids] = ids_of(tokenizer, TextPrompt("the valve", suffix="opens"))
    tokens = [tokenizer.raw.id_to_token(token_id) or "" for token_id in ids]
    at = tokens.index("\u2581<SUF>")
    assert tokens[2].startswith("\u2581")
    assert "".join(tokens[at + 1 : -1]) == "opens"


def test_several_prompts_share_a_suffix_and_may_be_empty() -> None:
    tokenizer = filling(byte_level(), *[FORMS[0].prefix, FORMS[0].suffix, FORMS[0].middle or ""])
    one, none = ids_of(tokenizer, TextPrompt([PREFIX, ""], suffix=SUFFIX))
    assert len(one) - len(none) == len(tokenizer.encode(PREFIX, add_special_tokens=False))


def test_long_texts_are_bounded_by_the_room() -> None:
    tokenizer = filling(byte_level(), "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    words = "the valve opens " * (SLICE_LEN // 8)
    [ids] = ids_of(tokenizer, TextPrompt(words, suffix=words))
    assert tokenizer.decode(ids, True) == words * 2
    room = Room(len(ids) - 8)
    with pytest.raises(ContextLengthExceeded) as caught:
        ids_of(tokenizer, TextPrompt(words, suffix=words), room)
    assert caught.value.param == "prompt"


def test_a_suffix_needs_such_tokens_and_a_text() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids_of(BYTE_LEVEL, TextPrompt(PREFIX, suffix=SUFFIX))
    assert caught.value.param == "suffix"
    tokenizer = filling(byte_level(), "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    with pytest.raises(InvalidRequest) as caught:
        ids_of(tokenizer, TextPrompt([1, 2], suffix=SUFFIX))
    assert caught.value.param == "suffix"
    assert ids_of(BYTE_LEVEL, TextPrompt(PREFIX, suffix="")) == BYTE_LEVEL.prompt_ids(TextPrompt(PREFIX))

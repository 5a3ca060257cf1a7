"""Prompts encoded slice by slice, against the tokenizer's own answer; and what is refused how early;
prompts with a suffix."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Raw

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt, TextPrompt
from shared.fairness.fair_threads import Slices, at_once
from shared.text import prompts
from shared.text.fill import FORMS, FillForm
from shared.text.prompts import prompt_slices, text_slices
from shared.text.text_slices import SLICE_LEN
from shared.text.tokenizer import Tokenizer
from shared.wire.errors import ApiError, ContextLengthExceeded, InvalidRequest, NeverFits, NotInPlace
from shared.wire.room import Room
from tests.shared.text.test_text_slices import sentence_piece
from tests.shared.text.toy_tokenizers import BYTE_LEVEL, bundle_of, byte_level, sentencepiece, with_bos

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHATTY = Tokenizer(bundle_of(byte_level(), TEMPLATE))
WITH_BOS = Tokenizer(bundle_of(with_bos(byte_level())))
LLAMA2 = Tokenizer(bundle_of(sentence_piece()))
WORDS = "The valve opens and the water flows through the penstock. "


def finish(slices: Slices[Any]) -> tuple[Any, int]:
    """The result of a job, and in how many slices it came."""
    count = 1
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value, count
        count += 1


def completion(prompt: Any) -> TextPrompt:
    return TextPrompt(prompt)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt([ChatMessage("user", text)])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WITH_BOS, LLAMA2], ids=["plain", "bos", "sentencepiece"])
@pytest.mark.parametrize(
    "prompt",
    ["short", WORDS * 2000, ["a", WORDS * 1000, "b"], [WORDS] * 100, [1, 2, 3], [[1], [2, 3]]],
    ids=["short", "long", "mixed lengths", "many", "ids", "lists of ids"],
)
def test_ids_are_the_tokenizers(tokenizer: Tokenizer, prompt: Any) -> None:
    ids, _ = finish(prompt_slices(tokenizer, completion(prompt), None))
    assert ids == tokenizer.prompt_ids(completion(prompt))


def test_a_chat_is_rendered_and_encoded() -> None:
    ids, slices = finish(prompt_slices(CHATTY, chat(WORDS * 2000), None))
    assert ids == CHATTY.prompt_ids(chat(WORDS * 2000))
    assert slices > 5


def test_long_text_and_many_texts_come_in_slices() -> None:
    assert finish(prompt_slices(BYTE_LEVEL, completion(WORDS * 3000), None))[1] > 8
    assert finish(prompt_slices(BYTE_LEVEL, completion([WORDS * 20] * 100), None))[1] > 4
    assert finish(prompt_slices(BYTE_LEVEL, completion("short"), None))[1] == 1


def test_a_text_that_cannot_fit_is_refused_by_its_length_alone() -> None:
    slicer = BYTE_LEVEL.slicer
    assert slicer is not None
    slices = text_slices(BYTE_LEVEL, WORDS * 10_000, Room(100), "prompt")
    with pytest.raises(ContextLengthExceeded) as refused:
        next(slices)
    assert refused.value.param == "prompt"
    assert "100 tokens" in refused.value.message


@pytest.mark.parametrize("text", [WORDS * 10_000, WORDS * 5], ids=["by its length", "by its tokens"])
def test_a_text_beyond_the_kv_cache_is_not_said_to_exceed_the_context(text: str) -> None:
    with pytest.raises(NeverFits, match="KV cache of this model's engine holds 20 tokens") as refused:
        finish(prompt_slices(BYTE_LEVEL, completion(text), Room(1_000_000, 20)))
    assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded, match="context holds 20 tokens"):
        finish(prompt_slices(BYTE_LEVEL, completion(text), Room(20, 10_000)))


@pytest.mark.parametrize("prompt", [[7] * 101, [[1], [7] * 101], WORDS * 10_000, WORDS * 50])
def test_a_prompt_that_is_known_to_exceed_the_context_is_said_to_exceed_it(prompt: Any) -> None:
    """However small the KV cache is: another engine's would not hold it either."""
    with pytest.raises(ContextLengthExceeded, match="context holds 100 tokens"):
        finish(prompt_slices(BYTE_LEVEL, completion(prompt), Room(100, 20)))


@pytest.mark.parametrize("prompt", [[10**10] * 101, [[1], [10**10] * 101]], ids=["ids", "lists of ids"])
def test_ids_that_cannot_fit_are_refused_before_any_is_looked_at(prompt: Any) -> None:
    """There may be a million, and none of these has a token."""
    with pytest.raises(ContextLengthExceeded, match="100 tokens"):
        finish(prompt_slices(BYTE_LEVEL, completion(prompt), Room(100)))
    with pytest.raises(InvalidRequest, match="token ids"):
        finish(prompt_slices(BYTE_LEVEL, completion(prompt), Room(101)))


def test_counting_stops_where_the_bound_is_passed() -> None:
    text = WORDS * 20_000
    whole, slices = finish(text_slices(BYTE_LEVEL, text, None, "prompt"))
    done = 0
    with pytest.raises(ContextLengthExceeded):
        for done, _ in enumerate(text_slices(BYTE_LEVEL, text, Room(len(whole) // 2), "prompt"), 1):  # noqa: B007
            pass
    assert done <= slices // 2 + 1
    assert finish(text_slices(BYTE_LEVEL, text, Room(len(whole)), "prompt"))[0] == whole


def test_all_prompts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TOKENS_MAX", 1000)
    with pytest.raises(InvalidRequest, match="1000 tokens"):
        finish(prompt_slices(BYTE_LEVEL, completion([WORDS] * 100), None))
    with pytest.raises(InvalidRequest, match="1000 tokens"):
        finish(prompt_slices(BYTE_LEVEL, completion(WORDS * 100), None))


def test_a_tokenizer_that_is_not_known_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Tokenizer(bundle_of(byte_level()))
    unknown.slicer = None
    monkeypatch.setattr(prompts, "WHOLE_LEN_MAX", 40_000)
    ids, slices = finish(prompt_slices(unknown, completion(WORDS * 600), None))
    assert ids == unknown.prompt_ids(completion(WORDS * 600))
    assert slices == 2
    with pytest.raises(InvalidRequest, match="40000 characters"):
        finish(prompt_slices(unknown, completion(WORDS * 800), None))


@pytest.mark.parametrize("prompt", ["", ["a", ""], [], [[]], [1, "a"]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        finish(prompt_slices(WITH_BOS, completion(prompt), None))
    assert refused.value.param == "prompt"


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

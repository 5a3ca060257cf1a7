"""The door's arithmetic: seeds, salts, and how long an answer may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.api.admission import Limits, cache_salt, derive_seed, max_tokens_of, plan_choices
from shared.errors import ContextLengthExceeded, NeverFits
from shared.openai import ChatMessage, ChatRequest, CompletionRequest

CHAT = ChatRequest(model="m", messages=[ChatMessage("user", "x")])


@given(
    prompt_len=st.integers(1, 80),
    asked=st.none() | st.integers(1, 80),
    max_model_len=st.integers(2, 64),
    kv_tokens=st.integers(2, 64),
)
def test_what_passes_fits_and_what_does_not_names_what_to_change(
    prompt_len: int, asked: int | None, max_model_len: int, kv_tokens: int
) -> None:
    limits = Limits(max_model_len, kv_tokens, 100)
    for request, prompt_param in (
        (ChatRequest(model="m", messages=CHAT.messages, max_tokens=asked), "messages"),
        (CompletionRequest(model="m", prompt="x", max_tokens=asked), "prompt"),
    ):
        granted = granted_or_refused(request, prompt_len, limits)
        if isinstance(granted, int):
            assert 1 <= granted <= min(max_model_len, kv_tokens + 1) - prompt_len
            assert granted == asked or asked is None
        else:
            is_context = isinstance(granted, ContextLengthExceeded)
            room = (max_model_len if is_context else kv_tokens + 1) - prompt_len
            assert room < (asked or 1)
            assert granted.param == ("max_tokens" if room >= 1 else prompt_param)
            assert is_context == (prompt_len + (asked or 1) > max_model_len)


def granted_or_refused(
    request: ChatRequest | CompletionRequest, prompt_len: int, limits: Limits
) -> int | ContextLengthExceeded | NeverFits:
    try:
        return max_tokens_of(request, prompt_len, limits)
    except (ContextLengthExceeded, NeverFits) as error:
        return error


def test_a_choice_keeps_its_seed_whatever_n_is() -> None:
    limits = Limits(64, 64, 100)

    def seeds(n: int | None) -> list[int]:
        request = ChatRequest(model="m", messages=CHAT.messages, seed=5, n=n)
        return [choice.sampling.seed for choice in plan_choices(request, [[1, 2]], limits, frozenset())]

    assert seeds(None) == seeds(1) == seeds(4)[:1]
    assert len(set(seeds(4))) == 4


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 255))
def test_seeds_are_unsigned_64_bit(seed: int, choice: int) -> None:
    assert 0 <= derive_seed(seed, choice) < 2**64


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_salts_differ_unless_both_parts_agree(a: str, b: str, c: str, d: str) -> None:
    assert (cache_salt(a, b) == cache_salt(c, d)) == ((a, b) == (c, d))

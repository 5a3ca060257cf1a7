"""The door's arithmetic: seeds, salts, and how long an answer may be."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.ask.admission import (
    ANSWER_LEN_MAX,
    Choice,
    Limits,
    SamplingDefaults,
    answer_len,
    cache_salt,
    check_fields,
    derive_seed,
    max_tokens_of,
    plan_choices,
    prompts_of,
    service_class,
    trusted_ids,
)
from engine.contract.messages import AddRequest, SamplingParams, ServiceClass
from engine.contract.packing import Biases, packed
from engine.core.queue.newcomers import AddSequence, sequences_of
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.completions import CompletionRequest
from shared.apis.generation import PromptExtension
from shared.wire.errors import ContextLengthExceeded, InvalidRequest, NeverFits
from tests.bench.engine.core_window import alone

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
        choices = plan_choices(request, [[1, 2]], limits, frozenset(), SamplingDefaults())
        return [choice.sampling.seed for choice in choices]

    assert seeds(None) == seeds(1) == seeds(4)[:1]
    assert len(set(seeds(4))) == 4


@given(seed=st.integers(0, 2**64 - 1), prompt=st.integers(0, 255), choice=st.integers(0, 255))
def test_seeds_are_unsigned_64_bit(seed: int, prompt: int, choice: int) -> None:
    assert 0 <= derive_seed(seed, prompt, choice) < 2**64


def test_every_choice_of_every_prompt_has_a_seed_of_its_own() -> None:
    seeds = {derive_seed(7, prompt, choice) for prompt in range(256) for choice in range(64)}
    assert len(seeds) == 256 * 64
    request = CompletionRequest(model="m", prompt=["a", "a"], n=2, seed=7)
    planned = plan_choices(request, [[1], [1]], Limits(64, 64, 10), frozenset(), SamplingDefaults())
    assert [choice.sampling.seed for choice in planned] == [
        derive_seed(7, p, c) for p in (0, 1) for c in (0, 1)
    ]


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_salts_differ_unless_both_parts_agree(a: str, b: str, c: str, d: str) -> None:
    assert (cache_salt(a, b) == cache_salt(c, d)) == ((a, b) == (c, d))


def test_what_a_request_leaves_open_is_the_models_to_say() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)

    def sampling(**asked: Any) -> SamplingParams:
        request = ChatRequest(model="m", messages=CHAT.messages, **asked)
        [choice] = plan_choices(request, [[1, 2]], Limits(64, 64, 100), frozenset(), defaults)
        return choice.sampling

    open_, asked = sampling(), sampling(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    assert (open_.temperature, open_.top_p, open_.top_k, open_.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.repetition_penalty) == (0.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "tier_max", "expected"),
    [
        ({}, None, ServiceClass.DEFAULT),
        ({"service_tier": "auto"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "scale"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, None, ServiceClass.PRIORITY),
        ({"service_tier": "flex"}, None, ServiceClass.FLEX),
        ({"priority": -1}, None, ServiceClass.PRIORITY),
        ({"priority": 0}, None, ServiceClass.DEFAULT),
        ({"priority": 7}, None, ServiceClass.FLEX),
        ({"priority": 7, "service_tier": "auto"}, None, ServiceClass.FLEX),
        ({"priority": 7, "service_tier": "default"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, "default", ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, "priority", ServiceClass.PRIORITY),
        ({}, "flex", ServiceClass.FLEX),
        ({"service_tier": "flex"}, "nonsense", ServiceClass.FLEX),
    ],
)
def test_the_class_is_what_was_asked_for_under_the_tenants_cap(
    fields: dict[str, object], tier_max: str | None, expected: ServiceClass
) -> None:
    body = {"model": "m", "prompt": "x", **fields}
    assert service_class(msgspec.convert(body, CompletionRequest), tier_max) is expected


def test_choices_share_what_is_long_and_are_sent_as_one_message() -> None:
    """A list of biases was once made, sent and read for each of 256 choices."""
    bias = {str(token): 0.5 for token in range(1024)}
    stops = list(range(64))
    request = CompletionRequest(model="m", prompt="", n=2, logit_bias=bias, stop_token_ids=stops, seed=3)
    prompts, limits = [[1, 2, prompt] for prompt in range(128)], Limits(64, 4096, 2000)
    choices = plan_choices(request, prompts, limits, frozenset(), SamplingDefaults())
    assert len(choices) == 256
    assert len({id(choice.sampling.logit_bias) for choice in choices}) == 1
    assert len({id(choice.sampling.stop_token_ids) for choice in choices}) == 1
    sent = AddRequest(5, "r", prompts_of(choices, [packed(ids) for ids in prompts], 2), choices[0].sampling)
    frame = msgspec.msgpack.encode(sent)
    assert len(frame) < 12 * 1024 + 256 * 32
    came = list(sequences_of(msgspec.msgpack.decode(frame, type=AddRequest)))
    assert [one.handle for one in came] == list(range(5, 5 + 256))
    assert [list(one.prompt_ids) for one in came] == [choice.prompt_ids for choice in choices]
    assert [one.sampling for one in came] == [choice.sampling for choice in choices]
    assert len({id(one.sampling.logit_bias) for one in came}) == 1


class Unread(list[int]):
    """Ids that nobody may look at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("each id was looked at")


def test_choices_are_planned_without_a_look_at_each_id() -> None:
    """The least and the greatest of a million were once looked for on the event loop: 33 ms."""
    request = CompletionRequest(model="m", prompt="", n=2, max_tokens=1)
    choices = plan_choices(request, [Unread([1, 2])] * 3, WIDE, frozenset(), SamplingDefaults())
    assert len(choices) == 6
    extension = PromptExtension("hash", [Unread([1, 2])])
    told = CompletionRequest(model="m", prompt="x", penstock=extension)
    assert trusted_ids(told, "hash", 1) is extension.prompt_ids


def test_a_waiting_sequence_with_the_longest_lists_takes_less_than_the_memory_formula_says() -> None:
    ids = range(100_000, 101_024)
    sampling = SamplingParams(
        1, 1, logit_bias=Biases.of((i, i / 7) for i in ids), stop_token_ids=(*ids[:64],)
    )
    frame = msgspec.msgpack.encode(alone(AddSequence(1, "r", [5], sampling)))
    decoder = msgspec.msgpack.Decoder(AddRequest)
    tracemalloc.start()
    try:
        waiting = [list(sequences_of(request)) for request in map(decoder.decode, [frame] * 64)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(waiting) < 64 * 1024 / 2


# -- how much an answer may hold ------------------------------------------------------------------

WIDE = Limits(10**6, 10**7, 1000)


def planned(request: ChatRequest | CompletionRequest, *prompt_lens: int) -> list[Choice]:
    prompts = [[1] * length for length in prompt_lens]
    return plan_choices(request, prompts, WIDE, frozenset(), SamplingDefaults())


@pytest.mark.parametrize(
    ("request_", "prompt_lens", "param"),
    [
        (CompletionRequest(model="m", prompt="", n=64, max_tokens=2500, logprobs=20), (1,), "n"),
        (CompletionRequest(model="m", prompt="", max_tokens=50_000, logprobs=20), (1,), "logprobs"),
        (
            CompletionRequest(model="m", prompt="", max_tokens=900_000, return_token_ids=True),
            (1,),
            "max_tokens",
        ),
        (CompletionRequest(model="m", prompt="", n=16, max_tokens=1, echo=True, logprobs=20), (8000,), "n"),
        (CompletionRequest(model="m", prompt="", max_tokens=0, echo=True, logprobs=20), (8000,) * 4, "n"),
        (
            CompletionRequest(model="m", prompt="", max_tokens=0, echo=True, logprobs=20),
            (40_000,),
            "logprobs",
        ),
        (CompletionRequest(model="m", prompt="", n=64, max_tokens=1, echo=True), (40_000,), "n"),
        (CompletionRequest(model="m", prompt="", n=64, max_tokens=1, return_token_ids=True), (70_000,), "n"),
        (CompletionRequest(model="m", prompt=" " * 600_000, n=64, max_tokens=1, echo=True), (5000,), "n"),
        (CompletionRequest(model="m", prompt="", stream=True, n=64, max_tokens=2500, logprobs=20), (1,), "n"),
        (
            ChatRequest(model="m", messages=[], n=64, max_tokens=2000, logprobs=True, top_logprobs=20),
            (1,),
            "n",
        ),
    ],
)
def test_an_answer_that_would_hold_too_much_is_refused(
    request_: ChatRequest | CompletionRequest, prompt_lens: tuple[int, ...], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(request_, *prompt_lens)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "request_",
    [
        CompletionRequest(model="m", prompt="", n=64, max_tokens=100, logprobs=5),
        CompletionRequest(model="m", prompt="", max_tokens=0, echo=True, logprobs=20),
        ChatRequest(model="m", messages=[], n=64, max_tokens=10_000),
        ChatRequest(model="m", messages=[], n=64, max_tokens=500_000, stream=True),
        ChatRequest(model="m", messages=[], n=16, max_tokens=600, logprobs=True, top_logprobs=20),
    ],
)
def test_what_it_holds_is_within_the_bound(request_: ChatRequest | CompletionRequest) -> None:
    choices = planned(request_, 2000)
    assert answer_len(request_, choices) <= ANSWER_LEN_MAX
    stated = request_.output_tokens_max
    assert all(choice.sampling.max_tokens == stated for choice in choices)


def test_a_maximum_that_was_left_open_is_made_smaller() -> None:
    plain = ChatRequest(model="m", messages=[])
    assert planned(plain, 10)[0].sampling.max_tokens == WIDE.max_model_len - 10
    told = ChatRequest(model="m", messages=[], n=4, logprobs=True, top_logprobs=20)
    choices = planned(told, 10)
    assert 1000 < choices[0].sampling.max_tokens < 10_000
    assert answer_len(told, choices) <= ANSWER_LEN_MAX


def test_a_prompt_that_is_repeated_counts_with_each_of_its_choices() -> None:
    one, many = (
        CompletionRequest(model="m", prompt="", n=n, max_tokens=1, echo=True, return_token_ids=True)
        for n in (1, 30)
    )
    assert answer_len(many, planned(many, 40_000)) > 10 * answer_len(one, planned(one, 40_000))
    chat = ChatRequest(model="m", messages=[], n=64, max_tokens=1, return_token_ids=True)
    assert planned(chat, 70_000), "it has its prompt's ids once"
    stream = CompletionRequest(model="m", prompt="", n=64, max_tokens=1, echo=True, stream=True)
    assert planned(stream, 40_000), "it is written as it is made"


def test_a_stream_holds_no_more_than_its_window() -> None:
    request = ChatRequest(model="m", messages=[], max_tokens=10_000, stream=True)
    whole = ChatRequest(model="m", messages=[], max_tokens=10_000)
    assert answer_len(request, planned(request, 10)) < answer_len(whole, planned(whole, 10)) / 40


def test_a_stream_holds_the_choices_that_wait_for_their_prompt_to_be_scored() -> None:
    """Further choices may be computed from a cached prefix, to their ends, before the first has a token."""

    def held(n: int, *, stream: bool) -> int:
        request = CompletionRequest(
            model="m", prompt="", n=n, max_tokens=2000, echo=True, logprobs=0, stream=stream
        )
        return answer_len(request, planned(request, 10))

    assert held(4, stream=True) > 0.99 * held(4, stream=False)
    assert held(1, stream=True) < held(1, stream=False) / 8


def test_a_prompt_is_scored_once_however_many_choices_it_has() -> None:
    request = CompletionRequest(model="m", prompt="", n=3, max_tokens=2, echo=True, logprobs=2)
    asked = [choice.sampling.prompt_logprobs for choice in planned(request, 4, 4)]
    assert asked == [2, None, None, 2, None, None]
    nothing = CompletionRequest(model="m", prompt="", n=3, max_tokens=0, echo=True)
    with pytest.raises(InvalidRequest) as refused:
        check_fields(nothing, 4)
    assert refused.value.param == "n"

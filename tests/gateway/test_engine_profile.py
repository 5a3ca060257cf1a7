"""What the gateway asks an engine about a model, and what it says when the answer cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest

from gateway.admission.tokens import estimate_slices
from gateway.config import EngineMake, ModelConfig
from gateway.engines import EngineProfile, fetch_profile
from gateway.relay.upstream import Upstream
from shared.apis.completions import CompletionRequest
from shared.errors import (
    ApiError,
    ConnectTimeout,
    EngineFailed,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    RouteNotFound,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
)
from shared.fair_threads import at_once
from shared.ids import TOKENIZER_HEADER
from shared.room import Room
from tests.gateway.fake_engine import byte_bundle

MODELS = "/v1/models"
TOKENIZER = "/penstock/tokenizer"
LISTED = msgspec.json.encode({"data": [{"id": "tiny", "max_model_len": 4096}]})
BUNDLE = byte_bundle()
A, B = "http://a", "http://b"
GONE = (RouteNotFound("no such path"), MethodNotAllowed("no such path"))
Answer = tuple[Mapping[str, str], bytes] | ApiError | TimeoutError


@dataclass
class FakeUpstream:
    """Answers by URL and path."""

    answers: dict[tuple[str, str], Answer]
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def fetch(self, protocol: str, url: str, path: str, *_: object) -> tuple[Mapping[str, str], bytes]:
        self.asked.append((url, path))
        answer = self.answers[url, path]
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine(
    models: Answer = ({}, LISTED), tokenizer: Answer = ({}, b"{}"), url: str = "http://a"
) -> FakeUpstream:
    return FakeUpstream({(url, MODELS): models, (url, TOKENIZER): tokenizer})


async def profile_of(upstream: FakeUpstream, *urls: str, make: EngineMake = "auto") -> EngineProfile:
    model = ModelConfig("tiny", urls or (A,), engine=make)
    return await fetch_profile(cast(Upstream, upstream), model, model.replicas, 1.0, ())


@pytest.mark.parametrize(
    ("upstream", "message"),
    [
        (engine(models=({}, b"<html>")), "The engine's list of models cannot be read."),
        (engine(models=({}, b'{"data": [{"id": "other"}]}')), "The engine does not serve this model."),
        (engine(tokenizer=({}, b"<html>")), "The engine's tokenizer cannot be read."),
        (
            engine(tokenizer=({TOKENIZER_HEADER: "sha256:0"}, msgspec.json.encode(BUNDLE))),
            "The engine's tokenizer is damaged.",
        ),
        (engine(models=TimeoutError()), "The engine did not answer in time."),
    ],
    ids=["no list", "another model", "no tokenizer", "another hash", "no answer"],
)
async def test_an_answer_that_cannot_be_used_is_an_error_that_says_which(
    upstream: FakeUpstream, message: str
) -> None:
    with pytest.raises(UpstreamFailed) as caught:
        await profile_of(upstream)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "error",
    [
        *(ConnectTimeout("late"), UpstreamUnreachable("gone"), NotReady("draining"), Overloaded("full")),
        *(UpstreamFailed("401"), UpstreamLost("cut"), EngineFailed("500")),
    ],
    ids=lambda error: error.code,
)
async def test_an_engine_that_fails_before_its_tokenizer_is_not_taken_for_a_foreign_one(
    error: ApiError,
) -> None:
    """Its requests would be estimated, and their token ids not be sent."""
    with pytest.raises(type(error)):
        await profile_of(engine(tokenizer=error))


@pytest.mark.parametrize("gone", GONE, ids=lambda error: error.code)
async def test_an_engine_without_a_tokenizer_to_give_is_a_foreign_one(gone: ApiError) -> None:
    assert await profile_of(engine(tokenizer=gone)) == EngineProfile(None, Room(4096), None)


@pytest.mark.parametrize("gone", GONE, ids=lambda error: error.code)
async def test_a_foreign_engine_may_have_no_list_of_models(gone: ApiError) -> None:
    assert await profile_of(engine(models=gone, tokenizer=gone)) == EngineProfile(None, None, None)
    with pytest.raises(UpstreamFailed, match="list of models is not there"):
        await profile_of(engine(models=gone, tokenizer=({}, msgspec.json.encode(BUNDLE))))


async def test_an_engine_whose_make_is_configured_is_not_asked_for_it() -> None:
    upstream = engine(tokenizer=NotReady("one of ours would say so"))
    assert (await profile_of(upstream, make="openai")).bundle is None
    assert upstream.asked == [(A, MODELS)]
    with pytest.raises(UpstreamFailed, match="gives no tokenizer"):
        await profile_of(engine(tokenizer=GONE[0]), make="penstock")


async def test_the_next_replica_is_asked_when_one_fails() -> None:
    good = engine(tokenizer=({TOKENIZER_HEADER: BUNDLE.hash}, msgspec.json.encode(BUNDLE)), url=B)
    upstream = FakeUpstream({(A, MODELS): UpstreamUnreachable("gone"), **good.answers})
    assert await profile_of(upstream, A, B) == EngineProfile(BUNDLE, Room(4096), None)
    assert upstream.asked == [(A, MODELS), (B, MODELS), (B, TOKENIZER)]


@pytest.mark.parametrize(
    ("told", "room"),
    [
        ({"max_model_len": 65, "context_len": 256}, Room(256, 64)),
        ({"max_model_len": 256, "context_len": 256}, Room(256)),
        ({"max_model_len": 256, "context_len": 65}, Room(256)),
        ({"max_model_len": 65}, Room(65)),
        ({"context_len": 65}, None),
    ],
    ids=["the KV cache", "the context", "a smaller context", "an older engine", "no room"],
)
async def test_what_bounds_a_sequence_is_what_the_engine_tells(
    told: dict[str, int], room: Room | None
) -> None:
    listed = msgspec.json.encode({"data": [{"id": "tiny", **told}]})
    profile = await profile_of(engine(models=({}, listed), tokenizer=RouteNotFound("no such path")))
    assert profile.room == room
    assert room is None or room.most == told["max_model_len"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "longest", "prompts"),
    [
        ("x" * 9, 3, 3, 1),
        ([1, 2, 3], 3, 3, 1),
        (["x" * 8, "x" * 4], 5, 2, 2),
        ([[1, 2, 3], [4]], 4, 3, 2),
    ],
    ids=["text", "ids", "texts", "lists of ids"],
)
def test_without_a_tokenizer_texts_are_estimated_and_ids_are_counted(
    prompt: str | list[str | int | list[int]], tokens: int, longest: int, prompts: int
) -> None:
    count = at_once(estimate_slices(CompletionRequest(model="tiny", prompt=prompt), {}, 0))
    assert (count.prompt_tokens, count.longest, count.prompts) == (tokens, longest, prompts)
    assert not count.is_exact

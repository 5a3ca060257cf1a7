"""What the gateway asks an engine about a model, and what it says when the answer cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest

from gateway.admission.tokens import estimate_slices
from gateway.config.edge import HopConfig
from gateway.config.whole import EngineMake, ModelConfig
from gateway.relay import checked_bundles, engines
from gateway.relay import upstream as upstreams
from gateway.relay.checked_bundles import CheckedBundle
from gateway.relay.engines import (
    ASKED_MAX,
    FETCHES_MAX,
    LISTED_MAX,
    TOKENIZER,
    EngineProfile,
    Engines,
    Replies,
)
from gateway.relay.upstream import Upstream
from shared.apis.completions import CompletionRequest
from shared.fairness.fair_threads import at_once
from shared.text.tokenizer import TokenizerBundle
from shared.wire.errors import (
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
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.room import Room
from tests.fakes import VirtualClock
from tests.gateway.conftest import until
from tests.gateway.fake_engine import FakeEngine, byte_bundle

MODELS = "/v1/models"
LISTED = msgspec.json.encode({"data": [{"id": "tiny", "max_model_len": 4096}]})
BUNDLE = byte_bundle()
OTHER = msgspec.structs.replace(BUNDLE, chat_template="{{ messages[0].content }}")
NAMED = {TOKENIZER_HEADER: BUNDLE.hash}
A, B, C = "http://a", "http://b", "http://c"
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

    async def fetch_into(
        self, take: Callable[[bytes], object], len_max: int, protocol: str, url: str, path: str, *_: object
    ) -> Mapping[str, str]:
        headers, body = await self.fetch(protocol, url, path)
        if len_max:
            take(body)
        return headers


def engine(models: Answer = (NAMED, LISTED), tokenizer: Answer = (NAMED, b""), url: str = A) -> FakeUpstream:
    return FakeUpstream({(url, MODELS): models, (url, TOKENIZER): tokenizer})


def having(bundle: TokenizerBundle, url: str, served: TokenizerBundle | None = None) -> FakeUpstream:
    """A replica that names this tokenizer, and gives it or another one."""
    named = {TOKENIZER_HEADER: bundle.hash}
    return engine((named, LISTED), (named, msgspec.json.encode(served or bundle)), url)


def replies(upstream: FakeUpstream, *urls: str) -> Replies:
    return Replies(
        cast(Upstream, upstream), lambda _: urls, lambda _: 1.0, lambda _: (), checked_bundles.check
    )


async def profile_of(upstream: FakeUpstream, *urls: str, make: EngineMake = "auto") -> EngineProfile:
    model = ModelConfig("tiny", urls or (A,), engine=make)
    profile, _ = await replies(upstream, *model.replicas).profile(model)
    return profile


async def bundle_of(upstream: FakeUpstream, *urls: str) -> CheckedBundle | str:
    model = ModelConfig("tiny", urls)
    return await replies(upstream, *urls).bundle(model, urls, BUNDLE.hash)


@pytest.mark.parametrize(
    ("upstream", "message"),
    [
        (engine(models=({}, b"<html>")), "The engine's list of models cannot be read."),
        (engine(models=({}, b'{"data": [{"id": "other"}]}')), "The engine does not serve this model."),
        (engine(models=({}, LISTED), tokenizer=({}, b"")), "The engine does not name its tokenizer."),
        (
            engine(models=({TOKENIZER_HEADER: "x" * 4000}, LISTED), tokenizer=({}, b"")),
            "The engine does not name its tokenizer.",
        ),
        (engine(models=TimeoutError()), "The engine did not answer in time."),
    ],
    ids=["no list", "another model", "no hash", "a hash that is none", "no answer"],
)
async def test_an_answer_that_cannot_be_used_is_an_error_that_says_which(
    upstream: FakeUpstream, message: str
) -> None:
    with pytest.raises(UpstreamFailed) as caught:
        await profile_of(upstream)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("upstream", "message"),
    [
        (engine(tokenizer=({}, b"<html>")), "The engine's tokenizer cannot be read."),
        (having(BUNDLE, A, served=OTHER), "The engine's tokenizer is damaged."),
        (engine(tokenizer=TimeoutError()), "The engine did not answer in time."),
    ],
    ids=["no tokenizer", "another hash", "no answer"],
)
async def test_a_tokenizer_that_is_not_the_one_announced_is_none(
    upstream: FakeUpstream, message: str
) -> None:
    with pytest.raises(UpstreamFailed) as caught:
        await bundle_of(upstream, A)
    assert caught.value.message == message
    honest = FakeUpstream({**upstream.answers, **having(BUNDLE, B).answers})
    found = await bundle_of(honest, A, B)
    assert isinstance(found, CheckedBundle), "the next one is asked"
    assert found.load().hash == found.hash == BUNDLE.hash


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
        await profile_of(engine(models=({}, LISTED), tokenizer=error))


@pytest.mark.parametrize("gone", GONE, ids=lambda error: error.code)
async def test_an_engine_without_a_tokenizer_to_give_is_a_foreign_one(gone: ApiError) -> None:
    assert await profile_of(engine(({}, LISTED), tokenizer=gone)) == EngineProfile(None, Room(4096), None)


@pytest.mark.parametrize("gone", GONE, ids=lambda error: error.code)
async def test_a_foreign_engine_may_have_no_list_of_models(gone: ApiError) -> None:
    assert await profile_of(engine(models=gone, tokenizer=gone)) == EngineProfile(None, None, None)
    with pytest.raises(UpstreamFailed, match="list of models is not there"):
        await profile_of(engine(models=gone))


async def test_an_engine_whose_make_is_configured_is_not_asked_for_it() -> None:
    upstream = engine(tokenizer=NotReady("one of ours would say so"))
    assert (await profile_of(upstream, make="openai")).tokenizer is None
    assert upstream.asked == [(A, MODELS)]
    with pytest.raises(UpstreamFailed, match="gives no tokenizer"):
        await profile_of(engine(({}, LISTED), tokenizer=GONE[0]), make="penstock")


async def test_a_replica_that_is_not_there_has_no_voice() -> None:
    upstream = FakeUpstream({(A, MODELS): UpstreamUnreachable("gone"), **having(BUNDLE, B).answers})
    assert await profile_of(upstream, A, B) == EngineProfile(BUNDLE.hash, Room(4096), None)


@pytest.mark.parametrize(
    ("voices", "elected"),
    [
        ([OTHER], OTHER),
        ([OTHER, BUNDLE, BUNDLE], BUNDLE),
        ([BUNDLE, OTHER], None),
        ([OTHER, BUNDLE, TimeoutError()], None),
        ([OTHER, TimeoutError(), TimeoutError()], None),
        ([BUNDLE, BUNDLE, OTHER, TimeoutError()], None),
        ([OTHER, UpstreamUnreachable("gone"), UpstreamUnreachable("gone")], OTHER),
        ([None, BUNDLE, BUNDLE], BUNDLE),
    ],
    ids=[
        *("the only one", "one rogue of three", "one against one", "one that is slow", "two that are slow"),
        *("no more than half", "the others are gone", "one that seems foreign"),
    ],
)
async def test_the_tokenizer_is_the_one_that_most_replicas_have(
    voices: Sequence[TokenizerBundle | ApiError | TimeoutError | None], elected: TokenizerBundle | None
) -> None:
    answers: dict[tuple[str, str], Answer] = {}
    for number, voice in enumerate(voices):
        url = f"http://{number}"
        if isinstance(voice, TokenizerBundle):
            answers |= having(voice, url).answers
        else:
            answers[url, MODELS] = ({}, LISTED) if voice is None else voice
    model, urls = ModelConfig("tiny"), [f"http://{number}" for number in range(len(voices))]
    asked = replies(FakeUpstream(answers), *urls).profile(model)
    if elected is None:
        with pytest.raises(UpstreamFailed, match="different tokenizers"):
            await asked
        return
    profile, having_it = await asked
    assert profile.tokenizer == elected.hash
    assert [*having_it] == [url for url, voice in zip(urls, voices, strict=True) if voice is elected]


async def test_no_more_replicas_are_asked_than_is_stated() -> None:
    urls = [f"http://{number}" for number in range(LISTED_MAX + 1)]
    upstream = FakeUpstream({})
    for url in urls:
        upstream.answers |= having(BUNDLE, url, served=OTHER).answers
    model = ModelConfig("tiny")
    await replies(upstream, *urls).profile(model)
    assert len(upstream.asked) == LISTED_MAX
    upstream.asked.clear()
    with pytest.raises(UpstreamFailed):
        await replies(upstream, *urls).bundle(model, urls, BUNDLE.hash)
    assert len(upstream.asked) == ASKED_MAX


async def test_what_is_fetched_of_an_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "FETCH_LEN_MAX", 10)
    monkeypatch.setattr(engines, "BUNDLE_LEN_MAX", 10)
    async with FakeEngine(bundle=BUNDLE) as engine:
        model = ModelConfig("tiny", (engine.url,))
        upstream = Upstream(HopConfig(), [model])
        asking = replies(cast(FakeUpstream, upstream), engine.url)
        with pytest.raises(UpstreamFailed, match="too large"):
            await asking.profile(model)
        with pytest.raises(UpstreamFailed, match="too large"):
            await asking.bundle(model, [engine.url], BUNDLE.hash)
        await upstream.aclose()


@pytest.mark.parametrize(
    ("lengths", "most"), [((1, 4096, 4096), 4096), ((1, 4096), 4096), ((10**30,), 10**30)]
)
async def test_the_room_is_what_most_replicas_tell(lengths: Sequence[int], most: int) -> None:
    answers: dict[tuple[str, str], Answer] = {}
    for number, length in enumerate(lengths):
        listed = msgspec.json.encode({"data": [{"id": "tiny", "max_model_len": length}]})
        answers |= engine((NAMED, listed), url=f"http://{number}").answers
    urls = [f"http://{number}" for number in range(len(lengths))]
    profile, _ = await replies(FakeUpstream(answers), *urls).profile(ModelConfig("tiny"))
    assert profile.room == Room(most)


# -- how often ------------------------------------------------------------------------------------


class Rogue:
    """A replica of which a test says what it names, and what it gives."""

    def __init__(self) -> None:
        self.hash = BUNDLE.hash
        self.gives: CheckedBundle | str = CheckedBundle(BUNDLE.hash, 0.1, BUNDLE)
        self.asked = self.fetched = self.at_once = self.at_once_max = 0
        self.disagrees = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def profile(self, model: ModelConfig) -> tuple[EngineProfile, Sequence[str]]:
        self.asked += 1
        if self.disagrees:
            raise UpstreamFailed("The replicas have different tokenizers.")
        return EngineProfile(self.hash, Room(4096), None), [A]

    async def bundle(self, model: ModelConfig, urls: Sequence[str], hash_: str) -> CheckedBundle | str:
        self.fetched += 1
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        await self.gate.wait()
        self.at_once -= 1
        given = self.gives
        return given if isinstance(given, str) else msgspec.structs.replace(given, hash=hash_)


class Keeping:
    """The background work for some models, on a clock that a test moves."""

    def __init__(self, rogue: Rogue, models: int = 1) -> None:
        self.clock = VirtualClock()
        self.models = [ModelConfig(f"m{number}", (A,)) for number in range(models)]
        self.engines = Engines(self.models, rogue, self.clock)
        self.known = self.engines.of(self.models[0])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Keeping]:
        tasks = [asyncio.ensure_future(work()) for work in self.engines.works().values()]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def answers(self, rogue: Rogue, seconds: int) -> None:
        """An answer each second, each of which names another tokenizer."""
        for second in range(seconds):
            rogue.hash = f"sha256:{second:064x}"
            self.known.observe(rogue.hash)
            for _ in range(3):
                await asyncio.sleep(0)
            self.clock.advance(1)


async def test_a_hash_that_is_another_in_each_answer_has_a_tokenizer_fetched_once_a_minute() -> None:
    rogue = Rogue()
    async with Keeping(rogue).running() as keeping:
        await until(lambda: keeping.known.tokenizer is not None)
        await keeping.answers(rogue, 200)
        assert 1 < rogue.fetched <= rogue.asked <= 1 + 200 // 60 + 1


async def test_a_tokenizer_that_is_of_no_use_is_fetched_once_and_told_once(log: io.StringIO) -> None:
    rogue = Rogue()
    rogue.gives = "it cannot be loaded"
    async with Keeping(rogue).running() as keeping:
        for _ in range(300):
            keeping.known.observe(rogue.hash)
            await asyncio.sleep(0)
            keeping.clock.advance(1)
    assert rogue.fetched == 1
    assert rogue.asked <= 6
    await until(lambda: "tokenizer.unusable" in log.getvalue())
    assert log.getvalue().count("tokenizer.unusable") == 1
    assert keeping.known.tokenizer is None


async def test_a_rolling_update_goes_over_once_most_replicas_have_the_new_tokenizer() -> None:
    pool = Rogue()
    async with Keeping(pool).running() as keeping:
        known, old, new = keeping.known, pool.hash, f"sha256:{1:064x}"

        async def a_minute() -> str:
            for _ in range(61):
                known.observe(new)
                await asyncio.sleep(0)
                keeping.clock.advance(1)
            await until(lambda: not pool.at_once and bool(keeping.clock.sleeping))
            assert known.tokenizer is not None
            return known.tokenizer.hash

        await until(lambda: known.tokenizer is not None)
        pool.disagrees = True
        assert await a_minute() == await a_minute() == old
        pool.disagrees, pool.hash = False, new
        await a_minute()
        await until(lambda: known.tokenizer is not None and known.tokenizer.hash == new)
        assert pool.fetched == 2


async def test_tokenizers_that_take_long_to_load_are_loaded_rarely() -> None:
    rogue = Rogue()
    rogue.gives = CheckedBundle(BUNDLE.hash, 2.0, BUNDLE)
    async with Keeping(rogue).running() as keeping:
        await until(lambda: keeping.known.tokenizer is not None)
        await keeping.answers(rogue, 1199)
        assert rogue.fetched == 1
        await keeping.answers(rogue, 120)
        assert rogue.fetched == 2


async def test_a_rogue_models_tokenizer_leaves_another_models_a_place() -> None:
    rogue = Rogue()
    rogue.gate.clear()
    async with Keeping(rogue, models=5).running():
        for _ in range(20):
            await asyncio.sleep(0)
        assert rogue.at_once_max == FETCHES_MAX


# -- the room, and estimates ----------------------------------------------------------------------


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
    profile = await profile_of(engine(models=(NAMED, listed)))
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

"""Tenants share no cached prefixes at engines of other makes, or see nothing of them."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from gateway.config.edge import HopConfig
from gateway.relay.foreign import FIGURE_LEN_MAX, BlankingScanner, Blanks
from gateway.request.salts import salt_of, salts_secret
from gateway.workers.channel import WorkerStart
from shared.process.setting_values import ConfigError
from shared.wire import sse
from shared.wire.ids import IGNORED_FIELDS_HEADER, TENANT_HEADER
from tests.gateway.conftest import OTHER_KEY, House, Open, until
from tests.gateway.fake_engine import HEADERS, Script, chunk, unary

OTHER: Final = {"authorization": f"Bearer {OTHER_KEY}"}


async def salt(house: House, **fields: Any) -> tuple[str | None, str]:
    """The salt that the engine was sent, and the fields that the answer says were ignored."""
    house.engine.script = unary()
    async with house.chat(**fields) as answer:
        assert answer.status == 200
        return house.engine.seen[-1].body.get("cache_salt"), answer.headers.get(IGNORED_FIELDS_HEADER, "")


@pytest.mark.parametrize(
    ("owner", "model"), [("vllm", {}), ("sglang", {}), ("other", {"cache_salt": "send"})]
)
async def test_each_tenant_has_a_salt_of_its_own(open_house: Open, owner: str, model: dict[str, Any]) -> None:
    house = await open_house(bundle=None, owned_by=owner, model=model)
    told = [
        await salt(house, **more, **given)
        for more in ({}, {"headers": OTHER})
        for given in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "acme"})
    ]
    assert {ignored for _, ignored in told} == {""}
    salts = [salt for salt, _ in told]
    assert salts[0::5] == salts[1::5]
    assert salts[2::5] == salts[3::5]
    assert len(set(salts)) == 6
    assert all(salt is not None and len(salt) == 43 for salt in salts)


@pytest.mark.parametrize(
    ("owner", "model"),
    [
        ("llamacpp", {}),
        ("llamacpp", {"pass_fields": ["cache_salt"]}),
        (None, {}),
        ("vllm", {"cache_salt": "never"}),
    ],
)
async def test_an_engine_that_takes_no_salt_is_sent_none_and_its_model_is_named(
    open_house: Open, owner: str | None, model: dict[str, Any]
) -> None:
    house = await open_house(bundle=None, owned_by=owner, model=model)
    assert await salt(house, cache_salt="mine") == (None, "cache_salt")
    await until(lambda: "prefixes.shared" in house.log.getvalue())
    lines = [msgspec.json.decode(line) for line in house.log.getvalue().splitlines()]
    [line] = [line for line in lines if line["event"] == "prefixes.shared"]
    assert (line["model"], line["owned_by"]) == ("tiny", owner)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("salted", ["auto", "never"])
async def test_an_engine_of_ours_that_is_told_no_tenant_is_one_of_another_make(
    open_house: Open, salted: str, streams: bool
) -> None:
    house = await open_house(owned_by="penstock", model={"engine": "openai", "cache_salt": salted})
    house.engine.script = answer_of("x", streams=streams)
    options = {"stream_options": {"include_usage": True}} if streams else {}
    async with house.chat(stream=streams, **options) as answer:
        body = await answer.read()
    shown = SHOWN if salted == "never" else LATEST
    last = read(body)[-1] if streams else msgspec.json.decode(body)
    assert (last["usage"], last["timings"]) == (shown["usage"], shown["timings"])
    assert ("cache_salt" in house.engine.seen[-1].body) == (salted == "auto")
    assert TENANT_HEADER not in house.engine.seen[-1].headers


async def test_an_engine_of_ours_is_sent_the_callers_salt_beside_its_tenant(house: House) -> None:
    assert await salt(house, cache_salt="mine") == ("mine", "")
    assert await salt(house) == (None, "")


def test_salts_are_the_same_wherever_the_secret_is() -> None:
    config = HopConfig(salt="env:SALT")
    secret = salts_secret(config, {"SALT": "of the fleet".replace(" ", "-")}, "own")
    assert salt_of(secret, "acme", None) == salt_of(b"of-the-fleet", "acme", None)
    assert salt_of(salts_secret(HopConfig(), {}, "own"), "acme", None) == salt_of(b"own", "acme", None)
    assert salt_of(b"own", "acme", None) != salt_of(secret, "acme", None)


def test_a_secret_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="hop: the environment variable SALT is not set"):
        salts_secret(HopConfig(salt="env:SALT"), {}, "own")


def test_a_worker_is_told_the_secret_and_does_not_show_it() -> None:
    start = WorkerStart("", 0, 1, "s", (), "the-secret")
    assert msgspec.json.decode(msgspec.json.encode(start), type=WorkerStart).salts == "the-secret"
    assert "secret" not in repr(start)


# -- what an answer shows of it -------------------------------------------------------------------

TIMINGS: Final = {
    "cache_n": 217,
    "prompt_n": 1,
    "prompt_ms": 20.5,
    "prompt_per_second": 4.9e1,
    "predicted_n": 4,
}
USAGE: Final = {
    "prompt_tokens": 218,
    "completion_tokens": 4,
    "total_tokens": 222,
    "prompt_tokens_details": {"cached_tokens": 217, "audio_tokens": 3},
    "prompt_cache_hit_tokens": 217,
    "prompt_cache_miss_tokens": 1,
    "cache_read_input_tokens": 217,
}
SAID: Final = 'It says "cached_tokens": 217, and "prompt_n": 1.'
"""Text is as it is."""
LATEST: Final = {"choices": [], "usage": USAGE, "timings": TIMINGS}
SHOWN: Final = {
    "choices": [],
    "usage": {
        **dict.fromkeys(USAGE, 0),
        **{name: USAGE[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 3},
    },
    "timings": {**dict.fromkeys(TIMINGS, 0), "predicted_n": 4},
}
EVENTS: Final = [chunk("a"), chunk(SAID), sse.event(msgspec.json.encode(LATEST)), sse.DONE]
LONG: Final = {
    "choices": [{"index": 0, "delta": {"content": "x" * 3 * sse.EVENT_LEN_MAX}}],
    **LATEST,
    "choices_": [],
}


def read(stream: bytes) -> list[Any]:
    """What is in the events but for the last."""
    *events, done, end = stream.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 100_000])
def test_figures_of_what_was_cached_are_blanked_however_the_bytes_come(size: int) -> None:
    data = b"".join(EVENTS)
    scanner = BlankingScanner()
    passed = b"".join(
        piece if scanner.takes(piece) else scanner.feed(piece)
        for piece in (data[at : at + size] for at in range(0, len(data), size))
    )
    passed += scanner.finish()
    assert len(passed) == len(data)
    assert read(passed) == [*read(b"".join([*EVENTS[:2], sse.DONE])), SHOWN]
    assert scanner.usage is not None
    assert scanner.usage.cached_tokens == 217, "the books have the true number"


@pytest.mark.parametrize("size", [997, 1009, 65_521, 65_537, 10**6])
def test_figures_in_an_event_that_is_too_long_to_be_withheld_are_blanked_too(size: int) -> None:
    event = sse.event(msgspec.json.encode(LONG))
    for ahead in range(0, FIGURE_LEN_MAX, 17):
        data = chunk("y" * ahead) + event + sse.DONE
        scanner = BlankingScanner()
        passed = b"".join(scanner.feed(data[at : at + size]) for at in range(0, len(data), size))
        passed += scanner.finish()
        assert len(passed) == len(data)
        assert read(passed)[1] == {**LONG, **{name: SHOWN[name] for name in ("usage", "timings")}}


@pytest.mark.parametrize("size", [1, 3, 50, 191, 192, 193, 10_000])
def test_figures_in_a_body_are_blanked_wherever_it_is_cut(size: int) -> None:
    body = b"[" + b",".join([msgspec.json.encode(LATEST), msgspec.json.encode(SAID)] * 3) + b"]"
    blanks = Blanks()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    passed = b""
    for piece in pieces:
        passed += blanks.feed(piece)
        assert len(blanks._back) <= 2 * FIGURE_LEN_MAX, "the end, and a figure that begins before it"
    passed += blanks.feed(b"", ended=True)
    assert len(passed) == len(body)
    assert msgspec.json.decode(passed) == [SHOWN, SAID] * 3


def answer_of(text: str, *, streams: bool) -> Script:
    if streams:
        return Script([chunk("a"), chunk(text), *EVENTS])
    said = {"role": "assistant", "content": text}
    body = {**LATEST, "choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}
    return Script([HEADERS, msgspec.json.encode(body)], 200, "application/json")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("length", [1, 400_000])
@pytest.mark.parametrize("owner", ["llamacpp", "vllm"])
async def test_a_tenant_does_not_see_what_another_had_cached(
    open_house: Open, owner: str, length: int, streams: bool
) -> None:
    """Nor is anything blanked where its own alone is cached."""
    house = await open_house(bundle=None, owned_by=owner)
    house.engine.script = answer_of("x" * length, streams=streams)
    options = {"stream_options": {"include_usage": True}} if streams else {}
    async with house.chat(stream=streams, headers=OTHER, **options) as answer:
        body = await answer.read()
    shown = SHOWN if owner == "llamacpp" else LATEST
    last = read(body)[-1] if streams else msgspec.json.decode(body)
    assert (last["usage"], last["timings"]) == (shown["usage"], shown["timings"])
    assert (await house.line())["cached_tokens"] == 217

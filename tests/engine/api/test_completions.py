"""Legacy completions: all forms of a prompt, echo, log-probabilities with offsets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from engine.api.answer.stop_strings import StopStrings
from engine.api.http import generate
from tests.engine.api.conftest import MODEL, Serve, Served
from tests.engine.api.tiny import EOS


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.http.post("/v1/completions", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    payload = {"model": MODEL, "stream": True, **body}
    async with served.http.stream("POST", "/v1/completions", json=payload) as response:
        assert response.status_code == 200
        return [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]


def lenient(served: Served) -> openai.AsyncOpenAI:
    """OpenAI's own streams say `"finish_reason": null` before the end, which the SDK's strict schema of
    completions does not allow."""
    return openai.AsyncOpenAI(base_url=served.sdk.base_url, api_key="none", max_retries=0)


async def test_by_the_sdk(served: Served) -> None:
    served.says(" jumps")
    answer = await served.sdk.completions.create(model=MODEL, prompt="the fox")
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" jumps", "stop")
    async with lenient(served) as sdk:
        chunks = [c async for c in await sdk.completions.create(model=MODEL, prompt="the fox", stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " jumps"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


async def test_usage_comes_last_in_a_stream(served: Served) -> None:
    served.says("dog")
    async with lenient(served) as sdk:
        answer = await sdk.completions.create(
            model=MODEL, prompt="the", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in answer]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(served.ids("dog")) + 1


async def test_every_form_of_a_prompt(served: Served) -> None:
    served.says("x")
    a, b = served.ids("the fox"), served.ids("my box")
    for prompt, expected in [
        ("the fox", [a]),
        (["the fox"], [a]),
        (["the fox", "my box"], [a, b]),
        (a, [a]),
        ([a, b], [a, b]),
    ]:
        before = len(served.core.added)
        answer = await complete(served, prompt=prompt)
        assert [add.prompt_ids for add in served.core.added[before:]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_several_choices_of_several_prompts_in_order(served: Served) -> None:
    served.core.script = lambda add: [*add.prompt_ids, *served.ids(EOS)]
    answer = await complete(served, prompt=["fox", "dog"], n=2, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["fox", "fox", "dog", "dog"]
    seeds = [add.sampling.seed for add in served.core.added]
    assert len(set(seeds)) == 4, "equal prompts are sampled independently"
    await complete(served, prompt="fox", n=2, seed=1)
    assert [add.sampling.seed for add in served.core.added][4:] == seeds[:2], "as if the first were alone"


async def test_what_finds_stop_strings_is_made_once_for_all_choices(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was once made for each of 256 choices: 0.3 s of the event loop."""
    made = list[Sequence[str]]()

    def make(stops: Sequence[str]) -> StopStrings:
        made.append(stops)
        return StopStrings(stops)

    monkeypatch.setattr(generate, "StopStrings", make)
    served.says("the fox jumps")
    answer = await complete(served, prompt=["fox", "dog"], n=8, stop=["jump", "zz"])
    assert [choice["text"] for choice in answer["choices"]] == ["the fox "] * 16
    assert made == [["jump", "zz"]]


@pytest.mark.parametrize("stop", ["<|user|>", ["zz", "<|user|>"]])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_that_is_a_special_token_ends_the_answer_there(
    served: Served, stop: str | list[str], streams: bool
) -> None:
    """Its text is in no answer, so it would never be found there."""
    script = [*served.ids("the fox"), *served.ids("<|user|>"), *served.ids(" jumps")]
    served.core.script = lambda _: list(script)
    body = {"prompt": "x", "max_tokens": len(script), "stop": stop, "return_token_ids": True}
    if streams:
        choices = [chunk["choices"][0] for chunk in await stream(served, **body)]
    else:
        answer = await complete(served, **body)
        choices = answer["choices"]
        assert answer["usage"]["completion_tokens"] == len(served.ids("the fox")) + 1
    assert "".join(choice["text"] for choice in choices) == "the fox"
    assert choices[-1]["finish_reason"] == "stop"
    sampling = served.core.added[0].sampling
    assert set(sampling.stop_token_ids) == {*served.ids("<|user|>"), *served.ids(EOS)}


async def test_ids_that_the_model_has_and_the_tokenizer_has_not(serve: Serve) -> None:
    """One that was generated can be sent back: everywhere the limit is the model's."""
    async with serve(core={"vocab_size": 400}) as served:
        served.core.script = lambda _: [399, *served.ids(" fox"), 399, *served.ids(EOS)]
        fields: dict[str, Any] = {"logit_bias": {"399": 1}, "stop_token_ids": [398], "return_token_ids": True}
        answer = await complete(served, prompt="x", **fields)
        (choice,) = answer["choices"]
        assert choice["text"] == " fox"
        told = choice["token_ids"]
        assert told.count(399) == 2
        for more in ({}, {"echo": True, "logprobs": 1}, {"stream": True}):
            body = {"model": MODEL, "prompt": [served.ids("x"), told], **more}
            assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        assert served.core.added[-1].prompt_ids == told
        text = await served.http.post("/detokenize", json={"model": MODEL, "tokens": told})
        assert text.json() == {"prompt": " fox" + EOS}
        beyond: list[dict[str, Any]] = [
            {"prompt": [400]},
            {"prompt": "x", "stop_token_ids": [400]},
            {"prompt": "x", "logit_bias": {"400": 1}},
        ]
        for body in beyond:
            refused = await served.http.post("/v1/completions", json={"model": MODEL, **body})
            assert refused.status_code == 400
            assert "which has 400 ids" in refused.text
        refused = await served.http.post("/detokenize", json={"model": MODEL, "tokens": [400]})
        assert (refused.status_code, "which has 400 ids" in refused.text) == (400, True)
        served.assert_nothing_leaks()


async def test_sixteen_tokens_by_default(served: Served) -> None:
    served.says("x")
    await complete(served, prompt="the")
    assert served.core.added[0].sampling.max_tokens == 16
    room = served.core.info.max_model_len - 250
    await complete(served, prompt=[5] * 250)
    assert served.core.added[1].sampling.max_tokens == room


@pytest.mark.parametrize("prompt", ["the fox", "日本 the"])
async def test_echo(served: Served, prompt: str) -> None:
    served.says(" jumps")
    answer = await complete(served, prompt=prompt, echo=True)
    assert answer["choices"][0]["text"] == prompt + " jumps"
    answer = await complete(served, prompt=served.ids(prompt), echo=True)
    assert answer["choices"][0]["text"] == prompt + " jumps"
    chunks = await stream(served, prompt=prompt, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt + " jumps"


@pytest.mark.parametrize("streams", [False, True])
async def test_echo_with_logprobs(served: Served, streams: bool) -> None:
    served.says(" dog")
    body = {"prompt": "the lazy", "echo": True, "logprobs": 2}
    if streams:
        parts = [chunk["choices"][0] for chunk in await stream(served, **body)]
    else:
        parts = (await complete(served, **body))["choices"]
    text = "".join(part["text"] for part in parts)
    columns: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "text_offset": [],
        "top_logprobs": [],
    }
    for part in parts:
        for name, column in columns.items():
            column += (part["logprobs"] or {}).get(name, [])
    ids = served.ids("the lazy") + served.ids(" dog")
    assert text == "the lazy dog"
    assert "".join(columns["tokens"]) == text
    assert columns["token_logprobs"] == [None, *(-0.25 - token / 1000 for token in ids[1:])]
    assert columns["top_logprobs"][0] is None
    assert all(len(top) >= 2 for top in columns["top_logprobs"][1:])
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


async def test_scoring_a_prompt_without_an_answer(served: Served) -> None:
    body = {"prompt": "the lazy dog", "echo": True, "logprobs": 0, "max_tokens": 0}
    for choice in (
        (await complete(served, **body))["choices"][0],
        *[c["choices"][0] for c in await stream(served, **body) if c["choices"][0]["text"]],
    ):
        assert choice["text"] == "the lazy dog"
        assert len(choice["logprobs"]["tokens"]) == len(served.ids("the lazy dog"))
    answer = await complete(served, **body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert served.core.added[0].sampling.max_tokens == 0


async def test_pieces_of_characters_are_spelt_out(served: Served) -> None:
    served.says("日")
    answer = await complete(served, prompt="the", logprobs=1)
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("bytes:\\x") for token in tokens)
    assert set(answer["choices"][0]["logprobs"]["text_offset"]) == {0}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("echoes", [False, True])
async def test_offsets_behind_characters_that_are_not_finished(
    served: Served, streams: bool, echoes: bool
) -> None:
    """The U+FFFD of such a character stands in the text before the token with which it comes."""
    begun, brown = served.ids("日")[:1], served.ids("🌊")[:2]
    ids = [*begun, *served.ids("the"), *brown, *served.ids("é"), *begun, *brown, *served.ids(" fox")]
    text = "\ufffdthe\ufffdé\ufffd\ufffd fox"
    served.core.script = lambda _: [*ids, *served.ids(EOS)]
    body = {"prompt": ids, "logprobs": 0, "echo": echoes}
    if streams:
        parts = [chunk["choices"][0] for chunk in await stream(served, **body)]
    else:
        parts = (await complete(served, **body))["choices"]
    assert "".join(part["text"] for part in parts) == text * (1 + echoes)
    columns = [part["logprobs"] for part in parts if part["logprobs"]]
    offsets = [offset for column in columns for offset in column["text_offset"]]
    tokens = [token for column in columns for token in column["tokens"]]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids) * (1 + echoes)
    for token, offset in zip(tokens, offsets, strict=True):
        own = "" if token.startswith("bytes:") else token
        assert (text * 2)[offset:].startswith(own)
    begins = [at for at, token_id in enumerate(ids) if token_id in begun + brown]
    assert [text[offsets[at]] for at in begins] == ["\ufffd"] * len(begins)


async def test_token_ids(served: Served) -> None:
    served.says("fox")
    answer = await complete(served, prompt=["the", "my"], return_token_ids=True)
    for choice, prompt in zip(answer["choices"], ("the", "my"), strict=True):
        assert choice["prompt_token_ids"] == served.ids(prompt)
        assert choice["token_ids"] == served.ids("fox") + served.ids(EOS)
    chunks = await stream(served, prompt="the", return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == served.ids("the")
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == served.ids("fox") + served.ids(EOS)


async def test_spacing_continues_the_prompt(served: Served) -> None:
    served.says(" dog")
    answer = await complete(served, prompt="the lazy")
    assert answer["choices"][0]["text"] == " dog"

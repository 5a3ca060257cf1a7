"""Chat completions, seen by the official SDK with its strict validation on."""

from __future__ import annotations

import json

from openai.types.chat import ChatCompletionMessageParam

from shared.wire import sse
from tests.engine.api.conftest import MODEL, Served
from tests.engine.api.tiny import EOS

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def test_a_whole_answer(served: Served) -> None:
    served.says("the lazy dog")
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    [choice] = answer.choices
    assert choice.message.content == "the lazy dog"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.core.added[0].prompt_ids)
    assert answer.usage.completion_tokens == len(served.ids("the lazy dog")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_stream(served: Served) -> None:
    served.says("pack my box")
    stream = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "pack my box"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("stop") == 1
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1


async def test_a_stream_in_bytes(served: Served) -> None:
    """What the SDK does not show: separators, the end marker, and the closing comment behind it."""
    served.says("hello world")
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        data = await response.aread()
    *events, done, closing, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in events)
    chunks = [json.loads(event[6:]) for event in events]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    report = sse.parse_closing(closing.removeprefix(b": penstock "))
    assert report is not None
    assert report.end_reason == "ok"
    assert (
        chunks[-1]["usage"]["completion_tokens"]
        == report.completion_tokens
        == len(served.ids("hello world")) + 1
    )
    assert chunks[-1]["usage"]["prompt_tokens"] == report.prompt_tokens
    assert (report.queue_ms, report.prefill_ms, report.decode_ms) == (1.0, 2.0, 3.0)


async def test_headers_leave_before_the_core_has_begun(served: Served) -> None:
    served.core.admits = False
    served.says("hello")
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert served.core.running == {}
        served.core.admits = True
        served.core.release()
        assert (await response.aread()).endswith(b"}\n\n")


async def test_several_choices(served: Served) -> None:
    texts = ["the fox", "my liquor box", "dog"]
    served.core.script = lambda add: served.ids(texts[add.handle - 1]) + served.ids(EOS)
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == texts
    seeds = [add.sampling.seed for add in served.core.added]
    assert len(set(seeds)) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.core.added[0].prompt_ids)
    served.core.script = lambda add: served.ids(texts[add.handle - 4]) + served.ids(EOS)
    stream = await served.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=7, stream=True
    )
    seen: dict[int, str] = {0: "", 1: "", 2: ""}
    ends: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in ends
            seen[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert list(seen.values()) == texts
    assert sorted(ends) == [0, 1, 2]
    assert [add.sampling.seed for add in served.core.added[3:]] == seeds


async def test_seeds_are_minted_when_absent(served: Served) -> None:
    served.says("")
    for _ in range(2):
        await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    first, second = served.core.added
    assert first.sampling.seed != second.sampling.seed


async def test_logprobs(served: Served) -> None:
    served.says("the 日")
    create = served.sdk.chat.completions.create
    whole = await create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    stream = await create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True)
    chunks = [chunk async for chunk in stream]
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    streamed = [entry for part in parts if part is not None for entry in part.content or []]
    for entries in (whole.choices[0].logprobs.content or [], streamed):
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == "the 日"
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        ids = served.ids("the 日")
        assert [entry.logprob for entry in entries] == [-0.25 - token / 1000 for token in ids]


async def test_token_ids(served: Served) -> None:
    served.says("lazy dog")
    body = {"model": MODEL, "messages": MESSAGES, "return_token_ids": True}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_token_ids"] == served.core.added[0].prompt_ids
    assert answer["choices"][0]["token_ids"] == served.ids("lazy dog") + served.ids(EOS)
    async with served.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        chunks = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == served.core.added[1].prompt_ids
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == served.ids("lazy dog") + served.ids(EOS)


async def test_a_stop_string_ends_the_core_at_once(served: Served) -> None:
    served.says("the quick brown fox jumps", ends=False)
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["own f", "zzz"])
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("the quick br", "stop")
    assert served.core.aborted == [1]


async def test_tokens_behind_a_stop_string_are_not_reported(served: Served) -> None:
    served.says("the quick brown fox", ends=False)
    body = {"model": MODEL, "messages": MESSAGES, "stop": " qu", "return_token_ids": True, "logprobs": True}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "the"
    assert served.tokenizer.decode(choice["token_ids"]) == "the"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "the"


async def test_length(served: Served) -> None:
    served.says("pack my box with")
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    limits = served.core.info
    served.says("x")
    await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    added = served.core.added[-1]
    assert added.sampling.max_tokens == limits.max_model_len - len(added.prompt_ids)


async def test_a_character_that_is_cut_off_is_dropped(served: Served) -> None:
    served.says("dog 日")
    count = len(served.ids("dog 日")) - 1
    answer = await served.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=count)
    assert answer.choices[0].message.content == "dog "


async def test_ids_of_the_gateway_are_used_when_they_are_ours(served: Served) -> None:
    served.says("x")
    hash_, ids = served.tokenizer.hash, [7, 8, 9]
    cases: list[tuple[dict[str, object], bool]] = [
        ({"tokenizer": hash_, "prompt_ids": [ids]}, True),
        ({"tokenizer": "sha256:other", "prompt_ids": [ids]}, False),
        ({"tokenizer": hash_, "prompt_ids": [ids, ids]}, False),
        ({"tokenizer": hash_, "prompt_ids": [[7, 100_000]]}, False),
        ({"tokenizer": hash_, "prompt_ids": [[-1]]}, False),
        ({"tokenizer": hash_, "prompt_ids": [[]]}, False),
    ]
    for extension, is_used in cases:
        body = {"model": MODEL, "messages": MESSAGES, "penstock": extension}
        response = await served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        assert (served.core.added[-1].prompt_ids == ids) is is_used
        assert response.headers["x-penstock-tokenizer"] == hash_


async def test_salts(served: Served) -> None:
    served.says("x")

    async def salt(tenant: str | None, own: str | None) -> bytes:
        body = {"model": MODEL, "messages": MESSAGES} | ({"cache_salt": own} if own else {})
        headers = {"x-penstock-tenant": tenant} if tenant else {}
        assert (await served.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        return served.core.added[-1].cache_salt

    assert await salt(None, None) == b""
    assert await salt("acme", None) == await salt("acme", None)
    others = [
        await salt("acme", None),
        await salt("globex", None),
        await salt("acme", "s"),
        await salt(None, "s"),
    ]
    assert len(set(others)) == 4


async def test_unknown_fields_are_named(served: Served) -> None:
    served.says("x")
    body = {"model": MODEL, "messages": MESSAGES, "temprature": 1}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.headers["x-penstock-ignored-fields"] == "temprature"


async def test_the_closing_report_of_a_whole_answer(served: Served) -> None:
    served.says("hello")
    response = await served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
    report = sse.parse_closing(response.headers["x-penstock-closing"])
    assert report is not None
    assert report.completion_tokens == response.json()["usage"]["completion_tokens"]
    names = {part.split(";")[0] for part in response.headers["server-timing"].split(", ")}
    assert {"body", "validate", "tokenize", "queue", "prefill", "decode"} <= names


async def test_sampling_reaches_the_core(served: Served) -> None:
    served.says("x")
    body = {
        "model": MODEL, "messages": MESSAGES, "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.2, "logit_bias": {"5": 3},
        "stop_token_ids": [9], "min_tokens": 2, "max_tokens": 4, "seed": -1,
    }  # fmt: skip
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    sampling = served.core.added[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1.0,
        -1.0,
        1.2,
    )
    assert list(sampling.logit_bias) == [(5, 3.0)]
    assert set(sampling.stop_token_ids) == {9, *served.ids(EOS)}
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 4)
    await served.http.post(
        "/v1/chat/completions", json={**body, "ignore_eos": True, "stop_token_ids": [], "max_tokens": 2}
    )
    assert served.core.added[1].sampling.stop_token_ids == ()

"""Chat completions, seen by the official SDK with its strict validation on."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.engine.api.conftest import MODEL, Served

MESSAGES = [{"role": "user", "content": "hello"}]


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

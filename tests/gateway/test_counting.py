"""Where prompts are counted: short ones in place, all others on threads, by all that a template may print."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from gateway.admission.tokens import INLINE_LEN_MAX, Count, count_tokens, estimate_slices
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.messages import ChatMessage, TextPart
from shared.fairness.fair_threads import FairThreads, at_once
from shared.text.tokenizer import Tokenizer
from tests.gateway.fake_engine import byte_bundle

TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
)
LONG: Final = "7" * (INLINE_LEN_MAX + 1)


class CountingThreads(FairThreads):
    """It counts the jobs that it is given."""

    jobs = 0

    async def run(self, tenant: str, slices: Any, **options: Any) -> Any:
        self.jobs += 1
        return await super().run(tenant, slices, **options)


async def counted(message: ChatMessage) -> tuple[Count, int]:
    """The count, and the number of jobs on threads that it took."""
    threads = CountingThreads(1)
    tokenizer = Tokenizer(msgspec.structs.replace(byte_bundle(), chat_template=TEMPLATE))
    request = ChatRequest(model="tiny", messages=[ChatMessage("user", "hi"), message])
    return await count_tokens(request, tokenizer, None, threads, "acme"), threads.jobs


async def test_a_short_chat_is_counted_in_place() -> None:
    message = ChatMessage("assistant", "7" * 400, name="n" * 300, reasoning_content="r" * 300)
    assert (await counted(message))[1] == 0


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("assistant", LONG),
        ChatMessage("assistant", [TextPart(LONG)]),
        ChatMessage("assistant", "", reasoning_content=LONG),
        ChatMessage("user", "", name=LONG),
    ],
    ids=["content", "parts", "reasoning", "name"],
)
async def test_whatever_is_long_is_counted_on_threads(message: ChatMessage) -> None:
    count, jobs = await counted(message)
    assert jobs == 1
    assert count.prompt_tokens > len(LONG)
    guess = at_once(estimate_slices(ChatRequest(model="tiny", messages=[message]), {}, 0))
    assert guess.prompt_tokens >= len(LONG), "an estimate counts it, too"


async def test_ids_that_only_the_model_has_are_left_to_the_engine() -> None:
    """A model may have more tokens than its tokenizer, which is all that a gateway knows of it."""
    tokenizer = Tokenizer(byte_bundle())
    request = CompletionRequest(model="tiny", prompt=[0, tokenizer.vocab_size])
    count = await count_tokens(request, tokenizer, None, FairThreads(1), "acme")
    assert count.prompt_tokens == 2

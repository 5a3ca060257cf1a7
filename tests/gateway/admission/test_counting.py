"""Where prompts are counted: short ones in place, all others on threads, by all that a template may print."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import pytest

from gateway.admission.tokens import (
    ESTIMATE_TOOLS_TOKENS,
    INLINE_LEN_MAX,
    QUOTA_SHARE_MAX,
    TokenCount,
    count_tokens,
    estimate_slices,
    span,
)
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage, FunctionCall, FunctionToolCall, TextPart
from shared.apis.completions import CompletionRequest
from shared.apis.tools import FunctionSpec, FunctionTool
from shared.fairness.fair_threads import FairThreads, at_once
from shared.text.tokenizer import Tokenizer
from shared.wire.errors import ContextLengthExceeded
from shared.wire.room import Room
from shared.wire.shapes import TOOLS_MAX
from tests.gateway.fake_engine import byte_bundle

TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
)
TOOL_TEMPLATE: Final = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ a }}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
LONG: Final = "7" * (INLINE_LEN_MAX + 1)


class CountingThreads(FairThreads):
    """It counts the jobs that it is given."""

    jobs = 0

    async def run(self, tenant: str, slices: Any, **options: Any) -> Any:
        self.jobs += 1
        return await super().run(tenant, slices, **options)


def tool_tokenizer() -> Tokenizer:
    return Tokenizer(
        msgspec.structs.replace(byte_bundle(), chat_template=TOOL_TEMPLATE, template_arguments=("a",))
    )


async def counted(message: ChatMessage) -> tuple[TokenCount, int]:
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


TOOL: Final = FunctionTool(FunctionSpec("f", "d", msgspec.Raw(b'{"type":"object"}')))
CALL: Final = FunctionToolCall("1", FunctionCall("f", '{"a": 1}'))
BESIDE: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "tools": (b'"description": "d"', {"tools": [TOOL]}),
    "variables": (b"1234", {"chat_template_kwargs": {"a": "1234"}}),
    "calls": (b'f({"a": 1})', {"messages": [ChatMessage("assistant", tool_calls=[CALL])]}),
    "continued": (b"hi", {"messages": [ChatMessage("assistant", "hi")], "continue_final_message": True}),
}


@pytest.mark.parametrize(("part", "fields"), BESIDE.values(), ids=BESIDE)
async def test_what_stands_beside_plain_messages_is_counted_on_threads_however_short(
    part: bytes, fields: dict[str, Any]
) -> None:
    threads = CountingThreads(1)
    tokenizer = tool_tokenizer()
    request = ChatRequest(**{"model": "tiny", "messages": [ChatMessage("user", "hi")], **fields})
    count = await count_tokens(request, tokenizer, None, threads, "acme")
    assert threads.jobs == 1
    assert count.extension is not None
    printed = bytes(tokenizer.decode(count.extension.prompt_ids[0], skip_special_tokens=False), "utf-8")
    assert len(printed) == count.prompt_tokens, "each byte that is printed is counted"
    assert part in printed


async def test_many_tools_hold_up_nobody() -> None:
    """They are rendered and counted on the threads that tenants share; a neighbour's short chat is counted in
    place before their first slice has ended."""
    spec = FunctionSpec(
        "f", "x" * 200, msgspec.Raw(b'{"type":"object","properties":{"a":{"type":"string"}}}')
    )
    crowd = ChatRequest(
        model="tiny", messages=[ChatMessage("user", "hi")], tools=[FunctionTool(spec)] * TOOLS_MAX
    )
    tokenizer, threads = tool_tokenizer(), FairThreads(1)
    counting = asyncio.ensure_future(count_tokens(crowd, tokenizer, None, threads, "crowd"))
    await asyncio.sleep(0)
    small = ChatRequest(model="tiny", messages=[ChatMessage("user", "hi")])
    count = await count_tokens(small, tokenizer, None, threads, "victim")
    assert (count.prompt_tokens, counting.done()) == (len("user:hi"), False)
    assert (await counting).prompt_tokens > 200 * TOOLS_MAX
    with pytest.raises(ContextLengthExceeded):
        await count_tokens(crowd, tokenizer, Room(1000), threads, "crowd")


async def test_an_estimate_counts_tools_and_what_templates_say_about_them() -> None:
    request = ChatRequest(model="tiny", messages=[ChatMessage("user", "hi")], tools=[TOOL])
    fields = {"messages": msgspec.Raw(b"[]"), "tools": msgspec.Raw(msgspec.json.encode(request.tools))}
    plain = msgspec.structs.replace(request, tools=None)
    guess, without = (at_once(estimate_slices(one, fields, 0)) for one in (request, plain))
    assert guess.prompt_tokens - without.prompt_tokens == ESTIMATE_TOOLS_TOKENS
    assert guess.bound >= len(fields["tools"]) + ESTIMATE_TOOLS_TOKENS


async def test_ids_that_only_the_model_has_are_left_to_the_engine() -> None:
    """A model may have more tokens than its tokenizer, which is all that a gateway knows of it."""
    tokenizer = Tokenizer(byte_bundle())
    request = CompletionRequest(model="tiny", prompt=[0, tokenizer.vocab_size])
    count = await count_tokens(request, tokenizer, None, FairThreads(1), "acme")
    assert count.prompt_tokens == 2


@pytest.mark.parametrize("choices", [1, 4])
def test_of_a_small_limit_a_share_is_enough_for_all_choices_together(choices: int) -> None:
    request = ChatRequest(model="tiny", messages=[ChatMessage("user", "hi")], n=choices)
    asked = span(request, TokenCount(10, 10, 1, None, 10), None, 10_000, 400, is_budgeted=False)
    assert asked.least == 10 + 400 // QUOTA_SHARE_MAX

"""Where a request's prompt may be cached, read off the request itself.

A chat's prefix is its tools, which templates write first, and the system messages that it begins with. Its
conversation is told by the first message after them, which all its turns have in common. Its history ends
with the last message of the assistant: so much had been computed when that answer was complete. A
completion's prompt has no parts; those that begin with the same `BEGINNING_LEN` characters are taken for one
conversation.

Where the caller names a session (`gateway.routing.sessions`), its conversations are those with the same first
message, whatever their tools and system messages: sessions that begin alike, with the same instructions, say,
are told apart, and a conversation whose tools change stays where its history is. They have homes of their
own, as sub-agents and titles share no prefix with what they serve. One home for all of a session would be
that of all of an application's conversations where it gives them one key: in the simulation
(`python -m tests.bench routing`) that is as bad as no affinity at all.

Lengths in tokens are estimated by the characters' share of the prompt, which was counted as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final, Literal

import msgspec

from gateway.config.whole import Tier
from gateway.routing.maglev import key_of
from gateway.routing.policy import Affinity
from shared.apis.chat_messages import ChatMessage
from shared.apis.generation import GenerationRequest
from shared.apis.prompt import BranchedPrompt, ChatPrompt, Prompt
from shared.apis.tools import Tool
from shared.wire.ids import SessionId
from shared.wire.load_report import DEFAULT, FLEX, PRIORITY

TIER_NAMES: Final[tuple[Literal["flex", "priority"] | None, ...]] = ("flex", None, "priority")
"""The service classes by their numbers, in words; None for the default."""
_CLASSES: Final[dict[str | None, int]] = {"flex": FLEX, "default": DEFAULT, "priority": PRIORITY}

BEGINNING_LEN: Final = 1024
"""Characters, about 256 tokens, or as many token ids."""
TEXT_LEN_MAX: Final = 16 * 1024
"""The most characters that take part in a key, however many messages they are in: hashing holds up the
loop."""


def affinity_of(
    request: GenerationRequest | None,
    model: str,
    tenant: str,
    prompt_len: int,
    turn: int,
    named: SessionId | None = None,
    tier_max: Tier = "priority",
) -> Affinity:
    """The affinity of a request for `model`. `prompt_len` is in tokens. Requests that generate nothing, None
    here, go round by `turn`. `named` is the session that the caller names. `tier_max` is the highest service
    tier that the tenant may have."""
    owner = key_of(model.encode(), tenant.encode())
    if request is None:
        return Affinity(owner, key_of(turn.to_bytes(8)), 0, 0, 0, tenant=tenant)
    service_class, prompt = class_of(request, tier_max), request.prompt_form
    if isinstance(prompt, ChatPrompt):
        return _of_chat(prompt, named, owner, tenant, prompt_len, service_class)
    begins = prompt.beginning if isinstance(prompt, BranchedPrompt) else prompt.prompt
    session = _session(owner, named, _beginning(begins).encode())
    return Affinity(owner, session, 0, 0, prompt_len, service_class, tenant)


def _session(base: int, named: SessionId | None, *opening: bytes) -> int:
    """The key of a conversation of the session that is named, or of `base` where none is."""
    return key_of(base.to_bytes(8) if named is None else named.encode(), *opening)


def class_of(request: GenerationRequest, tier_max: Tier) -> int:
    """The service class that an engine of ours gives the request."""
    asked, priority = DEFAULT, request.priority or 0
    if request.service_tier in _CLASSES:
        asked = _CLASSES[request.service_tier]
    elif request.service_tier in (None, "auto") and priority:
        asked = PRIORITY if priority < 0 else FLEX
    return min(asked, _CLASSES[tier_max])


def _of_chat(
    prompt: ChatPrompt,
    named: SessionId | None,
    owner: int,
    tenant: str,
    prompt_len: int,
    service_class: int,
) -> Affinity:
    """`owner`: the key of its model and tenant."""
    messages = prompt.messages
    roles = [message.role for message in messages]
    system = sum(1 for _ in takewhile(lambda role: role in ("system", "developer"), roles))
    answered = max((at for at, role in enumerate(roles, 1) if role == "assistant"), default=system)
    lengths = [_length(message) for message in messages]
    tools_len, told = _tools(prompt.tools) if prompt.tools else (0, ())
    whole = max(1, tools_len + sum(lengths))
    prefix = key_of(owner.to_bytes(8), *told, *_texts(messages[:system]))
    return Affinity(
        prefix,
        _session(prefix, named, *_texts(messages[system : system + 1])),
        prompt_len * (tools_len + sum(lengths[:system])) // whole,
        prompt_len * (tools_len + sum(lengths[: max(system, answered)])) // whole,
        prompt_len,
        service_class,
        tenant,
    )


def _tools(tools: Sequence[Tool]) -> tuple[int, list[bytes]]:
    """The characters of tools, and their texts as far as they take part in a key."""
    length, texts, room = 0, list[bytes](), TEXT_LEN_MAX
    for tool in tools:
        text = msgspec.json.encode(tool)
        length += len(text)
        if room > 0:
            texts.append(text[:room])
            room -= len(text)
    return length, texts


def _length(message: ChatMessage) -> int:
    """The characters of its text, and of the calls in it."""
    if isinstance(message.content, str) and message.tool_calls is None:
        return len(message.content)
    return sum(map(len, message.texts))


def _texts(messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """The messages' texts, as far as they take part in a key."""
    room = TEXT_LEN_MAX
    for message in messages:
        if room <= 0:
            return
        text = message.text[:room]
        room -= len(text) + 1  # empty messages are bounded, too
        yield text.encode()


def _beginning(prompt: Prompt) -> str:
    """The beginning of the first prompt, or of its ids."""
    first = prompt if isinstance(prompt, str) else prompt[0] if prompt else ""
    if isinstance(first, str):
        return first[:BEGINNING_LEN]
    ids = prompt if isinstance(first, int) else first
    return ",".join(map(str, ids[:BEGINNING_LEN]))

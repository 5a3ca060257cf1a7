"""Others who are asked what an operator asks: a gateway's workers by their supervisor, and gateways by each
other.

All are asked at once, and one that does not answer in time, or with too much, holds up nobody longer and is
named in the answer (`gateway.operators.together`). Whose answer has not changed is asked for it again where
others' have, or are missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.operators.operations import Merge
from gateway.operators.together import Of, OperatorAnswer, is_same, together
from gateway.operators.versions import ETAG, KNOWN

Ask = Callable[[bool], Awaitable[OperatorAnswer | None]]
"""Asks one of them, and returns its answer; None where it has none. With True it is to answer whatever is
known of it already."""


async def ask_each(asks: Mapping[Of, Ask], *, anew: bool = False) -> dict[Of, OperatorAnswer]:
    """The answers of those that have one."""
    told = await asyncio.gather(*(ask(anew) for ask in asks.values()))
    return {of: answer for of, answer in zip(asks, told, strict=True) if answer is not None}


async def whole_of(
    asks: Mapping[Of, Ask],
    answers: Mapping[Of, OperatorAnswer],
    merges: Mapping[str, Merge],
    limit: int,
    known: str,
) -> OperatorAnswer | None:
    """The answer of all who are asked, made of `answers`. None where there is none. `known` is the version
    that whoever asks has."""
    again = {of for of, answer in answers.items() if is_same(answer)}
    if again and len(again) < len(asks):
        kept = {of: one for of, one in answers.items() if of not in again}
        late = await ask_each({of: asks[of] for of in again}, anew=True)
        answers = {of: one for of in asks if (one := (kept | late).get(of)) is not None}
    if not answers:
        return None
    silent = [of for of in asks if of not in answers]
    whole = together(answers, silent, merges, limit)
    return OperatorAnswer(whole.status, {ETAG: known}, b"") if is_same(whole) else whole


async def read_answer(
    session: aiohttp.ClientSession, method: str, url: str, len_max: int, **options: Any
) -> OperatorAnswer:
    """Send a request, as it was sent, and read its answer. Raises ValueError for one that is too long, and
    what aiohttp raises."""
    async with session.request(method, URL(url, encoded=True), allow_redirects=False, **options) as answer:
        read = bytearray()
        async for piece in answer.content.iter_any():
            read += piece
            if len(read) > len_max:
                raise ValueError(f"its answer has more than {len_max} bytes")
        return OperatorAnswer(answer.status, dict(answer.headers), bytes(read))


def without_known(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers of a request that is to be answered whatever is known already."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() != KNOWN)

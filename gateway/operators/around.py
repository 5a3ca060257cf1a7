"""What other requests tell of one: whose work was before it in an engine's queue or took its place there, and
the tries of its caller's SDK before it.

Rules:

1. It is for operators alone: it names other tenants and their requests.
2. It looks at what this gateway has, and where that may matter at what others have
   (`gateway.operators.elsewhere`). Of a live request it tells what this one has alone: it is asked for every
   second.
3. It is bounded: of what is kept `LOOKED_MAX` requests are looked at, and others have their turn in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from shared.trace.request_records import RequestRecord, RequestSummary
from shared.trace.sentences import count, duration
from shared.trace.why import BEFORE, PREEMPTED, QUEUE, Why, reasons

LOOKED_MAX: Final = 4096
"""Requests that are looked at."""
AT_ONCE: Final = 200
"""Those that are before others have their turn."""
AHEAD_MAX: Final = 3
"""Requests that are named as having been before it, or in its place."""
TRIES_MAX: Final = 16
"""Tries that are looked for."""
PAUSE_MAX: Final = timedelta(minutes=10)
"""The longest pause between two tries of an SDK."""
ERROR: Final = 400


async def looked_at(kept: Iterator[RequestSummary], since: datetime) -> list[RequestSummary]:
    """The completed requests that ended later than this, of those that are kept, the newest first."""
    found: list[RequestSummary] = []
    for one in kept:
        if one.began_at + lasted(one) < since or len(found) == LOOKED_MAX:
            break
        found.append(one)
        if len(found) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


def told(record: RequestRecord, others: Sequence[RequestSummary]) -> RequestRecord:
    """The record, with what the others tell in its causes."""
    if record.line is None:
        return record
    found = [_with_ahead(one, record, others) for one in reasons(record.line)]
    if tries := earlier_tries(record.summary, others):
        found = [one for one in found if one.part != BEFORE]
        found.append(_before(record.summary, tries))
    found.sort(key=lambda one: -one.ms)
    return msgspec.structs.replace(record, causes=tuple(one.text for one in found))


def ask_elsewhere(records: Iterable[RequestRecord]) -> bool:
    """True if what others have may tell more: of a wait for an engine's others, or of tries before."""
    lines = [record.line for record in records if record.line is not None]
    return any(line.retry or any(one.part in _OF_OTHERS for one in reasons(line)) for line in lines)


def lasted(one: RequestSummary) -> timedelta:
    """How long a request took."""
    return timedelta(milliseconds=one.total_ms)


def since_of(record: RequestRecord) -> datetime:
    """The time before which nothing tells of this request."""
    return record.summary.began_at - (PAUSE_MAX if record.summary.retry else timedelta())


# -- at an engine ---------------------------------------------------------------------------------

_OF_OTHERS: Final = (QUEUE, PREEMPTED)
"""The parts of a request's time in which its engine has others."""
_RANKS: Final = {"flex": 0, None: 1, "priority": 2}
"""The service tiers, those that go first last."""


def ahead_of(record: RequestRecord, others: Iterable[RequestSummary]) -> list[RequestSummary]:
    """The requests that the same engine had while this one was queued, those that it had longest first."""
    queue = next((bar for bar in record.axis.bars if bar.stage == "queue" and bar.from_ms is not None), None)
    if queue is None or queue.from_ms is None:
        return []
    began = record.summary.began_at + timedelta(milliseconds=queue.from_ms)
    return _during(record.summary, began, began + timedelta(milliseconds=queue.takes_ms), others)


def instead_of(own: RequestSummary, others: Iterable[RequestSummary]) -> list[RequestSummary]:
    """The requests that the same engine had beside this one, those of a higher class first: one of them took
    its place."""
    found = _during(own, own.began_at, own.began_at + lasted(own), others)
    return sorted(found, key=lambda one: _rank(one) <= _rank(own))


def _rank(one: RequestSummary) -> int:
    return _RANKS.get(one.service_tier, 1)


def _during(
    own: RequestSummary, began: datetime, ended: datetime, others: Iterable[RequestSummary]
) -> list[RequestSummary]:
    """The requests that its engine had in this time, those that it had longest first."""
    found: list[tuple[timedelta, RequestSummary]] = []
    for one in others:
        over = one.began_at + lasted(one)
        shared = min(ended, over) - max(began, one.began_at)
        is_same = one.request_id == own.request_id and one.number == own.number
        if one.replica == own.replica and one.began_at < ended and shared > timedelta() and not is_same:
            found.append((shared, one))
    found.sort(key=lambda pair: -pair[0])
    return [one for _, one in found]


def _with_ahead(reason: Why, record: RequestRecord, others: Sequence[RequestSummary]) -> Why:
    if reason.part not in _OF_OTHERS:
        return reason
    there = ahead_of(record, others) if reason.part == QUEUE else instead_of(record.summary, others)
    return msgspec.structs.replace(reason, text=reason.text + _those(there))


def beside(own: RequestSummary, lives: Iterable[RequestSummary]) -> str:
    """The live requests that the engine of a live one had before it, behind what is told of that."""
    there = [one for one in lives if one.replica == own.replica and one.began_at < own.began_at]
    return _those(sorted(there, key=lambda one: one.began_at))


def _those(ahead: Sequence[RequestSummary]) -> str:
    if not ahead:
        return ""
    more = f" and {len(ahead) - AHEAD_MAX:,} more" if len(ahead) > AHEAD_MAX else ""
    return f"; that engine had {', '.join(map(_named, ahead[:AHEAD_MAX]))}{more}"


def _named(one: RequestSummary) -> str:
    facts = [*filter(None, [one.service_tier]), f"prompt {count(one.prompt_tokens, 'token')}"]
    if one.completion_tokens:
        facts.append(f"answer {one.completion_tokens:,}")
    whose = f"tenant {one.tenant}'s" if one.tenant else "no tenant's"
    return f"{whose} {one.request_id} ({', '.join(facts)})"


# -- the tries of an SDK --------------------------------------------------------------------------


def earlier_tries(own: RequestSummary, others: Sequence[RequestSummary]) -> list[RequestSummary]:
    """The tries of the same request before this one, the latest first: of the same key at the same path,
    which failed with one try less, and with the same idempotency key, where both have one."""
    tries: list[RequestSummary] = []
    at, retry = own, own.retry
    while retry and len(tries) < TRIES_MAX:
        before = [one for one in others if _is_try_before(one, at, retry - 1)]
        if not before:
            break
        at = max(before, key=lambda one: (one.idempotency is not None, one.began_at))
        tries.append(at)
        retry -= 1
    return tries


def _is_try_before(one: RequestSummary, at: RequestSummary, retry: int) -> bool:
    pause = at.began_at - (one.began_at + lasted(one))
    return (
        (one.retry or 0) == retry
        and (one.status or 0) >= ERROR
        and (one.tenant, one.key_id, one.endpoint) == (at.tenant, at.key_id, at.endpoint)
        and (one.idempotency is None or at.idempotency is None or one.idempotency == at.idempotency)
        and timedelta() <= pause <= PAUSE_MAX
    )


def _before(own: RequestSummary, tries: Sequence[RequestSummary]) -> Why:
    first = tries[-1]
    ms = (own.began_at - first.began_at) / timedelta(milliseconds=1)
    is_sure = own.idempotency is not None and own.idempotency == first.idempotency
    its = "its" if is_sure else "most likely its"
    error = " ".join(filter(None, [str(first.status), first.error_code]))
    quota = f" by the {first.quota_scope}'s quota of {first.quota_meter}" if first.quota_meter else ""
    more = f", and {len(tries) - 1} more failed" if len(tries) > 1 else ""
    text = (
        f"{duration(ms)} before it: {its} first try, {first.request_id}, was refused{quota} ({error}){more}"
    )
    return Why(ms, f"{text}, and the SDK waited", BEFORE)

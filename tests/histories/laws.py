"""The laws that hold after every world.

1. There is one completed line in the gateway for every request that reached it, and one in an engine for
   every dispatch that reached one.
2. The tokens that a request was charged are exactly those that the engines' lines report. Where they could
   not be known, the reserved tokens were charged, but for those that could not be divided among the choices,
   and the line says nothing of the engine. That happens only when the hop was cut: by a dead engine or
   network, or over HTTP/1.1 by the gateway, or by an engine whose answer was not read.
3. The engine's line reports the tokens that its core had the runner sample, to the token, whatever the end:
   all but those that were under way when the sequence ended by itself, by a stop token or in an error, and
   those behind a stop string; and each prompt of which a choice has begun; and of what the caller predicts
   what was verified and wrong, which is no more than it predicts. Behind the last token by `max_tokens`, none
   is sampled. Where a core died or hung, the line reports no more than that.
4. What an engine sampled is what its metric says, and what of it no line reports is what its metric of
   uncharged tokens names as late, or as sampled behind a prompt that was only scored; drafts that were wrong
   are named, too, unless the caller predicted them and they are charged; what was computed again
   after a preemption is named as well, to the token; and nothing else that was computed is neither charged
   nor named.
5. The usage in an answer that was read to its end is the number of tokens charged.
6. The ledger is the sum of the lines: nothing stays reserved, no lease is held, and no budget is overspent.
7. What is told of why a request took long has happened: the parts of its time add up to all of it, within a
   millisecond or a hundredth, no reason holds for longer than the request, and none is without its event.
8. No object that was made for a request is left when it has ended, without a garbage collection.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engine.contract.messages import FinishReason
from shared.trace.why import CLIENT, parts, reasons
from shared.wire.completed_line import EngineLine, GatewayLine
from tests.histories.caller import Caller
from tests.histories.core import Computed
from tests.histories.draw import BUDGET, SLOW, TENANTS, End, History, Trouble
from tests.histories.world import Line, Remains

NEVER_ARRIVES: Final = (End.LEAVES_BEFORE_BODY, End.LEAVES_IN_BODY, End.LEAVES_LATER)
LEAVES: Final = (End.LEAVES_LATER, End.LEAVES_AT_HEAD, End.LEAVES_AT_EVENT)
CUT_BY_GATEWAY: Final = {
    "client_cancel",
    "aborted",
    "key_revoked",
    "first_token_timeout",
    "inter_token_timeout",
    "total_timeout",
    "slow_client",
    "drain",
}
"""Ends after which no answer is read further."""
BREAKING: Final = {Trouble.CUT, Trouble.KILLED, Trouble.STOPS}
"""Troubles that end connections."""
UNHEARD: Final = {Trouble.KILLED, Trouble.CORE_DIES, Trouble.CORE_FAILS, Trouble.STOPS, Trouble.HANGS}
"""Troubles in which a core does not tell, or not in time, how its sequences ended."""
SLOW_MS: Final = 1000.0
"""The time for which a client that reads may be waited for, as its kernel's buffers are small."""
EVENTS: Final = {
    "hung": {Trouble.HANGS},
    "the core process did not answer": {Trouble.HANGS},
    "shutting down": {Trouble.DRAINS, Trouble.STOPS},
    "did not accept a connection": BREAKING,
    "refused to be connected": BREAKING,
    "broke off": BREAKING | {Trouble.DRAINS},
}
"""The troubles without which no reason has these words."""
EXPECTED_ERRORS: Final = {"core.failed", "core.hangs"}
_TOTAL: Final = re.compile(rb'"usage":\{.*?"total_tokens":(\d+)')


@dataclass(slots=True)
class Told:
    """One request with its log lines."""

    history: History
    gateway: list[Line] = field(default_factory=list)
    engine: list[Line] = field(default_factory=list)
    caller: Caller | None = None


def check(remains: Remains) -> Counter[str]:
    """Check all laws, and return how often each kind of end occurred. Raises AssertionError, which names the
    request."""
    tally = Counter[str]()
    for told in _told(remains):
        try:
            _check_request(remains, told, tally)
        except AssertionError as error:
            raise AssertionError(f"{told.history.request_id}: {error}\n{_shown(told)}") from error
    _check_late(remains)
    _check_ledger(remains)
    unexpected = [line for line in remains.errors if line["event"] not in EXPECTED_ERRORS]
    assert not unexpected, unexpected
    assert not remains.kept, f"still there: {remains.kept}"
    tally.update({"preemption": remains.preemptions, "prefix hit": remains.hit_tokens})
    tally += _beside_drafts(remains)
    tally += _unsampled(remains)
    tally["mispredicted"] = sum(map(_rejected, remains.engine_lines))
    tally["predicted"] = sum(int(line.get("accepted_prediction_tokens", 0)) for line in remains.engine_lines)
    tally.update(str(trouble) for trouble in remains.troubled)
    tally.update({f"uncharged: {reason}": tokens for reason, tokens in remains.uncharged.items()})
    return tally


def _beside_drafts(remains: Remains) -> Counter[str]:
    """What requests asked for whose sequences drafted."""
    bodies = {one.request_id: msgspec.json.decode(one.body) for one in remains.setting.histories}
    return Counter(
        f"drafted beside {name}"
        for line in remains.engine_lines
        if line.get("drafted_tokens")
        for name in ("stop", "n", "echo", "logprobs", "prediction", "stream")
        if bodies[line["request_id"]].get(name)
    )


def _unsampled(remains: Remains) -> Counter[str]:
    """How the requests ended that were for no token, as far as an engine computed anything for them."""
    return Counter(
        f"{line['endpoint'].removeprefix('/v1/')}: {line['end_reason']}"
        for line in remains.engine_lines
        if line["endpoint"] in ("/v1/embeddings", "/v1/decisions") and line.get("prompt_tokens")
    )


def _told(remains: Remains) -> list[Told]:
    found = {history.request_id: Told(history) for history in remains.setting.histories}
    for line in remains.gateway_lines:
        found[line["request_id"]].gateway.append(line)
    for line in remains.engine_lines:
        found[line["request_id"]].engine.append(line)
    for request_id, caller in remains.callers.items():
        found[request_id].caller = caller
    return list(found.values())


def _check_request(remains: Remains, told: Told, tally: Counter[str]) -> None:
    if not told.gateway:
        assert not told.engine
        assert told.history.end in NEVER_ARRIVES or Trouble.GATEWAY_DRAINS in remains.troubled
        tally["never arrived"] += 1
        return
    [line] = told.gateway
    assert len(told.engine) <= line["attempts"], "an engine was asked more often than the gateway knows"
    is_known = _check_charge(remains, told, line)
    _check_bounds(line)
    _check_usage(told, line)
    _check_account(remains, told)
    _check_why(remains, told, line)
    _count(tally, told, line, is_known)


def _check_charge(remains: Remains, told: Told, line: Line) -> bool:
    """Assert law 2, and return whether the cost is known."""
    costs = [_cost(one) for one in told.engine]
    if line["settled_tokens"] == sum(costs):
        return True
    learnt = [_cost(one) for one in told.engine if one["end_reason"] == line.get("engine_end_reason")]
    assert line["settled_tokens"] in (*_reserved(told, line), *(learnt if costs else [0])), (
        "charged is neither what was computed nor what was reserved"
    )
    if told.history.request_id in remains.torn:
        return False
    assert remains.setting.protocol == "http1", "what was computed could have been learnt"
    was_unread = any(one["end_reason"] == "slow_client" for one in told.engine)
    is_lost = line["end_reason"] == "upstream_failed" and bool(remains.troubled & BREAKING)
    # Then the request was sent on a kept connection to an engine that had just gone.
    is_left = line["stream"] and line["end_reason"] == "ok" and told.history.end in LEAVES
    # Then its client had all events, and left before the closing comment came.
    is_cut = line["end_reason"] in CUT_BY_GATEWAY
    assert was_unread or is_lost or is_left or is_cut, "the answer was read to its end"
    assert "completion_tokens" not in line
    return False


def _reserved(told: Told, line: Line) -> range:
    """The tokens that were reserved, and those of them that its choices may use: where it states no maximum,
    each has as many, and what is left of what was granted has none."""
    fields, most = msgspec.json.decode(told.history.body), line["reserved_tokens"]
    prompts = fields.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str) else 1
    spare = 0 if "max_tokens" in fields else fields.get("n", 1) * several - 1
    return range(most - spare, most + 1)


def _cost(engine_line: Line) -> int:
    return int(engine_line.get("prompt_tokens", 0)) + int(engine_line.get("completion_tokens", 0))


def _check_bounds(line: Line) -> None:
    """Assert that a tenant with a token limit has no more computed than was reserved, and that no request is
    charged without a dispatch."""
    if line.get("tenant") != "free":
        assert line["settled_tokens"] <= line["reserved_tokens"], "more was computed than was reserved"
    if line["attempts"] == 0:
        assert line["settled_tokens"] == 0, "charged for nothing"


def _check_usage(told: Told, line: Line) -> None:
    if told.caller is None or line["end_reason"] != "ok" or line["status"] != 200:
        return
    if (total := _TOTAL.search(told.caller.body)) is not None:
        assert int(total[1]) == line["settled_tokens"], "the caller was told another number"


def _check_account(remains: Remains, told: Told) -> None:
    """Assert law 3 for all engines that were asked together, since the lines do not name the engine."""
    request_id = told.history.request_id
    accounts = [computed[request_id] for computed in remains.computed if request_id in computed]
    told_of = sum(_answered(line) for line in told.engine)
    assert told_of <= sum(account.sampled.total() for account in accounts), "more is told than was computed"
    _check_predictions(remains, told, accounts)
    if remains.troubled & UNHEARD:
        return
    for account in accounts:
        _check_ends(account)
    fields = msgspec.json.decode(told.history.body)
    prompts = sum(_begun_len(account, fields.get("n", 1)) for account in accounts)
    assert prompts == sum(int(line.get("prompt_tokens", 0)) for line in told.engine), "a prompt is untold"
    owed = sum(_owed(account) for account in accounts)
    if "stop" not in fields:  # else what comes behind the string is not told
        assert told_of == owed, "what is told is not what was computed"


def _check_predictions(remains: Remains, told: Told, accounts: list[Computed]) -> None:
    """Assert that what was wrong of a prediction is told, and that it is no more than was predicted."""
    wrong = sum(_rejected(line) for line in told.engine)
    right = sum(int(line.get("accepted_prediction_tokens", 0)) for line in told.engine)
    for account in accounts:
        assert all(account.mispredicted[at] <= most for at, most in account.prediction_lens.items())
    verified = sum(account.mispredicted.total() for account in accounts)
    assert wrong <= verified, "more of a prediction is told as wrong than was"
    assert right <= sum(account.predicted.total() for account in accounts)
    if not remains.troubled & UNHEARD and "stop" not in msgspec.json.decode(told.history.body):
        assert wrong == verified, "what was wrong of a prediction is untold"


def _check_why(remains: Remains, told: Told, line: Line) -> None:
    """Assert law 7."""
    # a line that was too long to be written as it is has the name of its process
    gateway = msgspec.convert({**line, "service": "gateway"}, GatewayLine)
    engines = [msgspec.convert({**one, "service": "engine"}, EngineLine) for one in told.engine]
    troubles, slow = remains.troubled, told.history.end in SLOW
    longest_ms = max(
        gateway.total_ms, *(one.total_ms for one in engines), 0.0
    )  # who leaves is heard of later
    for lines in ([], engines):  # a gateway has its own line alone, and logs have both
        shares, total_ms = parts(gateway, lines), gateway.total_ms
        assert abs(sum(shares.values()) - total_ms) <= max(1.0, total_ms / 100), (
            f"the parts are not all: {shares}"
        )
        for reason in reasons(gateway, lines):
            assert 0.0 <= reason.ms <= longest_ms + 1.0, f"it held for longer than the request: {reason}"
            assert slow or reason.part != CLIENT or reason.ms < SLOW_MS, f"its client read: {reason}"
            for words, events in EVENTS.items():
                assert words not in reason.text or troubles & events, f"nothing of the kind: {reason}"


def _check_ends(account: Computed) -> None:
    """Assert that every sampled token was reported, or named at the sequence's end."""
    for handle, sampled in account.sampled.items():
        end = account.ends[handle]
        assert sampled == account.tokens[handle] + end.late_tokens, "a sampled token is lost"
        assert not (end.late_tokens and end.reason is FinishReason.LENGTH), "a row beyond the last token"
        found_len = account.cached_lens[handle]
        had = account.positions[handle].union(range(found_len))
        again = account.rows_len[handle] + found_len - len(had)
        assert end.again_tokens == again, "what was computed again is named otherwise"


def _rejected(engine_line: Line) -> int:
    return int(engine_line.get("rejected_prediction_tokens", 0))


def _answered(engine_line: Line) -> int:
    """The tokens of answers that an engine's line tells of."""
    return int(engine_line.get("completion_tokens", 0)) - _rejected(engine_line)


def _owed(account: Computed) -> int:
    """The tokens that a request without stop strings is charged for its answers."""
    ends = account.ends.values()
    return account.tokens.total() + sum(end.late_tokens for end in ends if end.reason.is_callers)


def _begun_len(account: Computed, n: int) -> int:
    """The tokens of the prompts of which a choice has begun. What all begin with counts once."""
    handles = sorted(account.prompt_lens)
    prompts = [handles[first : first + n] for first in range(0, len(handles), n)]
    begun = [choices[0] for choices in prompts if account.cached_lens.keys() & set(choices)]
    shared_len = account.shared_len
    return (shared_len if begun else 0) + sum(account.prompt_lens[handle] - shared_len for handle in begun)


def _check_late(remains: Remains) -> None:
    """Assert law 4."""
    if remains.troubled & UNHEARD:
        return
    accounts = [pair for computed in remains.computed for pair in computed.items()]
    sampled = sum(account.sampled.total() for _, account in accounts)
    assert sampled == remains.generated, "the metric of sampled tokens is not what was sampled"
    told_of = sum(_answered(line) for line in remains.engine_lines)
    named = remains.uncharged["late"]
    assert sampled == told_of + named, "sampled tokens are neither charged nor named"
    told_of += sum(int(line.get("prompt_tokens", 0)) for line in remains.engine_lines)
    rejected = sum(map(_rejected, remains.engine_lines))
    ends = [end for _, account in accounts for end in account.ends.values()]
    wrong = sum(end.drafted - end.accepted for end in ends)
    assert wrong == rejected + remains.uncharged["draft"], "wrong drafts are neither charged nor named"
    told_of += rejected
    computed = wrong + sum(account.rows_len.total() for _, account in accounts)
    assert computed <= told_of + remains.uncharged.total(), "tokens are neither charged nor named"


def _check_ledger(remains: Remains) -> None:
    """Assert law 6."""
    ledger = remains.ledger
    assert ledger.balanced
    assert (ledger.outstanding, remains.leases) == (0, 0)
    settled = defaultdict[str, int](int)
    for line in remains.gateway_lines:
        settled[line.get("tenant", "")] += line["settled_tokens"]
    assert ledger.settled == sum(settled.values())
    assert ledger.reserved == sum(line["reserved_tokens"] for line in remains.gateway_lines)
    for tenant in TENANTS:
        if (usage := remains.usages.get(("tenant", tenant))) is not None:
            assert usage.spent == settled[tenant], f"{tenant} has spent what no line says"
            assert usage.live == 0
    assert settled["budget"] <= BUDGET, "a budget is overspent"


def _count(tally: Counter[str], told: Told, line: Line, is_known: bool) -> None:
    kind = "stream" if line["stream"] else "unary"
    tally[f"gateway: {line['end_reason']} in {line['stage']}, {kind}"] += 1
    tally[f"ended in {line['stage']}"] += 1
    tally[f"ended by {line['end_reason']}"] += 1
    tally[f"drawn: {told.history.end}"] += 1
    for one in told.engine:
        left_in = f" in {one['stage']}" if one["end_reason"] == "client_cancel" else ""
        tally[f"engine: {one['end_reason']}{left_in}"] += 1
    tally["cost: " + ("nothing" if not line["settled_tokens"] else "learnt" if is_known else "reserved")] += 1
    if len(told.engine) > 1:
        tally["asked again elsewhere"] += 1
    if line["end_reason"] == "ok" and not is_known:
        tally["lost, and answered elsewhere"] += 1


def _shown(told: Told) -> str:
    lines = [*told.gateway, *told.engine]
    return "\n".join([str(told.history)[:500], *(str(line) for line in lines)])

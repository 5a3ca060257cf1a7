"""Why a request took as long as it did: the reasons of both services, the longest first.

Rules:

1. The parts of a request's time add up to all of it: the gateway's stages, of which attempts that failed, the
   time in which the client did not read, and the engine's stages are taken out. What an engine computed while
   the client did not read is the client's part.
2. A reason is told of what is known to have happened, never guessed from a time alone; but where all reasons
   together explain less than half of the time, the largest part that none explains is told by its name.
3. A pause that the engine tells and that only hands on the client's own is told once, as the client's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from shared.trace.sentences import count, duration, sentence
from shared.wire.causes import Cause, CauseCode
from shared.wire.completed_line import (
    ENGINE_STAGES,
    GATEWAY_STAGES,
    EngineLine,
    FailedAttempt,
    GatewayLine,
    Line,
)
from shared.wire.end_reason import EndReason
from shared.wire.engine_words import MEANINGS

NOTABLE_MS: Final = 50.0
"""The time from which on a stage that is short as a rule is told, in milliseconds."""
PINGED_MS: Final = 1000.0
"""The time between two looks at the core, in milliseconds: its silence may have begun so long before the one
that noted it."""
TOLD_MS: Final = 10.0
"""The time of a request from which on its largest part is told, in milliseconds."""
BEFORE: Final = "before"
"""The part of a reason that lies before the request."""
QUEUE: Final = "engine queue"
PREEMPTED: Final = "engine preempted"
ATTEMPTS: Final = "failed attempts"
CLIENT: Final = "client"

_PREPARED: Final = (
    *("edge", "body", "validate", "tokenize", "grammar", "detokenize", "handover", "queue", "prefill"),
)
"""The engine's stages that lie before an answer's first byte."""
_COMPUTED: Final = ("decode", "preempted", "stalled", "flush")
_PARTS: Final[Mapping[str, str]] = {
    CauseCode.PREFILL: "engine prefill",
    CauseCode.STALLED: "engine stalled",
    CauseCode.TOKENIZER: "engine tokenize",
    CauseCode.GRAMMAR: "engine grammar",
    CauseCode.MASKS: "engine decode",
}
_CORES: Final = ("engine handover", "engine queue", "engine prefill", "engine decode")
"""The parts of the time in which the core may not answer."""
_KINDS: Final = {"waited": QUEUE, "gap": "engine decode", "preempted": PREEMPTED}
_WHAT: Final[Mapping[str, str]] = {
    "gateway edge": "reading its headers",
    "gateway auth": "finding out who asks, or its tenant's turn",
    "gateway answer": "writing an answer that needs no engine",
    "gateway seat": "taking a seat: the store of quotas (Redis, where one is set) answered late",
    "gateway body": "the client sent its body",
    "gateway validate": "checking its body",
    "gateway tenant": "finding its model and limits",
    "gateway quota": "reserving tokens: the store of quotas (Redis, where one is set) answered late",
    "gateway route": "choosing an engine",
    "gateway settle": "charging it: the store of quotas, or the engine's report, came late",
    "engine edge": "the engine's own beginning and end of it",
    "engine body": "the engine read its body",
    "engine validate": "the engine checked its body",
    "engine detokenize": "the engine made text of its tokens",
    "engine handover": "between the engine's API process and its core",
}
"""Sentences on what happens in stages that are short as a rule."""


class Why(Struct, frozen=True):
    """A reason in words, and how long it held."""

    ms: float
    text: str
    part: str
    """The part of the time that it explains."""


def reasons(gateway: GatewayLine | None, engines: Sequence[EngineLine] = ()) -> tuple[Why, ...]:
    """All that is known, the longest first."""
    line: Line | None = gateway or (engines[-1] if engines else None)
    if line is None:
        return ()
    shares = parts(gateway, engines)
    answered = _answered(gateway, engines)
    causes = (gateway.causes if gateway else None) or (answered.causes if answered else None) or ()
    silent = next((one for one in causes if one.code == CauseCode.CORE_SILENT), None)
    told = [*_of_engine([one for one in causes if one is not silent], shares), *_of_stages(shares)]
    told = [_with_size(one, line) for one in told]
    found = [*_with_silence(told, silent), *_thinking(line, shares)]
    if gateway is not None:
        found = [_with_home(one, gateway) for one in found]
        found += [*_of_client(gateway), *_of_attempts(gateway, engines)]
        if gateway.retry:
            tries = count(gateway.retry, "try", "tries")
            found.append(
                Why(0.0, f"its SDK counts {tries} before this one, each a request of its own", BEFORE)
            )
    if line.total_ms >= TOLD_MS and (largest := _unexplained(line, answered, shares, found)) is not None:
        found.append(largest)
    return tuple(sorted(found, key=lambda one: -one.ms))


def so_far(line: GatewayLine, stage: str, ms: float, beside: str = "") -> tuple[Why, ...]:
    """The reasons of a request that is in this stage for so long, the longest first. `beside` is added to
    what is said of the stage."""
    part = f"gateway {stage}"
    now = Why(ms, f"{duration(ms)} so far: {stage_text(part, line)}{beside}", part)
    return tuple(sorted([now, *_of_attempts(line)], key=lambda one: -one.ms))


# -- the parts of the time ------------------------------------------------------------------------


def parts(gateway: GatewayLine | None, engines: Sequence[EngineLine] = ()) -> dict[str, float]:
    """The parts of a request's time in milliseconds, which add up to all of it."""
    if gateway is None:
        return _stages_of(engines[-1], "engine") if engines else {}
    shares = _stages_of(gateway, "gateway")
    waited, relayed = shares.pop("gateway wait", 0.0), shares.pop("gateway relay", 0.0)
    connected = shares.pop("gateway connect", 0.0)
    lost = failed_ms = 0.0
    for one in gateway.failed_attempts or ():
        connect_ms = one.takes_ms if one.connect_ms is None else one.connect_ms
        lost, failed_ms = lost + connect_ms, failed_ms + one.takes_ms - connect_ms
    lost, failed_ms = min(lost, connected), min(failed_ms, waited)
    blocked = min(gateway.blocked_ms or 0.0, relayed)
    left = {"wait": waited - failed_ms, "relay": relayed - blocked}
    shares |= {ATTEMPTS: lost + failed_ms, "gateway connect": connected - lost, CLIENT: blocked}
    told = _told(gateway, engines)
    for stages, order in ((_PREPARED, ("wait", "relay")), (_COMPUTED, ("relay", "wait"))):
        for stage in stages:
            asked = told.get(stage, 0.0)
            for place in order:
                taken = min(asked, left[place])
                left[place], asked = left[place] - taken, asked - taken
                shares[f"engine {stage}"] = shares.get(f"engine {stage}", 0.0) + taken
    shares |= {f"gateway {place}": ms for place, ms in left.items()}
    return {name: ms for name, ms in shares.items() if ms > 0.0}


def _stages_of(line: Line, service: str) -> dict[str, float]:
    names = GATEWAY_STAGES if isinstance(line, GatewayLine) else ENGINE_STAGES
    return {f"{service} {name}": getattr(line, f"{name}_ms") or 0.0 for name in names}


def _answered(gateway: GatewayLine | None, engines: Sequence[EngineLine]) -> EngineLine | None:
    """The line of the engine that was asked last, where it did not fail as those before it did."""
    failed = 0 if gateway is None else len(gateway.failed_attempts or ())
    return engines[-1] if engines and (gateway is None or failed < gateway.attempts) else None


def _told(gateway: GatewayLine, engines: Sequence[EngineLine]) -> dict[str, float]:
    """The stages of the engine that answered, as it told the gateway, or else as its line has them."""
    if gateway.engine_end_reason is None and (answered := _answered(gateway, engines)) is not None:
        return {name: getattr(answered, f"{name}_ms") or 0.0 for name in ENGINE_STAGES}
    return {name: getattr(gateway, f"engine_{name}_ms", None) or 0.0 for name in ENGINE_STAGES}


# -- reasons --------------------------------------------------------------------------------------


def _of_engine(causes: Sequence[Cause], shares: Mapping[str, float]) -> Iterator[Why]:
    """The engine's reasons, but for the pauses that only hand on the client's."""
    client_ms = shares.get(CLIENT, 0.0)
    for one in causes:
        if one.code == CauseCode.STALLED and client_ms >= one.ms / 2:
            continue
        part = _PARTS.get(one.code) or _KINDS.get(one.code.partition("_")[0], "engine decode")
        yield Why(one.ms, sentence(one), part)


def _with_silence(found: Sequence[Why], silent: Cause | None) -> Iterator[Why]:
    """The reasons, and the time in which the core did not answer: with the longest of which that is half or
    more, or all but the time to the first look, since it came of that; alone where there is none."""
    about = None
    if silent is not None:
        whole = [one for one in found if one.part in _CORES and silent.ms <= one.ms * 1.1]
        came_of_it = (one for one in whole if one.ms <= max(2 * silent.ms, silent.ms + PINGED_MS))
        about = max(came_of_it, key=lambda one: one.ms, default=None)
        if about is None:
            yield Why(silent.ms, sentence(silent), "engine handover")
    for one in found:
        if one is about and silent is not None:
            silence = f"the core process did not answer for {duration(silent.ms)} of it"
            yield Why(one.ms, f"{one.text}; {silence}{_rest_of_silence(one.ms - silent.ms)}", one.part)
        else:
            yield one


def _rest_of_silence(ms: float) -> str:
    """A sentence on the rest of a time in which the core was silent."""
    if ms < NOTABLE_MS:
        return ""
    if ms <= PINGED_MS * 1.1:
        return f", and most likely for the {duration(ms)} before it was asked"
    return f"; of the other {duration(ms)} no more is known"


_LOST: Final[Mapping[str, str]] = {
    "drains": "takes no more requests",
    "restarted": "was restarted",
    "failed": "failed lately",
    "busy": "had more to do than that",
    "moved": "is its home no more",
}
"""The ends of a sentence about an engine that had the history of a conversation."""


def _with_home(one: Why, line: GatewayLine) -> Why:
    """The reason, and why a prompt was computed which another engine had computed before."""
    if one.part != "engine prefill" or line.lost_home is None:
        return one
    why = _LOST.get(line.lost_reason or "", line.lost_reason)
    text = f"{one.text}; {count(line.lost_tokens or 0, 'token')} of it were at {line.lost_home}, which {why}"
    return Why(one.ms, text, one.part)


def _with_size(one: Why, line: Line) -> Why:
    """The reason, and of how many tokens the text is that took long to become tokens."""
    if one.part not in ("gateway tokenize", "engine tokenize") or not line.prompt_tokens:
        return one
    about = "about " if isinstance(line, GatewayLine) and not line.prompt_exact else ""
    return Why(one.ms, f"{one.text}, for {about}{count(line.prompt_tokens, 'token')}", one.part)


def _of_stages(shares: Mapping[str, float]) -> Iterator[Why]:
    """Stages that are short as a rule, and were not."""
    for part, what in _WHAT.items():
        if (ms := shares.get(part, 0.0)) >= NOTABLE_MS:
            yield Why(ms, f"{duration(ms)}: {what}", part)
    if (ms := shares.get("gateway tokenize", 0.0)) >= NOTABLE_MS:
        yield Why(ms, sentence(Cause(code=CauseCode.TOKENIZER, ms=ms)), "gateway tokenize")
    if (ms := shares.get("gateway connect", 0.0)) >= NOTABLE_MS:
        yield Why(ms, f"{duration(ms)}: connecting to the engine", "gateway connect")


def _thinking(line: Line, shares: Mapping[str, float]) -> Iterator[Why]:
    thought, whole = line.reasoning_tokens or 0, line.completion_tokens or 0
    ms = shares.get("engine decode", 0.0) * thought / max(1, whole)
    if ms >= NOTABLE_MS:
        yield Why(
            ms, f"{duration(ms)}: thinking, {thought:,} of its {count(whole, 'token')}", "engine decode"
        )


def _of_client(line: GatewayLine) -> Iterator[Why]:
    if (ms := min(line.blocked_ms or 0.0, line.relay_ms or 0.0)) >= 1.0:
        text = f"{duration(ms)}: the client did not read its answer (the gateway's buffers were full)"
        yield Why(ms, text, CLIENT)


def _of_attempts(line: GatewayLine, engines: Sequence[EngineLine] = ()) -> Iterator[Why]:
    asked = engines if len(engines) == line.attempts else ()
    for number, one in enumerate(line.failed_attempts or (), 1):
        lost = asked[number - 1] if asked and is_lost(asked[number - 1], line, engines) else None
        yield Why(one.takes_ms, attempt_text(one, lost, is_last=number == line.attempts), ATTEMPTS)


def is_lost(engine: EngineLine, gateway: GatewayLine | None, engines: Sequence[EngineLine]) -> bool:
    """True if an engine finished its answer, and the gateway had to do without it."""
    is_other = gateway is not None and engine is not _answered(gateway, engines)
    return is_other and engine.end_reason == EndReason.OK


_FAILURES: Final[Mapping[str, str]] = {
    "connect_timeout": "did not accept a connection",
    "upstream_unreachable": "refused to be connected",
    "not_ready": "was not ready",
    "queue_full": "had a full queue",
    "first_token_deadline": "could not begin in time",
    "engine_failed": "failed while it worked on this",
    "upstream_failed": "broke off, or answered what is no answer",
}


def attempt_text(one: FailedAttempt, lost: EngineLine | None = None, *, is_last: bool = False) -> str:
    """The words of an attempt that failed; `lost` is its engine's line where that had finished, and `is_last`
    is true where no other followed."""
    detail, then = one.detail or "", "" if is_last else ", and another was asked"
    what = MEANINGS.get(detail)
    if what is None:
        what = _FAILURES.get(one.code, f"failed with {one.code}") + (f" ({detail})" if detail else "")
    if lost is not None:
        what += f", although it had finished within {duration(lost.total_ms)}: its answer was lost on the way"
    return f"{duration(one.takes_ms)}: {one.replica} {what}{then}"


def _unexplained(
    line: Line, answered: EngineLine | None, shares: Mapping[str, float], found: Sequence[Why]
) -> Why | None:
    """The largest part of which no reason is known, where they explain less than half of the time."""
    covered: dict[str, float] = {}
    for one in found:
        covered[one.part] = min(shares.get(one.part, 0.0), covered.get(one.part, 0.0) + one.ms)
    if sum(covered.values()) >= sum(shares.values()) / 2:
        return None
    left = {part: ms - covered.get(part, 0.0) for part, ms in shares.items()}
    part = max(left, key=left.__getitem__)
    return Why(left[part], f"{duration(left[part])}: {stage_text(part, line, answered)}", part)


def _own_account(line: Line, answered: EngineLine | None, *, is_begun: bool) -> str | None:
    """The engine's own account of its time. None where it tells nothing."""
    if is_begun and isinstance(line, GatewayLine) and line.engine_first_byte_ms:
        return f"began its answer within {duration(line.engine_first_byte_ms)}"
    if answered is not None:
        return f"was done within {duration(answered.total_ms)}"
    if isinstance(line, GatewayLine) and line.engine_end_reason:
        told = sum(_told(line, ()).values())
        return f"took {duration(told)} for all of it"
    return None


def stage_text(part: str, line: Line, answered: EngineLine | None = None) -> str:
    """Tells in words what happens in a part of the time. `answered` is the line of the engine that answered.
    What that tells of its own time is not what the gateway waited for."""
    whom = (line.replica if isinstance(line, GatewayLine) else None) or "the engine"
    match part:
        case "engine decode":
            return f"computing an answer of {count(line.completion_tokens or 0, 'token')}"
        case "engine queue":
            return "waiting in the engine's queue"
        case "engine prefill":
            return f"computing its prompt of {count(line.prompt_tokens or 0, 'token')}"
        case "engine stalled":
            return "the engine was paused, since its answer was not read"
        case "gateway wait":
            own = _own_account(line, answered, is_begun=True)
            return (
                f"between the gateway and {whom}, which {own}" if own else f"{whom} had not begun to answer"
            )
        case "gateway relay":
            own = _own_account(line, answered, is_begun=False)
            return f"the answer came from {whom}" + (f", which {own}" if own else "")
        case "gateway connect":
            return f"connecting to {whom}"
        case _:
            service, _, stage = part.partition(" ")
            return _WHAT.get(part, f"in the {service}'s stage {stage}")

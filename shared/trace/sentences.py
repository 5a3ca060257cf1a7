"""The one place where causes become sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shared.wire.causes import Cause, CauseCode


def sentence(cause: Cause) -> str:
    """The words of a cause."""
    say = _SENTENCES.get(cause.code)
    return f"{duration(cause.ms)}: {cause.code}" if say is None else say(cause)


def duration(ms: float) -> str:
    """A time as people write it: `310 ms`, `1.8 s`, `2 min 5 s`."""
    if ms < 9.95:
        return f"{ms:.2g} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if ms < 59_950:
        return f"{ms / 1e3:.1f}".removesuffix(".0") + " s"
    minutes, seconds = divmod(round(ms / 1e3), 60)
    return f"{minutes} min {seconds} s"


def count(number: int, what: str, whats: str = "") -> str:
    """A number of things: `1 page`, `1,920 pages`."""
    return f"{number:,} {what if number == 1 else whats or what + 's'}"


# -- waiting --------------------------------------------------------------------------------------


def _queued(why: Callable[[Cause], str]) -> Callable[[Cause], str]:
    def say(cause: Cause) -> str:
        return f"queued {duration(cause.ms)}: {why(cause)}{_before(cause)}"

    return say


def _before(cause: Cause) -> str:
    """Who went first."""
    parts = []
    if cause.higher_class:
        parts.append(f"{cause.higher_class:,} of a higher class went first")
    if cause.first:
        other = "more" if cause.higher_class else "other" if cause.first == 1 else "others"
        were = "was" if cause.first == 1 else "were"
        parts.append(f"{cause.first:,} {other} {were} taken before it")
    own = " (its own other choices among them)" if cause.shared and cause.first else ""
    return "".join(f", {part}" for part in parts) + own


def _pages(cause: Cause) -> str:
    hold = "holds" if cause.requests == 1 else "hold"
    return f"no pages ({count(cause.requests, 'sequence')} {hold} {cause.held_percent} %)"


def _slots(cause: Cause) -> str:
    runs = "runs" if cause.requests == 1 else "run"
    return f"no slot ({count(cause.requests, 'sequence')} {runs})"


def _turn(cause: Cause) -> str:
    if not cause.prompt_tokens:
        return "the steps were full"
    return f"the steps computed {count(cause.prompt_tokens, 'prompt token')} of others"


# -- computing ------------------------------------------------------------------------------------


def _prefill(cause: Cause) -> str:
    cached = f" ({cause.cached_tokens:,} more were cached)" if cause.cached_tokens else ""
    beside = []
    if cause.prompt_tokens:
        beside.append(f"{count(cause.prompt_tokens, 'prompt token')} of {_others(cause)}")
    if cause.decodes:
        beside.append(f"{count(cause.decodes, 'stream')}")
    text = f"prefill of {duration(cause.ms)}: {count(cause.own_tokens, 'prompt token')} of its own{cached}"
    text += f" in {count(cause.steps, 'step')}"
    return f"{text}, beside {' and '.join(beside)}" if beside else text


def _others(cause: Cause) -> str:
    if cause.shared:
        return f"{count(cause.requests, 'sequence')}, its own among them"
    return "another request" if cause.requests == 1 else f"{cause.requests:,} other requests"


def _gap(why: Callable[[Cause], str]) -> Callable[[Cause], str]:
    def say(cause: Cause) -> str:
        return f"gap of {duration(cause.ms)}: {why(cause)}"

    return say


def _prompts(cause: Cause) -> str:
    return f"{count(cause.prompt_tokens, 'prompt token')} of {_others(cause)}"


def _copies(cause: Cause) -> str:
    return f"{count(cause.pages, 'page')} of preempted sequences were copied"


def _slow(cause: Cause) -> str:
    return f"a step of {count(cause.decodes, 'stream')} that usually takes {duration(cause.expected_ms)}"


def _decodes(cause: Cause) -> str:
    return f"a step of {count(cause.decodes, 'stream')}"


# -- interruptions --------------------------------------------------------------------------------


def _preempted(why: str) -> Callable[[Cause], str]:
    def say(cause: Cause) -> str:
        swapped = ", its pages were kept in host memory" if cause.swapped else ""
        return f"preempted for {duration(cause.ms)}: {why}{swapped}"

    return say


def _plain(words: str) -> Callable[[Cause], str]:
    return lambda cause: words.format(duration(cause.ms))


_SENTENCES: Final[Mapping[str, Callable[[Cause], str]]] = {
    CauseCode.WAITED_STEP: _queued(lambda _: "a step was being computed"),
    CauseCode.WAITED_GRAMMAR: _queued(lambda _: "its grammar was being compiled"),
    CauseCode.WAITED_SLOTS: _queued(_slots),
    CauseCode.WAITED_PAGES: _queued(_pages),
    CauseCode.WAITED_TURN: _queued(_turn),
    CauseCode.PREFILL: _prefill,
    CauseCode.GAP_PROMPTS: _gap(_prompts),
    CauseCode.GAP_COPIES: _gap(_copies),
    CauseCode.GAP_HOST: _gap(lambda _: "the host was busy between two steps"),
    CauseCode.GAP_SLOW: _gap(_slow),
    CauseCode.GAP_DECODES: _gap(_decodes),
    CauseCode.PREEMPTED_CLASS: _preempted("a request of a higher class took its place"),
    CauseCode.PREEMPTED_SHARE: _preempted("a tenant that held less took its place"),
    CauseCode.PREEMPTED_PAGES: _preempted("others grew into its pages"),
    CauseCode.STALLED: _plain("stalled {}: this client did not read"),
    CauseCode.TOKENIZER: _plain("tokenizing took {}"),
    CauseCode.GRAMMAR: _plain("making and trying its grammar took {}"),
    CauseCode.CORE_SILENT: _plain("{}: the engine's core process did not answer"),
    CauseCode.MASKS: _plain("its grammar took the core {}, in which steps may have gone on without it"),
}

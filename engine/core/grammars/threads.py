"""Grammars compiled, matched and turned into masks on threads. llguidance frees the interpreter's lock
meanwhile.

    open       a compiled grammar is found in the cache, with its first mask, or compiled
    advance    the matcher takes in a token, and fills the next mask

Matchers are the threads' while they work, and nobody's between two tokens: the core's thread hands a
sequence's token over only once its mask has come back, so no two threads ever have one matcher.

Rules

1. Compiled grammars are cached by their text: `CACHED_MAX` of them, `CACHED_LEN_MAX` bytes of text and first
   masks in all, the one that was asked for last is dropped last. A grammar that fails is cached, too.
2. A sequence has a matcher of its own, a copy of the compiled one, from its first token on. One that waits
   has none.
3. Masks are filled in two lanes (`engine.core.grammars.lanes`). The fast one is what plans wait for, and
   fills what a tenant's sequences came to in a step by one job and one call, which leaves the interpreter to
   the core's thread meanwhile. Where that took longer than `SLOW_S`, its rows are *suspects*: their next
   `PROVEN` masks are filled one by one. A row whose own mask took longer goes to the slow lane, as do new
   rows of its grammar, and comes back after `PROVEN` masks in time; what stood behind it in its job is put
   back, so that other tenants come between. No call can be interrupted: the lanes keep tenants from each
   other's way.
4. Compiling is a slow job. A grammar that several tenants ask for is compiled by whichever has its turn
   first. One that nobody waits for any more is not compiled.
5. Whatever a thread's work raises ends its sequences, and no thread. No text of a grammar is logged.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.contract.grammars import BadGrammar, Executor, Matcher, Vocabulary, compiled, failure
from engine.core.drafts.price import Sureness
from engine.core.grammars.lanes import SLOW_S, Lane
from engine.core.grammars.masks import Filled, MatcherStanding, is_allowed, is_single
from shared.process import logs

CACHED_MAX: Final = 256
CACHED_LEN_MAX: Final = 64 << 20
PROVEN: Final = 8
FORESEEN_MAX: Final = 8
"""The most drafts behind which masks are filled."""
log = logs.get(__name__)


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar; without a matcher where that failed."""

    matcher: Matcher | None
    mask: bytes
    standing: MatcherStanding
    seconds: float
    is_slow: bool = False
    """True if a mask of it was slow in the fast lane."""


@dataclass(slots=True)
class _Row:
    """A sequence that follows a grammar."""

    handle: int
    tenant: str
    grammar: str
    compiled: _Compiled | None = None
    matcher: Matcher | None = None
    """A copy of the compiled one; None until the first token."""
    tokens: list[int] = field(default_factory=list)
    """The tokens that the matcher has not taken in yet."""
    drafts: Sequence[int] | None = None
    """The tokens that may follow them; None where no masks behind drafts are wanted."""
    is_open: bool = True
    unproven: int = 0
    """The masks in time that it lacks to be filled in the fast lane; 0: it is."""
    suspect: int = 0
    """Its next masks that are filled by themselves, in the fast lane."""

    def own_matcher(self) -> Matcher:
        if self.matcher is None:
            assert self.compiled is not None
            assert self.compiled.matcher is not None
            self.matcher = self.compiled.matcher.deep_copy()
        return self.matcher


@dataclass(slots=True)
class _Compiling:
    """A grammar that is being compiled, or about to be."""

    grammar: str
    rows: list[_Row] = field(default_factory=list)
    tenants: set[str] = field(default_factory=set)
    is_begun: bool = False


class GrammarThreads:
    """Implements `engine.core.grammars.masks.Grammars`."""

    def __init__(self, vocabulary: Vocabulary, ring: Callable[[], None]) -> None:
        """`ring` wakes the core's thread where it waits for masks."""
        self._vocabulary: Final = vocabulary
        self._ring: Final = ring
        self._fast: Final = Lane("masks", rests=False)
        self._slow: Final = Lane("grammars", rests=True)
        self._rows: Final[dict[int, _Row]] = {}
        self._cache: Final[OrderedDict[str, _Compiled]] = OrderedDict()
        self._cached_len = 0
        self._compiling: Final[dict[str, _Compiling]] = {}
        self._done: Final[deque[Filled | tuple[_Compiling, _Compiled | None]]] = deque()
        self._mask_len: Final = 4 * -(-vocabulary.vocab_size // 32)
        self._own: Final = threading.local()
        self._all_here: Final = threading.Condition()
        self._coming = 0
        """Jobs of the fast lane that are not done."""

    # -- the core's thread ------------------------------------------------------------------------

    def open(self, handle: int, grammar: str, tenant: str) -> None:
        row = self._rows[handle] = _Row(handle, tenant, grammar)
        found = self._cache.get(grammar)
        if found is not None:
            self._cache.move_to_end(grammar)
            self._begin(row, found, 0.0)
            return
        compiling = self._compiling.setdefault(grammar, _Compiling(grammar))
        compiling.rows.append(row)
        if tenant not in compiling.tenants:
            compiling.tenants.add(tenant)
            self._slow.put(tenant, partial(self._compile, compiling))

    def advance(self, tokens: Iterable[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = {}) -> None:
        batches: dict[str, list[_Row]] = {}
        fresh: list[_Row] = []
        for handle, token in tokens:
            row = self._rows[handle]
            if not row.tokens:
                fresh.append(row)
            row.tokens.append(token)
        for row in fresh:
            row.drafts = drafts.get(row.handle)
            if row.unproven:
                self._slow.put(row.tenant, partial(self._fill_slow, row))
            else:
                batches.setdefault(row.tenant, []).append(row)
        for tenant, rows in batches.items():
            self._put_fast(tenant, rows)

    def close(self, handle: int) -> None:
        self._rows.pop(handle).is_open = False

    def take_filled(self) -> list[Filled]:
        filled: list[Filled] = []
        while self._done:
            done = self._done.popleft()
            if isinstance(done, Filled):
                filled.append(done)
            else:
                self._landed(*done)
        return filled

    def wait(self, seconds: float) -> None:
        if self._coming:
            with self._all_here:
                self._all_here.wait_for(lambda: not self._coming, seconds)

    def _begin(self, row: _Row, found: _Compiled, seconds: float) -> None:
        """Give a row its first mask."""
        row.compiled, row.unproven = found, PROVEN if found.is_slow else 0
        self._done.append(Filled(row.handle, found.mask, found.standing, seconds))

    def _landed(self, compiling: _Compiling, result: _Compiled | None) -> None:
        """Cache what was compiled, and begin the rows that wait for it."""
        rows = [row for row in compiling.rows if row.is_open]
        del self._compiling[compiling.grammar]
        if result is None:  # nobody waited when its turn came; since then, somebody may
            for row in rows:
                self.open(row.handle, row.grammar, row.tenant)
            return
        self._cache[compiling.grammar] = result
        self._cached_len += _len(compiling.grammar, result)
        while len(self._cache) > CACHED_MAX or self._cached_len > CACHED_LEN_MAX:
            self._cached_len -= _len(*self._cache.popitem(last=False))
        for row in rows:
            self._begin(row, result, result.seconds)

    def _put_fast(self, tenant: str, rows: list[_Row]) -> None:
        with self._all_here:
            self._coming += 1
        self._fast.put(tenant, partial(self._fill_fast, tenant, rows))

    # -- the other threads ------------------------------------------------------------------------

    def _compile(self, compiling: _Compiling) -> None:
        with self._all_here:
            if compiling.is_begun:
                return
            compiling.is_begun = True
        result = None
        if any(row.is_open for row in compiling.rows):
            result = self._compiled(compiling.grammar)
        self._done.append((compiling, result))
        self._ring()

    def _compiled(self, grammar: str) -> _Compiled:
        began_s = time.thread_time()
        matcher: Matcher | None = None
        mask, standing = b"", MatcherStanding.FAILED
        try:
            matcher = compiled(self._vocabulary, grammar)
            mask, standing = self._mask(matcher)
        except BadGrammar:
            log.info("core.grammar_refused", grammar_len=len(grammar))
        except BaseException as error:  # llguidance's panics are no Exceptions
            log.warning("core.grammar_failed", reason=type(error).__name__)
        return _Compiled(matcher, mask, standing, time.thread_time() - began_s)

    def _fill_slow(self, row: _Row) -> None:
        if row.is_open:
            filled = self._filled(row)
            row.unproven = PROVEN if filled.seconds > SLOW_S else row.unproven - 1
            self._done.append(filled)
            self._ring()

    def _fill_fast(self, tenant: str, rows: list[_Row]) -> None:
        rows = [row for row in rows if row.is_open]
        together = [row for row in rows if not row.suspect and len(row.tokens) == 1]
        if len(together) > 1:
            rows = [row for row in rows if row.suspect or len(row.tokens) > 1]
            self._fill_together(together)
        for at, row in enumerate(rows, 1):
            filled = self._filled(row)
            row.suspect = max(0, row.suspect - 1)
            is_slow = filled.seconds > SLOW_S
            if is_slow:
                assert row.compiled is not None
                row.unproven, row.compiled.is_slow = PROVEN, True
            self._done.append(filled)
            if is_slow and (behind := rows[at:]):
                self._put_fast(tenant, behind)
                break
        with self._all_here:
            self._coming -= 1
            if self._coming:
                return
            self._all_here.notify()
        self._ring()

    def _fill_together(self, rows: list[_Row]) -> None:
        """Take in the tokens of rows, and fill their next masks, by one call each."""
        began_s = time.monotonic()
        masks, size = bytearray(len(rows) * self._mask_len), self._mask_len
        try:
            matchers = [row.own_matcher() for row in rows]
            executor = self._executor()
            tokens = [row.tokens[0] for row in rows]
            taken = executor.consume_token_par(list(zip(matchers, tokens, strict=True)))
            places = list(zip(matchers, range(len(rows)), strict=True))
            address = addressof(c_char.from_buffer(masks))
            executor.unsafe_compute_mask_ptr(places, address, size, len(rows))
            standings = [_standing(matcher) for matcher in matchers]
        except BaseException as error:  # llguidance's panics are no Exceptions
            log.warning("core.grammar_failed", reason=type(error).__name__)
            taken, standings = [False] * len(rows), [MatcherStanding.FAILED] * len(rows)
        seconds = time.monotonic() - began_s
        if seconds > SLOW_S:
            for row in rows:
                row.suspect = PROVEN
        for at, (row, is_taken, standing) in enumerate(zip(rows, taken, standings, strict=True)):
            if is_taken and standing is not MatcherStanding.FAILED:
                mask = bytes(masks[at * size : (at + 1) * size])
            else:
                mask, standing = b"", MatcherStanding.FAILED
            foreseen = self._foreseen(row, mask, standing)
            row.tokens = []
            self._done.append(Filled(row.handle, mask, standing, seconds / len(rows), *foreseen))

    def _executor(self) -> Executor:
        """This thread's own. It works on one other thread, so that a job takes one core, whatever it does."""
        if not hasattr(self._own, "executor"):
            self._own.executor = Executor(1)
        executor: Executor = self._own.executor
        return executor

    def _filled(self, row: _Row) -> Filled:
        """Take in a row's token, and fill its next mask."""
        began_s = time.thread_time()
        mask, standing = b"", MatcherStanding.FAILED
        try:
            matcher = row.own_matcher()
            if all(map(matcher.consume_token, row.tokens)):
                mask, standing = self._mask(matcher)
        except BaseException as error:  # llguidance's panics are no Exceptions
            log.warning("core.grammar_failed", reason=type(error).__name__)
        seconds = time.thread_time() - began_s
        foreseen = self._foreseen(row, mask, standing) if seconds <= SLOW_S else ()
        row.tokens = []
        return Filled(row.handle, mask, standing, seconds, *foreseen)

    def _foreseen(
        self, row: _Row, mask: bytes, standing: MatcherStanding
    ) -> tuple[()] | tuple[list[int], list[bytes], list[Sureness]]:
        """The drafts of a row that its grammar allows, with the tokens that it forces behind them, the mask
        behind each, and why it is one. A copy of the matcher takes them in: one in error would never leave
        it. What takes longer than `SLOW_S` in all goes no further."""
        if row.drafts is None or standing is not MatcherStanding.GOES_ON:
            return ()
        drafts, ahead, whys = list[int](), list[bytes](), list[Sureness]()
        began_s, why = time.thread_time(), Sureness.DRAFTED
        try:
            matcher = row.own_matcher().deep_copy()
            tokens = deque(row.drafts)
            while len(drafts) < FORESEEN_MAX and time.thread_time() - began_s <= SLOW_S:
                if not tokens or not is_allowed(mask, tokens[0]):
                    tokens, why = deque(matcher.compute_ff_tokens()), Sureness.FORCED
                if not tokens or not matcher.consume_token(token := tokens.popleft()):
                    break
                is_sure = is_single(mask)
                mask, standing = self._mask(matcher)
                if standing is not MatcherStanding.GOES_ON:
                    break
                drafts.append(token)
                ahead.append(mask)
                whys.append(Sureness.SURE if is_sure else why)
        except BaseException as error:  # llguidance's panics are no Exceptions
            log.warning("core.drafts_failed", reason=type(error).__name__)
        return drafts, ahead, whys

    def _mask(self, matcher: Matcher) -> tuple[bytes, MatcherStanding]:
        mask = matcher.compute_bitmask()  # with a word more than there are tokens, where these fill the last
        standing = _standing(matcher)
        return b"" if standing is MatcherStanding.FAILED else mask[: self._mask_len], standing


def _standing(matcher: Matcher) -> MatcherStanding:
    """Where a matcher stands whose mask was filled."""
    if not matcher.is_stopped():
        return MatcherStanding.GOES_ON
    return MatcherStanding.FAILED if failure(matcher) else MatcherStanding.COMPLETE


def _len(grammar: str, held: _Compiled) -> int:
    return len(grammar) + len(held.mask)

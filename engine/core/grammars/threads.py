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
3. Masks are filled in two lanes (`engine.core.grammars.lanes`). The fast one takes all that a tenant's
   sequences advanced by with a step in one job, and is what plans wait for. A row whose mask took longer than
   `SLOW_S` goes to the slow one, as do new rows of its grammar, and comes back after `PROVEN` masks in time;
   what stood behind it in its job is put back, so that other tenants come between. Neither can be
   interrupted: the lanes keep them from each other's way.
4. Compiling is a slow job. A grammar that several tenants ask for is compiled by whichever has its turn
   first. One that nobody waits for any more is not compiled.
5. Whatever a thread's work raises ends its sequences, and no thread. No text of a grammar is logged.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.contract.grammars import BadGrammar, Matcher, Vocabulary, compiled, failure
from engine.core.grammars.lanes import SLOW_S, Lane
from engine.core.grammars.masks import Filled, Standing
from shared.process import logs

CACHED_MAX: Final = 256
CACHED_LEN_MAX: Final = 64 << 20
PROVEN: Final = 8
log = logs.get(__name__)


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar; without a matcher where that failed."""

    matcher: Matcher | None
    mask: bytes
    standing: Standing
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
    token: int = -1
    """The token that the matcher has not taken in yet."""
    is_open: bool = True
    unproven: int = 0
    """The masks in time that it lacks to be filled in the fast lane; 0: it is."""


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

    def advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        batches: dict[str, list[_Row]] = {}
        for handle, token in tokens:
            row = self._rows[handle]
            row.token = token
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
        mask, standing = b"", Standing.FAILED
        try:
            matcher = compiled(self._vocabulary, grammar)
            mask, standing = _mask(matcher)
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
        for at, row in enumerate(rows, 1):
            if not row.is_open:
                continue
            filled = self._filled(row)
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

    def _filled(self, row: _Row) -> Filled:
        """Take in a row's token, and fill its next mask."""
        began_s = time.thread_time()
        mask, standing = b"", Standing.FAILED
        try:
            if row.matcher is None:
                assert row.compiled is not None
                assert row.compiled.matcher is not None
                row.matcher = row.compiled.matcher.deep_copy()
            if row.matcher.consume_token(row.token):
                mask, standing = _mask(row.matcher)
        except BaseException as error:  # llguidance's panics are no Exceptions
            log.warning("core.grammar_failed", reason=type(error).__name__)
        return Filled(row.handle, mask, standing, time.thread_time() - began_s)


def _mask(matcher: Matcher) -> tuple[bytes, Standing]:
    mask = matcher.compute_bitmask()
    if failure(matcher):
        return b"", Standing.FAILED
    return mask, Standing.COMPLETE if matcher.is_stopped() else Standing.GOES_ON


def _len(grammar: str, held: _Compiled) -> int:
    return len(grammar) + len(held.mask)

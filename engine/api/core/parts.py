"""Prompts that begin alike, sent to the core some at a time.

A request may have thousands. Each that waits or runs in the core has its ids there, the shared ones too, and
a place in the queue, of which its tenant has a part. So a request has `AT_ONCE` of them there at most, and
others follow those that end.

Rules

1. Where the core keeps prefixes, the first goes ahead of all others, which find then what they share: it is
   computed once.
2. The first part is refused as any request is where there is no room. Any other waits until there is.
3. All parts go on the same terms, but the deadline for a first token, which is the first one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.api.answer.outputs import ChoiceOutput, RequestOutput
from engine.api.core.client import CoreClient, Share
from engine.contract.messages import AddPrompt, SamplingParams
from engine.contract.packing import TOKEN_LEN
from shared.wire.errors import ApiError, Overloaded
from shared.wire.ids import RequestId

AT_ONCE: Final = 64
"""The most sequences of a request that the core has at any time: more than a step has room for, mostly."""
TOKENS_AT_ONCE: Final = 256 * 1024
"""The tokens of their prompts after which no other is sent: a megabyte of ids."""


@dataclass(frozen=True, slots=True)
class Branches:
    """The prompts of a request, and what they begin with."""

    shared: bytes
    """The ids, packed."""
    prompts: Sequence[AddPrompt]

    @property
    def shared_len(self) -> int:
        return len(self.shared) // TOKEN_LEN

    def lens(self, first: int, count: int) -> list[int]:
        """The lengths of some of the whole prompts, in tokens."""
        shared_len = self.shared_len
        return [shared_len + len(one.ids) // TOKEN_LEN for one in self.prompts[first : first + count]]

    def first_part(self, *, goes_ahead: bool) -> int:
        """The number of prompts that are sent at first."""
        return 1 if goes_ahead else self.part(0, AT_ONCE)

    def part(self, first: int, most: int) -> int:
        """The number of prompts of the part that begins with one, `most` at most: one, and as many more as
        their tokens allow."""
        tokens = count = 0
        for length in self.lens(first, most):
            tokens += length
            if count and tokens > TOKENS_AT_ONCE:
                break
            count += 1
        return count


class Parts:
    """The prompts of one request: those that the core has, and those that are still to be sent."""

    def __init__(
        self,
        core: CoreClient,
        request_id: RequestId,
        branches: Branches,
        outputs: Sequence[ChoiceOutput],
        output: RequestOutput,
        share: Share,
        *,
        goes_ahead: bool,
    ) -> None:
        """`goes_ahead`: the first is to be complete before others are sent (rule 1)."""
        self.handles: Final = list[int]()
        """The handles of all that were sent."""
        self.output: Final = output
        self._core: Final = core
        self._request_id, self._branches, self._share = request_id, branches, share
        self._outputs = outputs
        self._goes_ahead = goes_ahead
        self._open = 0
        """The number of those in the core."""

    def start(self, first_token_s: float) -> None:
        """Send the first part, whose first prompt is to be complete within so many seconds. Raises what
        `CoreClient.submit` raises."""
        self._submit(self._branches.first_part(goes_ahead=self._goes_ahead), first_token_s)

    def ended(self) -> None:
        """Note that one in the core has ended, and send others where few are left."""
        self._open -= 1
        self.more()

    def more(self) -> None:
        """Send another part where few are left in the core, if there is room for it."""
        sent = len(self.handles)
        if sent == len(self._branches.prompts) or self._open > AT_ONCE // 2 or self.output.error is not None:
            return
        for most in (AT_ONCE - self._open, 1):
            count = self._branches.part(sent, most)
            try:
                self._core.check_room(self._share.tenant, count, sum(self._branches.lens(sent, count)))
            except Overloaded:
                continue
            except ApiError as error:
                self.output.fail(error)
                return
            self._submit(count, math.inf)
            return
        self._core.await_room(self)

    def close(self) -> None:
        """Send no other, and let nobody wait for those that were not sent."""
        self._core.forget(self)
        rest = len(self._branches.prompts) - len(self.handles)
        self._branches = Branches(b"", self._branches.prompts[: len(self.handles)])
        for _ in range(rest):
            self.output.leave_core()

    def _submit(self, count: int, first_token_s: float) -> None:
        sent, branches = len(self.handles), self._branches
        self._open += count
        sent_now = self._core.submit(
            self._request_id,
            [*branches.prompts[sent : sent + count]],
            READ_ONLY,
            self._outputs[sent : sent + count],
            self._share,
            first_token_s,
            shared=branches.shared,
        )
        self.handles.extend(sent_now)


READ_ONLY: Final = SamplingParams(seed=0, max_tokens=0)
"""The parameters of sequences of which nothing is sampled."""

"""A runner whose model says what a script answers to the prompt, and which looks at every token whether the
pages that it reads are those of the sequence.

It is the fake runner: its KV of a position is a number that depends on all tokens up to there. What that must
be is computed again when a sequence gets a slot, without pages; each sampled token compares the two. So an
answer is right only where the prefix cache gave the sequence the pages of its own tokens. The answer's tokens
are those of the script's text and the token that ends an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import tokenizers

from engine.contract.messages import Plan, RunnerInfo, RunResult, SlotAssignment, TokenLogprobs
from engine.core.grammars.masks import is_allowed
from tests.fake_runner import START, FakeRunner, SlotState, kv_of, logprobs_of

END: Final = "<|im_end|>"


class ScriptedRunner(FakeRunner):
    """`answer` is asked once for each sequence, with its prompt's text. `pause` lets a step take its time."""

    def __init__(
        self,
        info: RunnerInfo,
        step_tokens_max: int,
        tokenizer: Path,
        answer: Callable[[str], str],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(info, step_tokens_max, lambda: self.slots)  # clients stall, and masks come late
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
        self._answer = answer
        self._pause = pause
        self._answers: dict[int, list[int]] = {}
        """What is to be said, by slot, once its first token was asked for."""
        self._expected: dict[int, array[int]] = {}
        """The KV that a slot's pages must hold, by slot."""

    def run(self, plan: Plan) -> RunResult:
        for slot in plan.left:
            self._answers.pop(slot, None)
            self._expected.pop(slot, None)
        result = super().run(plan)
        self._pause()
        return result

    def _sample(self, state: SlotState, mask: bytes) -> tuple[int, TokenLogprobs | None]:
        start = state.start
        assert self._read(state) == self._kv(state), "its pages are not those of its tokens"
        if start.slot not in self._answers:
            self._answers[start.slot] = self._said(start)
        said, at = self._answers[start.slot], len(state.tokens) - start.prompt_len
        token = said[min(at, len(said) - 1)]
        while mask and not is_allowed(mask, token):
            token = (token + 1) % self.info.vocab_size
        state.tokens.append(token)
        tops = start.sampling.logprobs
        return token, None if tops is None else logprobs_of(0, token, tops)

    def text_of(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def _said(self, start: SlotAssignment) -> list[int]:
        answer = self._answer(self.text_of(start.token_ids[: start.prompt_len]))
        ids: list[int] = self._tokenizer.encode(answer + END, add_special_tokens=False).ids
        return ids

    def _kv(self, state: SlotState) -> array[int]:
        """The KV of all computed positions, without pages."""
        kv = self._expected.setdefault(state.start.slot, array("q"))
        assert state.computed_len is not None
        for position in range(len(kv), state.computed_len):
            kv.append(kv_of(kv[-1] if kv else START, state.tokens[position], position))
        return kv

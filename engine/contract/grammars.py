"""Grammars that answers follow: the one place of llguidance's settings, for the API and the core process.

Both compile a grammar's text with `compiled`, so that what the API process lets in is what the core can run.

Rules:

1. A matcher never raises: in error it allows the end of the answer alone, which reads as a short clean
   answer. So `failure` is asked after each mask and each token, and what it says ends the request with an
   error.
2. Compiling and filling a mask are bounded, since neither can be interrupted: by `LIMITS`, and by what is
   refused at the door (`shared.apis.schemas`, `shared.apis.patterns`), as some of llguidance's work comes
   before any limit of its own. The worst that both let through take 100 ms of CPU to compile, and 50 ms and
   31 MB for a mask; its lexer's states, which grow with an answer, are at most 40 MB a grammar.
3. An error's message may hold text of the grammar. It goes to the caller who sent that, and into no log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llguidance import LLExecutor as Executor
from llguidance import LLMatcher as Matcher
from llguidance import LLParserLimits
from llguidance import LLTokenizer as Vocabulary

__all__ = [
    "LIMITS",
    "WHITESPACE",
    "BadGrammar",
    "Executor",
    "Matcher",
    "Vocabulary",
    "compiled",
    "failure",
    "vocabulary_of",
]

LIMITS: Final = LLParserLimits(
    max_grammar_size=20_000,
    initial_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""`step_lexer_fuel` is llguidance's own: a tenth of it loses enums of 1,000 texts, and the masks that it
bounds take 22 ms where patterns are bounded at the door."""
WHITESPACE: Final = r"[ \t]{1,2}|[ \t]{0,2}\r?\n[ \t]{0,32}"
"""A regular expression of the white space that may stand between two parts of a JSON text: up to two blanks,
or a new line and its indent. Without a bound a model that likes blanks writes them until its last token."""
MESSAGE_LEN_MAX: Final = 300
"""Characters of what llguidance says of a grammar."""


class BadGrammar(Exception):
    """A grammar cannot be compiled, or not within the limits. The message is for the caller who sent it."""


def vocabulary_of(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The tokens as matchers know them. `tokenizer_json` is the whole tokenizer, with tokens that other files
    add to it; `vocab_size` counts the logits of a row, and a token without a text is never allowed. 2,000
    tokens take 10 ms and 4 MB, 152,000 take 0.3 to 1.3 s and 154 MB, in which no other thread of Python's
    runs. Raises BadGrammar where llguidance cannot read it."""
    try:
        return Vocabulary(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        raise BadGrammar(_shown(str(error))) from None


def compiled(vocabulary: Vocabulary, grammar: str) -> Matcher:
    """A matcher at the start of `grammar`, whose first mask was filled. Raises BadGrammar, also where no
    answer can follow it, which only the mask tells."""
    matcher = Matcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if problem := failure(matcher):
        raise BadGrammar(problem)
    return matcher


def failure(matcher: Matcher) -> str:
    """Why the matcher is in error, which it never leaves; empty if it is not."""
    return _shown(matcher.get_error()) if matcher.is_error() else ""


def _shown(problem: str) -> str:
    return problem.partition("\n<")[0].strip()[:MESSAGE_LEN_MAX]

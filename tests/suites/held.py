"""Documents against schemas, by our door and matcher, and by llguidance as it comes.

A document counts as

- *right*, where what the schema makes of it is what we do;
- *refused by name*, where the schema, or a keyword of it, is: in an error, or as ignored;
- *invalid, accepted* and *valid, refused*: wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from engine.api.ask.grammar import AskedForm, checked
from engine.contract.grammars import Matcher, compiled, failure
from shared.apis.structure import Structure, StructureKind
from shared.wire.errors import InvalidRequest
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.engine.api import walks

RIGHT: Final = "right"
REFUSED: Final = "refused by name"
ACCEPTED: Final = "invalid, accepted"
WRONG: Final = (ACCEPTED, "valid, refused")
MASKS_MAX: Final = 300
"""The tokens of one document before which a mask is filled."""


class Document(NamedTuple):
    value: Any
    is_valid: bool


def ours(schema: Any, documents: Sequence[Document], *, strict: bool = False) -> list[str]:
    """What each document counts as."""
    try:
        asked = Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), strict=strict, param="schema")
        grammar = checked(walks.vocabulary(), None, AskedForm(structure=asked), reasons=False)
    except InvalidRequest:
        return [REFUSED for _ in documents]
    if grammar.ignored:
        return [REFUSED for _ in documents]
    matcher = compiled(walks.vocabulary(), grammar.text)
    return [_counted(matcher.deep_copy(), document) for document in documents]


def llguidances(schema: Any, documents: Sequence[Document]) -> list[str]:
    """What each document counts as for llguidance with its own defaults."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError:
        return [REFUSED for _ in documents]
    matcher = LLMatcher(walks.vocabulary(), grammar, log_level=0)
    if matcher.is_error():
        return [REFUSED for _ in documents]
    return [_counted(matcher.deep_copy(), document) for document in documents]


def _counted(matcher: Matcher, document: Document) -> str:
    """A failure of the matcher's is an error that names what failed, and no answer."""
    accepted = True
    for at, token in enumerate(walks.tokenizer().encode(json.dumps(document.value, ensure_ascii=False)).ids):
        if at < MASKS_MAX:
            matcher.compute_bitmask()
            if failure(matcher):
                return REFUSED
        if not matcher.consume_token(token):
            if "limit" in matcher.get_error() or "too many" in matcher.get_error():
                return REFUSED
            accepted = False
            break
    accepted = accepted and matcher.is_accepting()
    if accepted == document.is_valid:
        return RIGHT
    return ACCEPTED if accepted else WRONG[1]


def figures_of(counts: Counter[str], theirs: Counter[str], strict: Counter[str], unit: str) -> list[Figure]:
    """The figures of a suite: our counts beside llguidance's, and those of schemas that are strict."""
    share = counts[RIGHT] / counts.total() - theirs[RIGHT] / theirs.total()
    found = [figure(f"ours: {kind}", counts[kind], unit) for kind in (RIGHT, REFUSED, WRONG[1])]
    found.append(figure(f"ours: {ACCEPTED}", counts[ACCEPTED], unit, at_most(0)))
    found += [figure(f"llguidance: {kind}", theirs[kind], unit) for kind in (RIGHT, REFUSED, *WRONG)]
    found += [figure(f"strict: {kind}", strict[kind], unit) for kind in (RIGHT, REFUSED, WRONG[1])]
    found.append(figure(f"strict: {ACCEPTED}", strict[ACCEPTED], unit, at_most(0)))
    found.append(figure("right, ours less llguidance's", 100 * share, "points", at_least(-1)))
    return found

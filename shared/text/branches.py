"""Prompts that begin alike, as ids, in slices: what they share, and then what each has behind it.

Rules

1. What they share is encoded once, however many they are. A prompt is the ids of the two parts, one behind
   the other.
2. A prompt that cannot fit is refused with the place of its own part, once the parts are known to be too long
   together; nothing behind it is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shared.apis.holding import TOKENS_MAX
from shared.apis.prompt import (
    CUT_TO_ROOM,
    BranchedPrompt,
    DecisionPrompt,
    PromptForm,
    QuestionKind,
    RerankPrompt,
)
from shared.fairness.fair_threads import Slices
from shared.text.deciding import MARK, Deciding
from shared.text.known_pieces import TenantPieces
from shared.text.prompts import CUT_PARAM, check_sum, most_of, part_slices, prompt_slices, text_slices
from shared.text.reranking import Reranking
from shared.text.text_slices import SLICE_LEN
from shared.text.tokenizer import Tokenizer, decision_chat
from shared.wire.errors import InvalidRequest, PathNotServed
from shared.wire.room import Room

AT_ONCE: Final = 32
"""The most prompts whose own parts are encoded in one slice: each takes some 30 us and more."""
DECIDES_NOTHING: Final = "This model decides nothing: it has no chat template, or no labels for answers."
NO_RERANKER: Final = "This model is no reranker: it ranks no documents."


def scored_tokens(tokenizer: Tokenizer, given: BranchedPrompt) -> Sequence[list[int]]:
    """The tokens that are scored behind each prompt. Raises PathNotServed."""
    if isinstance(given, DecisionPrompt):
        return [_deciding(tokenizer).scored(asked) for asked in given.questions]
    return [_reranking(tokenizer).scored] * len(given.documents)


def pieces_of(
    tokenizer: Tokenizer, given: PromptForm, room: Room | None, known: TenantPieces | None = None
) -> Slices[list[list[int]]]:
    """The ids of a request's prompts, as `prompt_slices` has them; of prompts that begin alike those of their
    pieces."""
    if isinstance(given, DecisionPrompt):
        return (yield from _decided(tokenizer, given, room, known))
    if isinstance(given, RerankPrompt):
        return (yield from _ranked(tokenizer, given, room))
    return (yield from prompt_slices(tokenizer, given, room, known))


def _ranked(tokenizer: Tokenizer, given: RerankPrompt, room: Room | None) -> Slices[list[list[int]]]:
    """Raises InvalidRequest, also where a prompt is too long, and PathNotServed."""
    reranking = _reranking(tokenizer)
    beginning = reranking.format.beginning(given.instruction, given.query)
    shared = yield from text_slices(tokenizer, beginning, room, "query", add_special_tokens=False)
    around_len = len(shared) + len(reranking.behind)
    check_room(room, around_len + 1, "query")
    cut_len = _cut_len(given, room, around_len)
    texts = (f" {document}" for document in given.documents)
    return (yield from _behind(tokenizer, given, room, shared, texts, reranking.behind, cut_len))


def _decided(
    tokenizer: Tokenizer, given: DecisionPrompt, room: Room | None, known: TenantPieces | None
) -> Slices[list[list[int]]]:
    """Raises InvalidRequest, also where a prompt is too long or a question has too many choices, and
    PathNotServed."""
    deciding = _deciding(tokenizer)
    for index, asked in enumerate(given.questions):
        most = len(deciding.labels[asked.kind].texts)
        if len(asked.options) > most:
            place = f"{given.place(index)}.{'levels' if asked.kind is QuestionKind.SCORE else 'choices'}"
            raise InvalidRequest(f"{place} must have at most {most} items with this model.", param=place)
    chat = decision_chat(given.said)
    text = yield from tokenizer.template_of(chat).slices(chat)
    yield
    before, mark, behind = text.rpartition(MARK)
    if not mark or behind != deciding.behind:
        raise InvalidRequest("The model's chat template does not write this input as it is.", param="input")
    shared = yield from text_slices(tokenizer, before, room, "input", add_special_tokens=False, known=known)
    return (yield from _behind(tokenizer, given, room, shared, map(deciding.text, given.questions)))


def _behind(
    tokenizer: Tokenizer,
    given: BranchedPrompt,
    room: Room | None,
    shared: list[int],
    texts: Iterable[str],
    end: Sequence[int] = (),
    cut_len: int | None = None,
) -> Slices[list[list[int]]]:
    """The pieces: what all prompts share, and each one's own text, of which `cut_len` ids at most, and
    `end`. Raises InvalidRequest, also where a prompt is too long."""
    pieces, encoded_len, tokens = [shared], 0, len(shared)
    for index, text in enumerate(texts):
        place = given.place(index)
        ids = yield from part_slices(tokenizer, text, room, place, cut_len)
        pieces.append([*ids, *end])
        tokens += len(pieces[-1])
        check_room(room, len(shared) + len(pieces[-1]), place)
        check_sum(tokens, given.param)
        encoded_len += len(text)
        if encoded_len >= SLICE_LEN or not index % AT_ONCE:
            encoded_len = 0
            yield
    return pieces


def _deciding(tokenizer: Tokenizer) -> Deciding:
    if tokenizer.deciding is None:
        raise PathNotServed(DECIDES_NOTHING)
    return tokenizer.deciding


def _reranking(tokenizer: Tokenizer) -> Reranking:
    if tokenizer.reranking is None:
        raise PathNotServed(NO_RERANKER)
    return tokenizer.reranking


def _cut_len(given: RerankPrompt, room: Room | None, around_len: int) -> int | None:
    """The most tokens of a document; None where none is cut. `around_len`: the tokens that each prompt has
    beside."""
    lens = [] if given.document_tokens_max is None else [given.document_tokens_max]
    if given.prompt_tokens_max is not None:
        most = most_of(room)
        asked = most if given.prompt_tokens_max == CUT_TO_ROOM else given.prompt_tokens_max
        if not around_len < asked <= most:
            bound = f"at most {most}" if asked > most else f"at least {around_len + 1} here"
            raise InvalidRequest(f"{CUT_PARAM} must be {bound}.", param=CUT_PARAM)
        lens.append(asked - around_len)
    return min(lens, default=None)


# -- what all of them share -----------------------------------------------------------------------


def check_room(room: Room | None, tokens: int, place: str) -> None:
    """Raises ContextLengthExceeded or NeverFits where there is no room for so many tokens of one prompt,
    which has what is at `place`."""
    if tokens <= most_of(room):
        return
    if room is None or room.prompt_most >= TOKENS_MAX:
        check_sum(tokens, place)
        return
    error, holds = room.refused(tokens)
    raise error(f"{holds}, and the prompt with {place} has {tokens} or more.", param=place)

"""A request's prompts as token ids, in slices that can be stopped between any two
(`shared.fairness.fair_threads`).

Rules

1. The ids are those that the tokenizer gives for the whole text (`shared.text.text_slices` says why).
2. A prompt that cannot fit is refused as early as that is known: by its length before anything is encoded, or
   in the slice in which the count passes the bound.
3. A job holds the text, the ids so far and the data of one slice; ids are bounded by `TOKENS_MAX`.
"""

from __future__ import annotations

from typing import Final

from shared.apis.holding import TOKENS_MAX
from shared.apis.prompt import CUT_TO_ROOM, ChatPrompt, TextPrompt
from shared.fairness.fair_threads import Slices
from shared.text.fill import no_fill
from shared.text.known_pieces import TenantPieces
from shared.text.text_slices import SLICE_LEN, WHOLE_LEN_MAX
from shared.text.tokenizer import Tokenizer, check_ids
from shared.wire.errors import ApiError, InvalidRequest
from shared.wire.room import Room

CUT_PARAM: Final = "truncate_prompt_tokens"
"""The name of the field by which prompts are cut."""
KNOWN_AT_ONCE: Final = 16
"""Pieces of a text whose ids are known, in one slice: each takes a hundredth of a millisecond and some."""
SLICE_IDS: Final = 16384
"""Token ids of one slice, where a prompt is given as ids: to look at them, or to pack them, takes 0.7 ms."""
CharSpan = tuple[int, int]
"""Characters of a text: the index of the first, and that behind the last."""


def prompt_slices(
    tokenizer: Tokenizer,
    given: ChatPrompt | TextPrompt,
    room: Room | None,
    known: TenantPieces | None = None,
) -> Slices[list[list[int]]]:
    """The ids of a request's prompts, in slices. No prompt may have more tokens than there is room for.
    `known`: the pieces of its tenant, by which a chat is encoded that goes on.

    Raises InvalidRequest; for a prompt that is too long ContextLengthExceeded, or NeverFits.
    """
    param = given.param
    if isinstance(given, ChatPrompt):
        text = yield from tokenizer.template_of(given).slices(given)
        yield
        ids = yield from text_slices(tokenizer, text, room, param, add_special_tokens=False, known=known)
        return _checked([ids], param)
    given.count()
    if given.suffix:
        return (yield from _filled(tokenizer, given, given.suffix, room))
    prompt = [given.prompt] if isinstance(given.prompt, str) else given.prompt
    if isinstance(prompt[0], str):  # all are of one kind
        texts = [item for item in prompt if isinstance(item, str)]
        return (yield from _encoded(tokenizer, given, texts, room))
    lists: list[list[int]] = [prompt] if isinstance(prompt[0], int) else prompt  # type: ignore[list-item,assignment]
    return (yield from _looked_at(given, lists, room))


def _looked_at(given: TextPrompt, lists: list[list[int]], room: Room | None) -> Slices[list[list[int]]]:
    """Prompts that are given as ids."""
    if (cut_len := _cut_len(given, room)) is not None:
        lists = [ids[:cut_len] for ids in lists]
    longest = max(map(len, lists))
    if longest > _most(room):
        at = next(at for at, ids in enumerate(lists) if len(ids) == longest)
        raise _too_long(room, _place(given, at), longest)
    seen_len = 0
    for ids in lists:
        for at in range(0, len(ids), SLICE_IDS):
            part = ids[at : at + SLICE_IDS]
            check_ids(part, given.param)
            seen_len += len(part)
            if seen_len >= SLICE_IDS:
                seen_len = 0
                yield
    return _checked(lists, given.param)


def _encoded(
    tokenizer: Tokenizer, given: TextPrompt, texts: list[str], room: Room | None
) -> Slices[list[list[int]]]:
    """The ids of prompts that are given as texts."""
    if not all(texts):
        raise _empty(given.param)
    cut_len, prompts = _cut_len(given, room), list[list[int]]()
    tokens = encoded_len = 0
    for at, text in enumerate(texts):
        if cut_len is None:
            prompts.append((yield from text_slices(tokenizer, text, room, _place(given, at))))
        else:
            prompts.append((yield from _cut_slices(tokenizer, text, cut_len, given.param)))
        tokens += len(prompts[-1])
        check_sum(tokens, given.param)
        encoded_len += len(text)
        if encoded_len >= SLICE_LEN:
            encoded_len = 0
            yield
    return _checked(prompts, given.param)


def _place(given: TextPrompt, at: int) -> str:
    """The name in errors of a prompt that is too long, among several that are answered each by itself."""
    return given.param if given.is_answered else given.place(at)


def _filled(
    tokenizer: Tokenizer, given: TextPrompt, suffix: str, room: Room | None
) -> Slices[list[list[int]]]:
    """The ids of prompts that a suffix follows."""
    fill = tokenizer.fill
    if fill is None:
        raise no_fill()
    prompt = [given.prompt] if isinstance(given.prompt, str) else given.prompt
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) < len(prompt):
        raise InvalidRequest("suffix needs a prompt that is text.", param="suffix")
    behind = yield from text_slices(tokenizer, fill.lead(suffix), room, "suffix", add_special_tokens=False)
    prompts: list[list[int]] = []
    tokens = 0
    for text in texts:
        prefix = yield from text_slices(tokenizer, text, room, given.param, add_special_tokens=False)
        prompts.append(fill.ids(prefix, behind))
        tokens += len(prompts[-1])
        if len(prompts[-1]) > _most(room):
            raise _too_long(room, given.param, len(prompts[-1]))
        check_sum(tokens, given.param)
        yield
    return prompts


def _cut_len(given: TextPrompt, room: Room | None) -> int | None:
    """The tokens that prompts are cut to. None where they are not cut. Raises InvalidRequest."""
    most = most_of(room)
    if given.cut in (None, CUT_TO_ROOM):
        return None if given.cut is None else most
    assert given.cut is not None
    if given.cut > most:
        raise InvalidRequest(f"{CUT_PARAM} must be at most {most}.", param=CUT_PARAM)
    return given.cut


def _cut_slices(tokenizer: Tokenizer, text: str, cut_len: int, param: str) -> Slices[list[int]]:
    """The first ids of a text, so many with the special tokens around them. No more of it is encoded than
    that takes."""
    if not tokenizer.knows_around:
        raise InvalidRequest(f"{CUT_PARAM} is not supported by this model's tokenizer.", param=CUT_PARAM)
    before, after = tokenizer.around
    own_len = cut_len - len(before) - len(after)
    if own_len < 1:
        least = len(before) + len(after) + 1
        raise InvalidRequest(f"{CUT_PARAM} must be at least {least} here.", param=CUT_PARAM)
    ids = yield from part_slices(tokenizer, text, None, param, own_len)
    return [*before, *ids, *after]


def text_slices(
    tokenizer: Tokenizer,
    text: str,
    room: Room | None,
    param: str,
    *,
    add_special_tokens: bool = True,
    known: TenantPieces | None = None,
) -> Slices[list[int]]:
    """The ids of `Tokenizer.encode`, in slices. `param` names the text in errors, which are those of
    `prompt_slices`."""
    most, slicer = _most(room), tokenizer.slicer
    if slicer is not None and len(text) > most * slicer.longest:
        raise _too_long(room, param, -(-len(text) // slicer.longest))
    if slicer is None or len(text) <= SLICE_LEN:
        if len(text) > WHOLE_LEN_MAX:
            message = (
                f"There are more than {WHOLE_LEN_MAX} characters in {param}, the most that this model's "
            )
            raise InvalidRequest(f"{message}tokenizer takes at once.", param=param)
        ids = tokenizer.encode(text, add_special_tokens)
        if len(ids) > most:
            raise _too_long(room, param, len(ids))
        return ids
    before, after = tokenizer.around if add_special_tokens else ((), ())
    ids = list(before)
    for number, piece in enumerate(slicer.slices(text), 1):
        if known is None or len(piece) < SLICE_LEN:  # the last one grows with the next turn
            more, is_known = tokenizer.encode(piece, add_special_tokens=False), False
        else:
            more, is_known = known.encode(tokenizer, piece)
        ids += more
        if len(ids) > most:
            raise _too_long(room, param, len(ids))
        if not is_known or not number % KNOWN_AT_ONCE:
            yield
    return [*ids, *after]


def part_slices(
    tokenizer: Tokenizer, text: str, room: Room | None, param: str, cut_len: int | None
) -> Slices[list[int]]:
    """The ids of a part of a prompt; where `cut_len` is given the first so many, and no more of it is encoded
    than that takes."""
    slicer = tokenizer.slicer
    if cut_len is None or slicer is None or len(text) <= SLICE_LEN:
        bound = room if cut_len is None else None
        ids = yield from text_slices(tokenizer, text, bound, param, add_special_tokens=False)
        return ids[:cut_len]
    ids = []
    for piece in slicer.slices(text):
        ids += tokenizer.encode(piece, add_special_tokens=False)
        if len(ids) >= cut_len:
            break
        yield
    return ids[:cut_len]


def most_of(room: Room | None) -> int:
    """The most tokens of a prompt behind which nothing is generated."""
    return TOKENS_MAX if room is None else min(room.prompt_most, TOKENS_MAX)


def check_sum(tokens: int, param: str) -> None:
    """Raises InvalidRequest where all prompts together have too many tokens."""
    if tokens > TOKENS_MAX:
        raise _too_many(param)


def span_slices(tokenizer: Tokenizer, text: str) -> Slices[tuple[list[int], list[CharSpan]]]:
    """The ids and spans of `Tokenizer.encode_spans`, in slices, for a text that is known to fit."""
    slicer = tokenizer.slicer
    if slicer is None or len(text) <= SLICE_LEN:
        return tokenizer.encode_spans(text)
    before, after = tokenizer.around
    ids, spans, at = list(before), [(0, 0)] * len(before), 0
    for piece in slicer.slices(text):
        at = text.index(piece, at)  # where the one before ends, or behind the space between them
        more, own = tokenizer.encode_spans(piece, add_special_tokens=False)
        ids += more
        spans += [(at + start, at + end) for start, end in own]
        at += len(piece)
        yield
    return [*ids, *after], [*spans, *[(0, 0)] * len(after)]


def _checked(prompts: list[list[int]], param: str) -> list[list[int]]:
    if not all(prompts):
        raise _empty(param)
    return prompts


def _empty(param: str) -> ApiError:
    return InvalidRequest(f"{param} must not be empty.", param=param)


def _most(room: Room | None) -> int:
    """The most tokens of one prompt."""
    return TOKENS_MAX if room is None else min(room.most, TOKENS_MAX)


def _too_long(room: Room | None, param: str, tokens: int) -> ApiError:
    """The error of a prompt that has so many tokens, or more."""
    if room is None or room.most >= TOKENS_MAX:
        return _too_many(param)
    error, holds = room.refused(tokens)
    return error(f"{holds}, and there are more in {param}.", param=param)


def _too_many(param: str) -> ApiError:
    return InvalidRequest(f"There are more than {TOKENS_MAX} tokens in {param}.", param=param)

"""Random answers under a grammar: what a model of noise writes, token by token, through the masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.contract.grammars import Matcher, Vocabulary, compiled, failure, vocabulary_of

EOS: Final = "<|im_end|>"
MARKS: Final = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<response>", "</response>"),
    *("<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<|python_tag|>", "<|start|>", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|call|>", "<|end|>"),
)
"""The marks of all families that are tokens in their models' vocabularies."""
SPECIAL: Final = (EOS, "<|im_start|>", *MARKS)
CORPUS: Final = ['{"name": "value", "items": [1, 2.5, true, false, null]}', "the quick brown fox, 0123456789"]
VOCAB_SIZE: Final = 384
"""More than there are tokens, as models' logits have them."""
NAMES: Final = ["name", "value", "items", "a b", 'quo"te', "é", "x/y", "type", "n1", "n2"]
PATTERNS: Final = ["^[a-z]{2,5}$", "^a/b+$", r"^\d{3}-\d{2}$", "^(x|yz)*$", "q"]
TOKENS_MAX: Final = 700
_BITS: Final = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
_ENDING: Final = frozenset('"}]),\n>')


@cache
def tokenizer(*, marked: bool = True) -> tokenizers.Tokenizer:
    """`marked`: the families' marks are tokens."""
    special = SPECIAL if marked else SPECIAL[: -len(MARKS)]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(special),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def token_id(mark: str) -> int:
    found = tokenizer().token_to_id(mark)
    assert found is not None
    return found


@cache
def vocabulary(*, marked: bool = True) -> Vocabulary:
    return vocabulary_of(tokenizer(marked=marked).to_str(), VOCAB_SIZE, [token_id(EOS)])


@cache
def _liking(*, marked: bool) -> list[float]:
    made = tokenizer(marked=marked)
    texts = [made.decode([i], skip_special_tokens=False) for i in range(made.get_vocab_size())]
    return [4.0 if _ENDING & set(text) else 0.3 for text in texts]


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.compute_bitmask()
    assert not failure(matcher), failure(matcher)
    return [8 * at + bit for at, byte in enumerate(mask) if byte for bit in _BITS[byte]]


def walk(
    grammar: str, rng: random.Random, likes: Sequence[str] = (), *, marked: bool = True
) -> list[int] | None:
    """One answer's tokens without its end, or None if it does not end in time. So that most do, tokens that
    close something come more often than others, and now and then one of the texts `likes`."""
    matcher = compiled(vocabulary(marked=marked), grammar)
    liking, eos, answer, liked = _liking(marked=marked), token_id(EOS), list[int](), list[int]()
    for _ in range(TOKENS_MAX):
        choices = allowed(matcher)
        assert choices, "a mask without a token"
        assert max(choices) < len(liking), "a token that the tokenizer does not have"
        if likes and not liked and rng.random() < 0.2:
            liked = tokenizer(marked=marked).encode(rng.choice(likes)).ids[::-1]
        if liked and liked[-1] in choices:
            token = liked.pop()
        else:
            liked = []
            weights = [8.0 if i == eos else liking[i] for i in choices]
            (token,) = rng.choices(choices, weights)
        if token == eos:
            return answer
        assert matcher.consume_token(token), failure(matcher)
        answer.append(token)
    return None


def text_of(tokens: list[int], *, marked: bool = True) -> str:
    text: str = tokenizer(marked=marked).decode(tokens, skip_special_tokens=False)
    return text


# -- schemas ------------------------------------------------------------------------------------------


def schema(rng: random.Random, *, strict: bool, depth: int = 3) -> dict[str, Any]:
    """A schema that can be held whole: of an object, with all kinds of values within."""
    made = _object(rng, strict, depth)
    made["$defs"] = {"node": _node(strict), "leaf": _leaf(rng)}
    return made


def _object(rng: random.Random, strict: bool, depth: int) -> dict[str, Any]:
    names = rng.sample(
        ["name", "value", "items", "a b", 'quo"te', "é", "x/y", "type", "n1", "n2"], rng.randint(0, 5)
    )
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, strict, depth - 1) for name in names},
    }
    if strict:
        return {**made, "required": names, "additionalProperties": False}
    made["required"] = [name for name in names if rng.random() < 0.5]
    if rng.random() < 0.7:
        made["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    return made


def _value(rng: random.Random, strict: bool, depth: int) -> dict[str, Any]:
    kinds = ["leaf"] * 5 + (["object", "array", "union", "ref", "recursive"] if depth > 0 else [])
    match rng.choice(kinds):
        case "object":
            return _object(rng, strict, depth)
        case "array":
            most = rng.randint(0, 4)
            return {
                "type": "array",
                "items": _value(rng, strict, depth - 1),
                "minItems": rng.randint(0, most),
            } | ({"maxItems": most} if rng.random() < 0.7 else {})
        case "union":
            return {"anyOf": [_value(rng, strict, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            return {"$ref": "#/$defs/leaf"}
        case "recursive":
            return {"$ref": "#/$defs/node"}
    return _leaf(rng)


def _node(strict: bool) -> dict[str, Any]:
    below = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": below}}
    return {**node, "required": ["v", "next"], "additionalProperties": False}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 12)},
            {
                "type": "string",
                "pattern": rng.choice(PATTERNS),
            },
            {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4", "email", "time"])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "number", "exclusiveMinimum": low},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 7, 10])},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"enum": ["a", 1, 2.5, None, True, "sl/ash\n", {"k": [1]}]},
            {"const": rng.choice(["only", 7, False, "%json {"])},
        ]
    )

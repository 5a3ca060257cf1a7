"""Whatever a tokenizer's files say: the ids and texts of transformers' AutoTokenizer, or a refusal by name.

Directories are drawn from seeds: tokens declared in one file, in another, in both, with other flags, as text
and as objects. transformers decides; where it raises, nothing is compared. Each is asked for the ids of texts
with special tokens in them, for a chat that names special tokens, and for text decoded with and without them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.fairness.fair_threads import at_once
from shared.text.tokenizer import Tokenizer, TokenizerBundle, UnusableTokenizer
from tests import effort
from tests.shared.text.toy_tokenizers import byte_level, sentencepiece, with_bos

pytestmark = pytest.mark.slow

DRAWN = effort.drawn(60, whole=120)
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}|{{ image_token }}|"
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<new>{% endfor %}"
)
TEXTS = (
    "plain text",
    "a<new>b <new> c",
    "<s>Hi<|im_start|>you</s> <pad><|im_end|>",
    "water<mask>the <unk> valve<sep>x",
    "<img>a< new ><extra>b<extra1>The the",
    "NEW new <tool> x",
)
CONTENTS = ("<new>", "<pad>", "<mask>", "<sep>", "<img>", "<extra>", "<extra1>", "<tool>", "the", "NEW")
KNOWN = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "image_token",
)
Files = Mapping[str, dict[str, Any]]


def tokenizer_json(rng: random.Random, spec: Mapping[str, Any]) -> str:
    """With other flags for some of its tokens, and some of them missing there."""
    tokens = [
        token
        | ({"special": rng.random() < 0.5, "normalized": rng.random() < 0.5} if rng.random() < 0.2 else {})
        for token in spec["added_tokens"]
        if token["content"] == "<s>" or rng.random() < 0.9
    ]
    return json.dumps(dict(spec) | {"added_tokens": tokens})


def token_object(rng: random.Random, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = {name: rng.random() < 0.15 for name in ("lstrip", "rstrip", "single_word")}
    found = {"content": content, "normalized": rng.random() < 0.2, **flags}
    return found | ({"special": rng.random() < 0.6} if special else {})


def named_token(rng: random.Random, *, with_objects: bool) -> Any:
    content = rng.choice([*CONTENTS, *KNOWN, *KNOWN])
    if rng.random() < 0.7:
        return content
    found = token_object(rng, content, special=False)
    return found if with_objects else {"__type": "AddedToken"} | found


def drawn(rng: random.Random, vocab_size: int) -> dict[str, dict[str, Any]]:
    """The files beside tokenizer.json."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    for name in NAMES:
        if rng.random() < 0.35:
            config[name] = rng.choice([None, named_token(rng, with_objects=False)])
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if rng.random() < 0.3:
            config[name] = rng.sample([*CONTENTS, *KNOWN], rng.randint(0, 3))
    if rng.random() < 0.1:
        config["extra_special_tokens"] = {"image_token": "<img>", "own_token": rng.choice(CONTENTS)}
    files = {"tokenizer_config.json": config}
    vocab_size += 7 * (rng.random() < 0.1)  # then ids are declared that cannot be had
    if rng.random() < 0.4:
        own = {str(i): token_object(rng, content) for i, content in enumerate(KNOWN) if rng.random() < 0.5}
        new = {
            str(vocab_size + i): token_object(rng, content)
            for i, content in enumerate(rng.sample(["<new>", "<tool>", "<extra>"], rng.randint(0, 3)))
        }
        config["added_tokens_decoder"] = own | new
    if rng.random() < 0.5:
        special: dict[str, Any] = {
            name: named_token(rng, with_objects=True) for name in NAMES if rng.random() < 0.3
        }
        if rng.random() < 0.3:
            special["additional_special_tokens"] = rng.sample(CONTENTS, 2)
        files["special_tokens_map.json"] = special
    if rng.random() < 0.4:
        contents = rng.sample(["<new>", "<tool>", "<extra>", "<mask>"], rng.randint(0, 3))
        files["added_tokens.json"] = {content: vocab_size + i for i, content in enumerate(contents)}
    idle = {"clean_up_tokenization_spaces": True, "legacy": False, "add_bos_token": True}
    config |= {name: value for name, value in idle.items() if rng.random() < 0.1}
    return files


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def write(directory: Path, text: str, files: Files) -> Path:
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (directory / name).unlink(missing_ok=True)
    (directory / "tokenizer.json").write_text(text)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def theirs(directory: Path) -> Any:
    """None where transformers cannot load it."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(directory)
    except Exception:  # any: the oracle has no answer
        return None


def compare(oracle: Any, ours: Tokenizer, files: Files) -> None:
    assert len(oracle) <= ours.vocab_size
    for text in TEXTS:
        for add_special_tokens in (True, False):
            expected = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert ours.encode(text, add_special_tokens) == expected, (text, files)
    content = "a<new>b <s>"
    rendered = oracle.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    request = ChatRequest(model="m", messages=[ChatMessage(role="user", content=content)])
    assert at_once(ours.template_of(request.prompt_form).slices(request.prompt_form)) == rendered, files
    expected = [oracle(rendered, add_special_tokens=False)["input_ids"]]
    assert ours.prompt_ids(request.prompt_form) == expected, files
    ids = oracle(" ".join(TEXTS), add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip), files
        stream = ours.decode_stream([], skip)
        assert "".join(map(stream.step, ids)) == ours.decode(ids, skip), files


ADDING: Mapping[str, Files] = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {"added_tokens_decoder": {"379": {"content": "<new>", "special": True}}}
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<new>"]}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<new>"]}},
    "eos_token": {"tokenizer_config.json": {"eos_token": "<new>"}},
    "a name of its own": {"tokenizer_config.json": {"image_token": "<new>"}},
    "special_tokens_map.json": {"special_tokens_map.json": {"pad_token": {"content": "<new>"}}},
    "added_tokens.json": {"added_tokens.json": {"<new>": 379}},
}


@pytest.mark.parametrize("files", ADDING.values(), ids=ADDING)
def test_a_token_that_tokenizer_json_does_not_have(directory: Path, files: Files) -> None:
    made = with_bos(byte_level())
    assert made.get_vocab_size() == 379
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    written = {**files, "tokenizer_config.json": plain | files.get("tokenizer_config.json", {})}
    oracle = theirs(write(directory, made.to_str(), written))
    ours = Tokenizer(TokenizerBundle.from_dir(directory))
    assert ours.encode("a<new>b", add_special_tokens=False)[1] == 379
    assert ours.vocab_size == 380
    compare(oracle, ours, files)


def test_a_token_that_only_configuration_says_is_special(directory: Path) -> None:
    """Then answers leave it out."""
    spec = json.loads(with_bos(byte_level()).to_str())
    spec["added_tokens"] = [token | {"special": token["id"] < 3} for token in spec["added_tokens"]]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {"4": {"content": "<|im_end|>", "special": True}},
    }
    files = {"tokenizer_config.json": config}
    oracle = theirs(write(directory, json.dumps(spec), files))
    ours = Tokenizer(TokenizerBundle.from_dir(directory))
    assert ours.decode([3, 4]) == "<|im_start|>"
    compare(oracle, ours, files)


@contextmanager
def refusal_by(kind: type[Exception]) -> Iterator[list[str]]:
    """What was said by an error of this kind, if there was one."""
    said: list[str] = []
    try:
        yield said
    except kind as error:
        said.append(str(error))


@pytest.mark.parametrize("seed", range(effort.drawn(2, whole=4)))
def test_drawn_files_give_what_transformers_gives(directory: Path, seed: int) -> None:
    rng, outcomes = random.Random(seed), Counter[str]()
    made = with_bos(byte_level() if seed % 2 else sentencepiece())
    spec, vocab_size = json.loads(made.to_str()), made.get_vocab_size()
    for _ in range(DRAWN):
        files = drawn(rng, vocab_size)
        oracle = theirs(write(directory, tokenizer_json(rng, spec), files))
        if oracle is None:
            outcomes["no oracle"] += 1
            continue
        with refusal_by(UnusableTokenizer) as refusal:
            compare(oracle, Tokenizer(TokenizerBundle.from_dir(directory)), files)
        outcomes["refused" if refusal else "equal"] += 1
        assert all("is declared as" in text for text in refusal), (refusal, files)
    assert outcomes["equal"] >= DRAWN // 2, outcomes
    assert outcomes["refused"] >= DRAWN // 24, outcomes

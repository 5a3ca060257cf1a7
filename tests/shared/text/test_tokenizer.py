from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay import checked_bundles
from gateway.relay.checked_bundles import check  # before tests are told to do without a process
from gateway.relay.tokenizer_child import checked
from shared.apis.chat_messages import ChatMessage, TextPart
from shared.apis.prompt import ChatPrompt, TextPrompt
from shared.fairness.fair_threads import at_once
from shared.text import tokenizer as tokenizer_module
from shared.text.chat_template import MESSAGE_LEN_MAX
from shared.text.prompts import prompt_slices
from shared.text.template_takes import Takes
from shared.text.tokenizer import (
    REASON_LEN_MAX,
    TEMPLATE_LEN_MAX,
    Tokenizer,
    TokenizerBundle,
    UnusableTokenizer,
)
from shared.wire.errors import ApiError, InternalError, InvalidRequest, NotInPlace, TokenizerFailed
from tests.shared.text.chat_templates import CHATML, MISTRAL, TEMPLATES
from tests.shared.text.toy_tokenizers import (
    BOTH,
    BYTE_LEVEL,
    SENTENCEPIECE,
    SPECIALS,
    bundle_of,
    byte_level,
    sentencepiece,
    streamed,
    with_bos,
)

# -- chat templates, against transformers ---------------------------------------------------------


def says(*turns: str) -> list[ChatMessage]:
    """`says("s:Be brief.", "u:Hi")`."""
    roles: dict[str, Any] = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [ChatMessage(role=roles[turn[0]], content=turn[2:]) for turn in turns]


def rendered(tokenizer: Tokenizer, messages: list[ChatMessage]) -> str:
    prompt = ChatPrompt(messages)
    return at_once(tokenizer.template_of(prompt).slices(prompt))


CHATS = [
    says("u:Hi"),
    says("s:Be brief.", "u:What is 2 + 2? "),
    says("u:  Größe 🌊\n", "a:水", "u:<b>&amp;</b> '\"{{ 1 }} {% if %}"),
    says("s: Be <kind>. ", "u:a", "a:b", "u:c", "a:d", "u:e"),
    [
        *says("u:a"),
        ChatMessage("assistant", "b", reasoning_content="Hm. "),
        ChatMessage("user", "c", name="ann"),
        ChatMessage("assistant", "d", name="bot"),
        *says("u:e"),
    ],
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_render_and_encode_as_transformers_does(name: str, messages: list[ChatMessage]) -> None:
    from transformers import PreTrainedTokenizerFast

    bundle = msgspec.structs.replace(bundle_of(with_bos(byte_level()), TEMPLATES[name]), takes=Takes())
    oracle: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(bundle.tokenizer_json),
        chat_template=bundle.chat_template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    ours = Tokenizer(bundle)
    plain = [
        {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
        for message in messages
    ]
    text = oracle.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert rendered(ours, messages) == text
    ids = oracle.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert at_once(prompt_slices(ours, ChatPrompt(messages), None)) == [ids]


def test_a_template_that_writes_bos_gets_it_once() -> None:
    ours = Tokenizer(bundle_of(with_bos(byte_level()), "{{ bos_token }}{{ messages[0].content }}"))
    (ids,) = ours.prompt_ids(ChatPrompt(says("u:Hi")))
    assert ids == ours.encode("Hi") == [0, *ours.encode("Hi", add_special_tokens=False)]


OWN_NAME = "'dev' if m.role == 'developer' else m.role"


def test_parts_names_developers_and_reasoning_reach_the_template() -> None:
    of_each = "{{ m.role }}:{{ m.content }}:{{ m.name or m.reasoning_content }};"
    template = f"{{% for m in messages %}}{of_each}{{% endfor %}}"
    messages = [
        ChatMessage(role="developer", content="x"),
        ChatMessage(role="user", content=[TextPart("a"), TextPart("b")], name="ann"),
        ChatMessage(role="assistant", content="c", reasoning_content="hm"),
    ]
    ours = Tokenizer(bundle_of(byte_level(), template))
    assert rendered(ours, messages) == "system:x:;user:ab:ann;assistant:c:hm;"
    knowing = Tokenizer(bundle_of(byte_level(), template.replace("m.role", OWN_NAME)))
    assert rendered(knowing, messages) == "dev:x:;user:ab:ann;assistant:c:hm;"


def refusal(template: str | None, *turns: str, param: str = "messages") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        rendered(Tokenizer(bundle_of(byte_level(), template)), says(*(turns or ("u:secret",))))
    assert caught.value.param == param
    assert "secret" not in caught.value.message + str(caught.value.detail)
    return caught.value


def test_a_template_may_refuse() -> None:
    refused = refusal(MISTRAL, "u:a", "a:b", "t:c", param="messages[2]")
    assert "roles must alternate" in refused.message
    long = refusal(f"{{{{ raise_exception('no ' * {MESSAGE_LEN_MAX}) }}}}")
    assert len(long.message) == MESSAGE_LEN_MAX


def test_no_template_is_said_clearly() -> None:
    assert "no chat template" in refusal(None).message


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.x.y }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0]['content'].nope() }}",
        "{{ messages[0].__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ 'x' * 10**9 }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * ['x'] }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'etc/passwd' %}",
        "{% for i in range(20) %}{{ 'x' * 1000000 }}{% endfor %}",
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(template: str) -> None:
    refusal(template)


# -- bundles --------------------------------------------------------------------------------------


def write_model(path: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    (path / "tokenizer.json").write_text(byte_level().to_str())
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("config", "files", "template"),
    [
        (None, {}, None),
        ({"chat_template": "one"}, {}, "one"),
        (
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            {},
            "d",
        ),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, {}, None),
        ({"chat_template": "one"}, {"chat_template__jinja": "file"}, "file"),
        ({"chat_template": "one"}, {"chat_template__json": '{"chat_template": "json"}'}, "one"),
        ({}, {"chat_template__json": '{"chat_template": "json"}'}, "json"),
        ({"chat_template": {"default": "d", "tool_use": "t"}}, {}, "d"),
    ],
)
def test_the_template_is_found(
    tmp_path: Path, config: dict[str, Any] | None, files: dict[str, str], template: str | None
) -> None:
    assert TokenizerBundle.from_dir(write_model(tmp_path, config, **files)).chat_template == template


@pytest.mark.parametrize("template", [5, [1], [{"name": "default", "template": 5}], {"default": 5}])
@pytest.mark.parametrize("file", ["tokenizer_config", "chat_template"])
def test_a_template_that_is_none_is_refused_by_the_names_of_file_and_key(
    tmp_path: Path, file: str, template: object
) -> None:
    config = {"chat_template": template} if file == "tokenizer_config" else {}
    files = {} if config else {"chat_template__json": json.dumps({"chat_template": template})}
    with pytest.raises(UnusableTokenizer, match=f"{file}.json: chat_template is neither"):
        TokenizerBundle.from_dir(write_model(tmp_path, config, **files))


def test_special_tokens_are_text_or_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    extra = {"special_tokens_map__json": '{"unk_token": "<unk>", "eos_token": "other"}'}
    bundle = TokenizerBundle.from_dir(write_model(tmp_path, config, **extra))
    assert (bundle.bos_token, bundle.eos_token, bundle.pad_token, bundle.unk_token) == (
        "<s>",
        "other",
        None,
        "<unk>",
    )


def test_an_unusable_directory_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match=r"no tokenizer\.json"):
        TokenizerBundle.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableTokenizer, match="cannot be loaded"):
        Tokenizer(TokenizerBundle.from_dir(tmp_path))
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(UnusableTokenizer, match="tokenizer_config"):
            TokenizerBundle.from_dir(tmp_path)


def test_what_a_file_says_of_itself_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("x" * 2 * REASON_LEN_MAX)

    monkeypatch.setattr(Tokenizer, "_load", fails)
    with pytest.raises(UnusableTokenizer) as caught:
        Tokenizer(bundle_of(byte_level(), None))
    assert str(caught.value).count("x") < REASON_LEN_MAX


def test_a_broken_template_is_found_when_loading() -> None:
    with pytest.raises(UnusableTokenizer, match="does not compile"):
        Tokenizer(bundle_of(byte_level(), "{% for %}"))


def test_the_hash_survives_the_hop_and_tells_bundles_apart() -> None:
    bundle = bundle_of(byte_level(), CHATML)
    there = msgspec.json.decode(msgspec.json.encode(bundle), type=TokenizerBundle)
    assert there == bundle
    assert there.hash == bundle.hash == Tokenizer(bundle, hash_=bundle.hash).hash
    assert Tokenizer(there).hash == Tokenizer(bundle).hash == Tokenizer(bundle).bundle.hash
    assert bundle.hash.startswith("sha256:")
    assert (
        len({bundle.hash, bundle_of(byte_level(), None).hash, bundle_of(sentencepiece(), CHATML).hash}) == 3
    )


def test_truncation_and_padding_of_the_file_are_off() -> None:
    made = byte_level()
    made.enable_truncation(2)
    made.enable_padding(length=64)
    assert len(Tokenizer(bundle_of(made)).encode("one two three four")) in range(3, 20)


# -- panics ---------------------------------------------------------------------------------------


def panicking(*added_tokens: dict[str, Any]) -> Tokenizer:
    spec = json.loads(byte_level().to_str()) | {"decoder": JOINED, "added_tokens": added_tokens}
    return Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(spec)))


STRIPS = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
"""Behind a decoder that joins tokens it panics on an empty text."""
JOINED = {"type": "Sequence", "decoders": [{"type": "Fuse"}, STRIPS]}


def test_a_panic_of_the_library_is_an_ordinary_error_without_its_words() -> None:
    """To Python it is a BaseException, which would end the connection; its text may be the prompt's."""
    tokenizer = panicking()
    with pytest.raises(BaseException, match="index out of bounds"):
        tokenizer.raw.decode([])
    with pytest.raises(TokenizerFailed) as caught:
        tokenizer.decode([])
    assert isinstance(caught.value, InternalError)
    assert caught.value.detail == "the tokenizers library panicked"
    assert caught.value.__suppress_context__


def test_other_errors_pass() -> None:
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), tokenizer_module._LIBRARY:
            raise error


def test_a_tokenizer_that_panics_is_found_before_the_first_answer() -> None:
    with pytest.raises(TokenizerFailed):
        panicking().probe()
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    with pytest.raises(UnusableTokenizer, match="cannot be loaded: the tokenizers library panicked"):
        panicking({"id": 0, "content": "<s>", "special": True, **flags})
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        tokenizer.probe()


# -- prompts --------------------------------------------------------------------------------------


@BOTH
def test_every_kind_of_prompt_is_encoded(tokenizer: Tokenizer) -> None:
    def ids(prompt: Any) -> list[list[int]]:
        return tokenizer.prompt_ids(TextPrompt(prompt))

    one, two = tokenizer.encode("one"), tokenizer.encode("two")
    assert one[0] == 0
    assert ids("one") == [one]
    assert ids(["one", "two"]) == [one, two]
    assert ids([3, 1, 2]) == [[3, 1, 2]]
    assert ids([[3], [1, 2]]) == [[3], [1, 2]]


@BOTH
@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, [1]]])
def test_empty_and_mixed_prompts_are_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.prompt_ids(TextPrompt(prompt))
    assert caught.value.param == "prompt"


@BOTH
def test_token_ids_are_checked(tokenizer: Tokenizer) -> None:
    for fine in (tokenizer.vocab_size, 2**31 - 1):  # a model may have more tokens than its tokenizer
        tokenizer.prompt_ids(TextPrompt([0, fine]))
    for bad in (-1, 2**31, 2**40):
        with pytest.raises(InvalidRequest) as caught:
            tokenizer.prompt_ids(TextPrompt([[1], [0, bad]]))
        assert (caught.value.param, "between 0 and 2147483647" in caught.value.message) == ("prompt", True)


# -- tokens and their bytes -----------------------------------------------------------------------


@BOTH
@given(text=st.text(max_size=30))
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    spaced = (
        " " if tokenizer is SENTENCEPIECE and ids and not any(special in text for special in SPECIALS) else ""
    )
    assert joined.lstrip(" ") == (spaced + text).replace("▁", " " if spaced else "▁").lstrip(" ")


@BOTH
def test_special_and_absent_tokens_have_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(3) == b"<|im_start|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_pieces_of_characters_are_told_apart() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("✔", add_special_tokens=False)]
        assert b"".join(pieces).strip() == "✔".encode()
        assert len(pieces) >= 3


# -- streams --------------------------------------------------------------------------------------


@BOTH
def test_bytes_that_are_no_character_do_not_hold_up_the_rest(tokenizer: Tokenizer) -> None:
    start = tokenizer.encode("✔", add_special_tokens=False)[-3]
    assert tokenizer.token_bytes(start) == b"\xe2"
    text = streamed(tokenizer, [], [start] * 20)
    assert len("".join(text)) >= 16
    then = tokenizer.encode("The water", add_special_tokens=False)
    assert "".join(streamed(tokenizer, [], [start] * 20 + then)).endswith("The water")
    assert "".join(streamed(tokenizer, [start] * 20, then)).strip() == "The water"


def test_a_byte_that_spoils_those_before_it_fails_no_stream() -> None:
    """Byte fallback decodes a run of byte tokens as one: é, which has left already, is undone by E2."""
    e_acute = SENTENCEPIECE.encode("é", add_special_tokens=False)[-2:]
    (e2, *_) = SENTENCEPIECE.encode("✔", add_special_tokens=False)[-3:]
    then = SENTENCEPIECE.encode("The end", add_special_tokens=False)
    assert SENTENCEPIECE.decode([*e_acute, e2, *then]).startswith("\N{REPLACEMENT CHARACTER}" * 3)
    assert "".join(streamed(SENTENCEPIECE, [], [*e_acute, e2, *then])) == "é\N{REPLACEMENT CHARACTER} The end"


class Counting:
    """The library's tokenizer, and how many ids were decoded by the call that keeps other threads waiting."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        self.held = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.held += len(ids)
        text: str = self._raw.decode(ids, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


@BOTH
@pytest.mark.parametrize("skips", [True, False])
def test_many_ids_are_decoded_while_other_threads_run(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, skips: bool
) -> None:
    ids = [at % tokenizer.vocab_size for at in range(5000)]
    expected = tokenizer.raw.decode(ids, skip_special_tokens=skips)
    counting = Counting(tokenizer.raw)
    monkeypatch.setattr(tokenizer, "raw", counting)
    assert tokenizer.decode(ids, skips) == expected
    assert counting.held == 0


# -- files of replicas ----------------------------------------------------------------------------

MUTATIONS = int(os.environ.get("TOKENIZER_MUTATIONS", "300"))
"""Files that differ from good ones in a few places. 20,000 take a minute."""
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    "",
    "x" * 50,
    [],
    [[]],
    {},
    {"type": "NFC"},
    {"type": None},
    ["a", 1],
)


def mutated(spec: Any, draw: random.Random) -> Any:
    """A JSON value with one value in it replaced, left out, given twice or given another name."""
    inner = [*(spec.items() if isinstance(spec, dict) else enumerate(spec))] if spec else []
    deeper = [(at, value) for at, value in inner if isinstance(value, dict | list) and value]
    if deeper and draw.random() < 0.8:
        at, value = draw.choice(deeper)
        changed = {at: mutated(value, draw)}
        return spec | changed if isinstance(spec, dict) else [changed.get(i, one) for i, one in inner]
    if not inner:
        return draw.choice(ODD)
    at, _ = draw.choice(inner)
    match draw.randrange(3), spec:
        case 0, dict():
            return {name: value for name, value in inner if name != at}
        case 1, dict():
            return {f"{name}x" if name == at else name: value for name, value in inner}
        case 2, dict():
            return spec | {at: draw.choice(ODD)}
        case _:
            return [draw.choice(ODD) if i == at else one for i, one in inner]


@pytest.mark.parametrize("name", ["byte-level", "SentencePiece"])
def test_a_file_with_a_mistake_is_usable_or_said_to_be_not(name: str) -> None:
    """Whatever is in it: nothing else is raised, nor later by what is made of it."""
    draw = random.Random(7)
    good = json.loads((byte_level() if name == "byte-level" else sentencepiece()).to_str())
    usable = 0
    for _ in range(MUTATIONS // 2):
        spec = good
        for _ in range(draw.randint(1, 3)):
            spec = mutated(spec, draw)
        data = msgspec.json.encode(TokenizerBundle(tokenizer_json=json.dumps(spec), chat_template=CHATML))
        found, text = checked(data)
        assert found.hash
        if found.bundle is None:
            assert len(found.problem) < 500
            continue
        usable += 1
        _, bundle = checked_bundles.outcome(found, text)
        assert isinstance(bundle, checked_bundles.CheckedBundle)
        with contextlib.suppress(ApiError):
            assert bundle.load().prompt_ids(ChatPrompt(says("u:Hello, 12!")))
    assert usable, "some mistakes are none"


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"tokenizer_json": 1}', b'{"tokenizer_json": "{}", "named_tokens": {"a": 1}}'],
)
def test_what_is_no_bundle_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(checked_bundles.Unreadable):
        checked_bundles.outcome(*checked(data))


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor"])
def test_parts_without_a_type_as_older_files_have_them_are_no_error(part: str) -> None:
    spec = json.loads(byte_level().to_str())
    spec[part] = {
        "normalizer": {
            "lowercase": True,
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
        },
        "pre_tokenizer": {"add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }[part]
    try:
        tokenizer = Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(spec)))
    except UnusableTokenizer:
        return  # the library takes no such part
    assert tokenizer.prompt_ids(TextPrompt("a"))


def checked_apart(data: bytes, *argv: tuple[str, ...]) -> tuple[str, checked_bundles.CheckedBundle | str]:
    with checked_bundles.bundle_file() as file:
        file.write(data)
        return check(file, *argv)


def test_a_process_of_its_own_finds_what_is_found_here() -> None:
    good = bundle_of(byte_level(), CHATML)
    hash_, found = checked_apart(msgspec.json.encode(good))
    assert isinstance(found, checked_bundles.CheckedBundle)
    tokenizer = found.load()
    assert tokenizer.hash == hash_ == good.hash
    assert tokenizer.encode("The water") == Tokenizer(good).encode("The water")
    doubtful = msgspec.structs.replace(good, chat_template="{{ messages|center(9) }}")
    _, found = checked_apart(msgspec.json.encode(doubtful))
    assert isinstance(found, checked_bundles.CheckedBundle), "what it logs is no answer"


def test_a_process_of_its_own_says_what_is_wrong() -> None:
    long = bundle_of(byte_level(), "x" * (TEMPLATE_LEN_MAX + 1))
    hash_, problem = checked_apart(msgspec.json.encode(long))
    assert hash_ == long.hash
    assert isinstance(problem, str)
    assert "chat template has more than" in problem


def test_the_process_has_a_bounded_memory_and_little_of_the_processor() -> None:
    code = (
        "import os, resource; from gateway.relay import tokenizer_child as child;"
        "child.checked = lambda data: (child.Checked(hash=str("
        "[resource.getrlimit(resource.RLIMIT_AS)[0], os.nice(0)])), b'');"
        "child.main()"
    )
    hash_, _ = checked_apart(b"", (sys.executable, "-P", "-c", code))
    limit, nice = json.loads(hash_)
    assert limit == checked_bundles.MEMORY_MAX
    assert nice == min(19, os.nice(0) + checked_bundles.NICE)


@pytest.mark.parametrize("argv", [("/bin/false",), ("/bin/cat",)])
def test_a_process_that_dies_or_babbles_means_a_tokenizer_of_no_use(argv: tuple[str, ...]) -> None:
    hash_, problem = checked_apart(b"{}" * 50, argv)
    assert (hash_, problem) == ("", "the tokenizer cannot be loaded: it ends the process that tries")


def test_a_tokenizer_that_backtracks_is_used_in_place_once() -> None:
    spec = json.loads(byte_level().to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    tokenizer = Tokenizer(TokenizerBundle(tokenizer_json=json.dumps(spec)))
    request = TextPrompt("a" * 22 + "!")
    assert tokenizer.slicer is None
    ids = tokenizer.prompt_ids(request)
    with pytest.raises(NotInPlace):
        tokenizer.prompt_ids(request)
    assert at_once(prompt_slices(tokenizer, request, None)) == ids

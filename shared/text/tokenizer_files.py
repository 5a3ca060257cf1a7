"""A tokenizer's files, put together as transformers' AutoTokenizer puts them together.

Rules:

1. tokenizer.json says how text becomes tokens. `tokenizer_class` is not used: where transformers 5 has a
   class of its own for it (LlamaTokenizer, GPT2Tokenizer), it takes over the vocabulary alone and sets up the
   rest as it was when the class was written, which need not be how the model was trained.
2. Other files may declare tokens that it does not have, or say of its tokens that they are special. These are
   added to it, in transformers' order (`TokenizersBackend.__init__`). One that would get another id than is
   declared is refused.
3. Where tokenizer_config.json has `added_tokens_decoder`, the older files special_tokens_map.json and
   added_tokens.json are not read; else they are, and special_tokens_map.json wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from shared.text.model_files import (
    NO_EFFECT,
    USED,
    BadModelFile,
    KeyMeanings,
    only,
    parse_object,
    read_text,
    refusals,
    shown,
    unexplained,
)

CONFIG: Final = "tokenizer_config.json"
_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SUFFIX: Final = "_token"
"""The end of a key that names a special token, if its value is a text."""
_ADDITIONAL: Final = "additional_special_tokens"
_EXTRA: Final = "extra_special_tokens"
_DECLARED: Final = "added_tokens_decoder"
TOKENIZER_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys((*_NAMES, _ADDITIONAL, _EXTRA, _DECLARED, "chat_template"), USED),
    "clean_up_tokenization_spaces": USED,
    "add_bos_token": NO_EFFECT,  # tokenizer.json says which tokens are added
    "add_eos_token": NO_EFFECT,
    "add_prefix_space": NO_EFFECT,
    "backend": NO_EFFECT,
    "chat_control_tokens": NO_EFFECT,
    "device_map": NO_EFFECT,
    "do_lower_case": NO_EFFECT,
    "errors": NO_EFFECT,
    "is_local": NO_EFFECT,
    "legacy": NO_EFFECT,
    "local_files_only": NO_EFFECT,
    "max_length": NO_EFFECT,
    "model_input_names": NO_EFFECT,
    "model_max_length": NO_EFFECT,
    "name_or_path": NO_EFFECT,
    "pad_to_multiple_of": NO_EFFECT,
    "pad_token_type_id": NO_EFFECT,
    "padding": NO_EFFECT,
    "padding_side": NO_EFFECT,
    "processor_class": NO_EFFECT,
    "response_schema": NO_EFFECT,
    "response_template": USED,
    "sp_model_kwargs": NO_EFFECT,
    "spaces_between_special_tokens": NO_EFFECT,
    "special_tokens_map_file": NO_EFFECT,
    "stride": NO_EFFECT,
    "tokenizer_class": NO_EFFECT,
    "tokenizer_file": NO_EFFECT,
    "truncation": NO_EFFECT,
    "truncation_side": NO_EFFECT,
    "truncation_strategy": NO_EFFECT,
    "use_default_system_prompt": NO_EFFECT,
    "use_fast": NO_EFFECT,
    "verbose": NO_EFFECT,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": only(None, False),
    "fast_tokenizer_files": only(None, [], ["tokenizer.json"]),
    "fix_mistral_regex": only(None, False),
    "model_specific_special_tokens": only(None, {}),
    "split_special_tokens": only(None, False),
}


class AddedToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token that is searched for in the text itself, before it is cut into words."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    """True if it is searched for in normalised text. None for the default: unless it is special."""
    special: bool = False
    """True if answers leave it out."""
    id: int | None = None
    """The id that it is declared with. None for the next free one."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    tokenizer_json: str
    chat_template: str | None
    tool_template: str | None
    """The template for chats with tools, where there is one of its own."""
    special_tokens: Mapping[str, str]
    """The text of each special token, by the names that templates use (`bos_token`)."""
    added_tokens: tuple[AddedToken, ...]
    """The tokens to add to those of tokenizer.json, in this order; some only change a token that is there."""
    response_template: object
    """How answers are written, as the engine reads it. None where no file says."""
    unread: tuple[str, ...]
    """The unknown keys of tokenizer_config.json, for the log."""


class _Model(msgspec.Struct):
    type: str | None = None


class _TokenizerJson(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[AddedToken] = []


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read the tokenizer's files in a model directory. Raises BadModelFile, naming the file."""
    tokenizer_json = _text(directory / "tokenizer.json")
    if tokenizer_json is None:
        raise BadModelFile(f"{directory} has no tokenizer.json, the format that Penstock reads")
    try:
        spec = msgspec.json.decode(tokenizer_json, type=_TokenizerJson)
        config = _object(directory / CONFIG)
        _refuse(config, spec)
        special = _SpecialTokens.of(config, directory)
        declared = _declared(config, directory, special, spec)
        added = tuple(_to_add(special, declared, spec))
    except msgspec.MsgspecError as error:
        raise BadModelFile(f"the tokens of {directory} cannot be read: {error}") from error
    templates = _find_templates(directory, config)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=templates.get(DEFAULT),
        tool_template=templates.get(TOOL_USE),
        special_tokens={name: token.content for name, token in special.named.items()},
        added_tokens=added,
        response_template=config.get("response_template"),
        unread=unexplained((name for name in config if not name.endswith(_SUFFIX)), TOKENIZER_KEYS),
    )


def _refuse(config: Mapping[str, Any], spec: _TokenizerJson) -> None:
    problems = list(refusals(config, TOKENIZER_KEYS))
    if config.get("clean_up_tokenization_spaces") and spec.model.type != "BPE":
        problems.append(f"clean_up_tokenization_spaces is not supported for {shown(spec.model.type)} models")
    if problems:
        raise BadModelFile(f"{CONFIG}: {'; '.join(problems)}")


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    """The special tokens that the configuration files declare."""

    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    standard: frozenset[str]
    """The texts that added_tokens.json counts as special: all but those of a model's own names, and of
    objects in tokenizer_config.json."""

    @staticmethod
    def of(config: Mapping[str, Any], directory: Path) -> _SpecialTokens:
        fields, own = _merged(config, directory)
        listed = fields.get(_EXTRA, fields.get(_ADDITIONAL)) or []
        if not isinstance(listed, list):
            raise BadModelFile(f"{CONFIG}: {_EXTRA} {shown(listed)} is no list of tokens")
        names = (*_NAMES, *(name for name in fields if name.endswith(_SUFFIX) and name not in _NAMES))
        named = {
            name: msgspec.structs.replace(token, special=True)
            for name, value in ({name: fields.get(name) for name in names} | own).items()
            if (token := _token(value)) is not None
        }
        texts = (
            value
            for value in (*map(fields.get, _NAMES), *(fields.get(_EXTRA) or []))
            if not isinstance(value, dict)
        )
        extra = (_token(value) for value in listed)
        return _SpecialTokens(
            named,
            tuple(token for token in extra if token is not None),
            frozenset(token.content for value in texts if (token := _token(value)) is not None),
        )


def _merged(config: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of tokenizer_config.json and, if it counts, of special_tokens_map.json; and the special tokens
    under a model's own names."""
    fields = dict(config)
    if not fields.get(_EXTRA) and _ADDITIONAL in fields:
        fields[_EXTRA] = fields.pop(_ADDITIONAL)
    own = {
        name: fields.pop(name)
        for name, value in config.items()
        if name.endswith(_SUFFIX) and name not in _NAMES and isinstance(value, str)
    }
    if isinstance(fields.get(_EXTRA), dict):
        own |= fields.pop(_EXTRA)
    older = {} if _DECLARED in config else _object(directory / "special_tokens_map.json")
    for name, value in older.items():
        if isinstance(value, dict) and name != _EXTRA:
            fields[name] = msgspec.structs.replace(_object_token(value), special=True)
        elif isinstance(value, list) and name == _EXTRA:
            known = fields.get(_EXTRA) or []
            fields[name] = [*known, *(token for token in value if token not in known)]
        else:
            fields[name] = value
    if isinstance(fields.get(_EXTRA), dict):
        own |= fields.pop(_EXTRA)
    return fields, own


def _token(value: object) -> AddedToken | None:
    """The token in a value, which is its text or an object around it. None for any other value."""
    if isinstance(value, str):
        return AddedToken(content=value, special=True)
    if isinstance(value, dict):
        return _object_token({"special": "__type" not in value} | value)
    return value if isinstance(value, AddedToken) else None


def _object_token(fields: Mapping[str, Any]) -> AddedToken:
    return msgspec.convert({name: own for name, own in fields.items() if name != "__type"}, AddedToken)


def _declared(
    config: Mapping[str, Any], directory: Path, special: _SpecialTokens, spec: _TokenizerJson
) -> Mapping[int, AddedToken]:
    """The tokens that are declared with an id, by that id."""
    if _DECLARED in config:
        table = msgspec.convert(config[_DECLARED], dict[str, AddedToken])
        return {
            _id(stated): msgspec.structs.replace(token, id=_id(stated)) for stated, token in table.items()
        }
    older = msgspec.convert(_object(directory / "added_tokens.json"), dict[str, int])
    declared = {
        token_id: AddedToken(
            content=content,
            normalized=content not in special.standard,
            special=content in special.standard,
            id=token_id,
        )
        for content, token_id in older.items()
    }
    return declared | {token.id: token for token in spec.added_tokens if token.id is not None}


def _id(stated: str) -> int:
    try:
        return int(stated)
    except ValueError:
        raise BadModelFile(f"{CONFIG}: {shown(stated)} in {_DECLARED} is no token id") from None


def _to_add(
    special: _SpecialTokens, declared: Mapping[int, AddedToken], spec: _TokenizerJson
) -> Iterator[AddedToken]:
    """The declared tokens in the order of their ids, with named ones as special; then the special tokens that
    are declared nowhere."""
    names = {token.content for token in special.named.values()}
    own = {token.content: token for token in spec.added_tokens}
    for _, token in sorted(declared.items()):
        meant = msgspec.structs.replace(token, special=token.special or token.content in names)
        if meant != own.get(token.content):
            yield meant
    known = own.keys() | {token.content for token in declared.values()}
    for token in (*special.named.values(), *special.extra):
        if token.content not in known:  # for one that comes twice, the last wins
            yield token


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""The name of the template for chats with tools, where a model has several."""


def _find_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by their names, of which the two that are used may be there. Files of their own win
    over the configuration."""
    extra = directory / "additional_chat_templates"
    own = {DEFAULT: directory / "chat_template.jinja", TOOL_USE: extra / f"{TOOL_USE}.jinja"}
    texts = {name: text for name, path in own.items() if (text := _text(path)) is not None}
    if texts:
        return texts
    where, found = CONFIG, config.get("chat_template")
    if found is None:
        where = "chat_template.json"
        found = _object(directory / where).get("chat_template")
    try:
        stated = msgspec.convert(found, str | list[_NamedTemplate] | dict[str, str] | None)
    except msgspec.ValidationError:
        raise BadModelFile(f"{where}: chat_template is neither a text nor named ones") from None
    if isinstance(stated, list):
        return {named.name: named.template for named in stated}
    return stated if isinstance(stated, dict) else {} if stated is None else {DEFAULT: stated}


def _text(path: Path) -> str | None:
    try:
        return read_text(path)
    except BadModelFile as error:
        raise BadModelFile(f"{path} {error}") from error


def _object(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty where there is no such file."""
    text = _text(path)
    try:
        return {} if text is None else parse_object(text)
    except BadModelFile as error:
        raise BadModelFile(f"{path} {error}") from error

"""What the API process knows of the model it serves: its name, its tokenizer, how its answers end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.api.admission import SamplingDefaults
from shared.errors import InvalidRequest
from shared.openai import ChatRequest, CompletionRequest
from shared.tokenizer import Tokenizer, TokenizerBundle
from shared.validation import parse

S = TypeVar("S", bound=msgspec.Struct)


class UnusableModel(Exception):
    """A file of the model directory cannot be read. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    created: int
    """Unix time at which this process began to serve it."""
    tokenizer: Tokenizer
    bundle_json: bytes
    """What `GET /penstock/tokenizer` answers."""
    eos_ids: frozenset[int]
    sampling: SamplingDefaults


def load_model(directory: Path, *, name: str, created: int) -> ServedModel:
    """Read the directory's tokenizer and configuration. Blocks for as long as that takes.

    Raises UnusableTokenizer and UnusableModel.
    """
    bundle = TokenizerBundle.from_dir(directory)
    tokenizer = Tokenizer(bundle)
    _warm_up(tokenizer)
    return ServedModel(
        name=name,
        created=created,
        tokenizer=tokenizer,
        bundle_json=msgspec.json.encode(bundle),
        eos_ids=read_eos_ids(directory),
        sampling=read_sampling_defaults(directory),
    )


def _warm_up(tokenizer: Tokenizer) -> None:
    """What is built at its first use is built now: the first request is as fast as the second."""
    chat = parse(b'{"model": "", "messages": [{"role": "user", "content": "Hello"}]}', ChatRequest).request
    text = parse(b'{"model": "", "prompt": "Hello"}', CompletionRequest).request
    for request in (chat, text):
        with contextlib.suppress(InvalidRequest):  # a model without a chat template, or with a picky one
            tokenizer.decode_stream(tokenizer.prompt_ids(request)[0]).step(0)


class _EosConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_eos_ids(directory: Path) -> frozenset[int]:
    """From generation_config.json, which may list several, or else from config.json. Raises UnusableModel."""
    for name in ("generation_config.json", "config.json"):
        eos = _read(directory / name, _EosConfig()).eos_token_id
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """From generation_config.json. Raises UnusableModel."""
    return _read(directory / "generation_config.json", SamplingDefaults())


def _read(path: Path, default: S) -> S:
    """What of `path` is in the Struct; `default` where there is no file. Nulls mean nothing."""
    if not path.is_file():
        return default
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        stated = {name: value for name, value in fields.items() if bytes(value) != b"null"}
        return msgspec.json.decode(msgspec.json.encode(stated), type=type(default))
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise UnusableModel(f"{path} cannot be read: {error}") from error

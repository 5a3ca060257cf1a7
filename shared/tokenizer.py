"""Text to token ids and back: the one implementation that both services use.

The engine loads a `TokenizerBundle` from the model directory and serves it; the gateway fetches it,
checks its hash, and counts with the very code and data that the engine encodes with.

Rules:

1. A chat is encoded without special tokens, because its template writes them itself; a completion's
   prompt is encoded with those that the tokenizer adds (a beginning-of-sequence token, mostly).
2. Truncation and padding that a tokenizer file may ask for are switched off: a prompt is what it is.
3. Text that leaves a `DecodeStream` holds whole characters only, and never text of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import decoders

from shared.chat_template import ChatTemplate
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import InvalidRequest
from shared.openai import ChatMessage, ChatRequest, CompletionRequest
from shared.text_slices import Slicer
from shared.validation import prompt_count
from shared.words import WordEncoder, byte_level_alphabet

FILE_LEN_MAX: Final = 128 * 1024 * 1024
PENDING_MAX: Final = 8
"""Tokens that a stream holds back for an unfinished character. A character of UTF-8 has 4 bytes at
most, so after twice as many tokens the bytes are no character, and never will be."""
_BEGUN_MAX: Final = 3
"""Tokens at the end of a prompt that can be the beginning of a character."""
PROMPT_TAIL_LEN: Final = 8
"""Prompt tokens that the first output tokens are decoded after, for their spacing."""
assert _BEGUN_MAX < PENDING_MAX <= PROMPT_TAIL_LEN

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library would hand even one short text to threads of its own, which takes longer than encoding it.
Ours, a bounded number, are in `shared.fair_threads`."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class UnusableTokenizer(Exception):
    """The model directory holds none that can be loaded. The message is for the operator."""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that counting needs, in one value that can travel as JSON."""

    tokenizer_json: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None

    @property
    def hash(self) -> str:
        """`sha256:<hex>` of the bundle's JSON. Two bundles with the same hash encode the same."""
        return f"sha256:{hashlib.sha256(msgspec.json.encode(self)).hexdigest()}"

    @classmethod
    def from_dir(cls, path: Path | str) -> TokenizerBundle:
        """Read a model directory in Hugging Face layout. Raises UnusableTokenizer."""
        directory = Path(path)
        tokenizer_json = _read(directory / "tokenizer.json")
        if tokenizer_json is None:
            raise UnusableTokenizer(f"{directory} has no tokenizer.json, the format that Penstock reads")
        config = _read_object(directory / "tokenizer_config.json")
        special = _read_object(directory / "special_tokens_map.json") | config
        tokens = {name: _token_text(special.get(name)) for name in _SPECIAL_NAMES}
        return cls(tokenizer_json=tokenizer_json, chat_template=_find_template(directory, config), **tokens)


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_size > FILE_LEN_MAX:
            raise UnusableTokenizer(f"{path} is larger than {FILE_LEN_MAX} bytes")
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableTokenizer(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise UnusableTokenizer(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnusableTokenizer(f"{path} must hold a JSON object")
    return value


def _token_text(token: Any) -> str | None:
    """A special token is given as its text, or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _find_template(directory: Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins over the configuration; of several named templates, the default."""
    template = _read(directory / "chat_template.jinja")
    if template is not None:
        return template
    found = _read_object(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


class Tokenizer:
    """Raises UnusableTokenizer when the bundle's parts cannot be loaded."""

    def __init__(self, bundle: TokenizerBundle, clock: Clock = SYSTEM_CLOCK) -> None:
        self.bundle = bundle
        self.hash = bundle.hash
        special = {name: text for name in _SPECIAL_NAMES if (text := getattr(bundle, name)) is not None}
        try:
            self.raw = tokenizers.Tokenizer.from_str(bundle.tokenizer_json)
            self._template = (
                None if bundle.chat_template is None else ChatTemplate(bundle.chat_template, special, clock)
            )
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise UnusableTokenizer(f"the tokenizer cannot be loaded: {error}") from error
        self.raw.no_truncation()
        self.raw.no_padding()
        added_tokens = self.raw.get_added_tokens_decoder()
        self._added = {token_id: added.content for token_id, added in added_tokens.items()}
        self._special_ids = frozenset(token_id for token_id, added in added_tokens.items() if added.special)
        vocabulary = self.raw.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""
        spec = json.loads(bundle.tokenizer_json)
        self._piece_bytes = _piece_decoder(spec)
        self._words = WordEncoder.of(self.raw, spec)
        around = _around(self)
        self.around: tuple[list[int], list[int]] = around or ([], [])
        """The special tokens that are added before and behind a text."""
        self.slicer = None if around is None else Slicer.of(self.raw, spec)
        """None for a tokenizer whose text is not known to be cut anywhere."""
        self.sentinel_id = next((vocabulary[char] for char in _SENTINELS if char in vocabulary), None)
        """A token of one plain character, if there is one."""

    # -- encoding ---------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Of the library's calls the one that lets other threads run, and computes no offsets."""
        encodings = self.raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def render_chat(self, messages: list[ChatMessage]) -> str:
        if self._template is None:
            raise InvalidRequest("This model has no chat template. Use /v1/completions.", param="messages")
        return self._template.render(messages)

    def prompt_ids(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """The token ids of each of the request's prompts; a chat is one prompt."""
        if isinstance(request, ChatRequest):
            prompts = [self._chat_ids(self.render_chat(request.messages))]
            param = "messages"
        else:
            prompts = self._completion_ids(request)
            param = "prompt"
        if not all(prompts):
            raise InvalidRequest(f"{param} must not be empty.", param=param)
        return prompts

    def _chat_ids(self, text: str) -> list[int]:
        ids = None if self._words is None else self._words.encode(text)
        return self.encode(text, add_special_tokens=False) if ids is None else ids

    def _completion_ids(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        prompt_count(prompt)
        if isinstance(prompt, str):
            prompt = [prompt]
        texts = [item for item in prompt if isinstance(item, str)]
        if texts:
            return self.encode_all(texts) if all(texts) else [[]]
        ids = [item for item in prompt if isinstance(item, int)]
        prompts = [ids] if ids else [item for item in prompt if isinstance(item, list)]
        for prompt_ids in prompts:
            if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
                message = f"prompt holds token ids that are not between 0 and {self.vocab_size - 1}."
                raise InvalidRequest(message, param="prompt")
        return prompts

    # -- decoding ---------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids without a token decode to nothing."""
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; possibly a piece of a character. A special token is its text."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self.raw.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> DecodeStream:
        """The text that follows `prompt_ids`; their last few are enough."""
        return DecodeStream(self, prompt_ids, skip_special_tokens)

    def is_textless(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding passes over this token: a special one, or an id without a token."""
        return token_id >= self.vocab_size or (skip_special_tokens and token_id in self._special_ids)


_SENTINELS: Final = ".abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class DecodeStream:
    """Text as tokens come, in whole characters, on top of the library's own `DecodeStream`.

    That one gives nothing while the text of the tokens since its last answer ends in a replacement
    character. Three things it does not do: it repeats prompt text when the prompt ends within a
    character, it waits forever on bytes that are no character, and it cannot be told that the end
    has come. The cures: the prompt's characters are counted and left out; and a sentinel, a token of
    one plain character, makes it give what it holds.
    """

    __slots__ = ("_owed_len", "_pending_len", "_skip_special_tokens", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending_len = 0
        tail, begun = self._split_prompt(prompt_ids[-PROMPT_TAIL_LEN:])
        self._stream = decoders.DecodeStream(tail, skip_special_tokens)
        for token_id in begun:
            self._stream.step(tokenizer.raw, token_id)
        self._owed_len = max(
            0, len(self._decode([*tail, *begun]).rstrip(_REPLACEMENT)) - len(self._decode(tail))
        )
        """Characters of the prompt that the stream will repeat before the first that is finished."""

    def step(self, token_id: int) -> str:
        """The whole characters that this token completes."""
        if self._tokenizer.is_textless(token_id, self._skip_special_tokens):
            return ""
        text = self._feed(token_id)
        if text is not None:
            return text
        self._pending_len += 1
        return self._force() if self._pending_len >= PENDING_MAX else ""

    def flush(self) -> str:
        """At the end: whole characters that came together with the beginning of another."""
        return self._force().rstrip(_REPLACEMENT) if self._pending_len else ""

    def _feed(self, token_id: int) -> str | None:
        try:
            text = self._stream.step(self._tokenizer.raw, token_id)
        except Exception:  # bare, by the library: the latest bytes made those before them no character
            sentinel_id = self._tokenizer.sentinel_id
            self._stream = decoders.DecodeStream(
                [] if sentinel_id is None else [sentinel_id], self._skip_special_tokens
            )
            text = self._stream.step(self._tokenizer.raw, token_id)
        if text is not None:
            text, self._owed_len, self._pending_len = text[self._owed_len :], 0, 0
        return text

    def _force(self) -> str:
        self._pending_len = 0
        sentinel_id = self._tokenizer.sentinel_id
        text = None if sentinel_id is None else self._feed(sentinel_id)
        return text[:-1] if text else ""

    def _split_prompt(self, tail: Sequence[int]) -> tuple[list[int], list[int]]:
        """What ends with a whole character, and the few tokens after it that began another.

        The tail is cut to begin with a character too: bytes that are none spoil those beside them.
        """
        begins = (self._tokenizer.token_bytes(token_id)[:1] for token_id in tail)
        cut = next((i for i, byte in enumerate(begins) if not b"\x80" <= byte < b"\xc0"), len(tail))
        tail = list(tail[cut:])
        for begun_len in range(min(_BEGUN_MAX, len(tail)) + 1):
            whole = tail[: len(tail) - begun_len]
            if not self._decode(whole).endswith(_REPLACEMENT):
                return whole, tail[len(whole) :]
        return [], []  # bytes that are no character: nothing to continue

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and behind a text; None where more is done to it."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for at in range(len(whole) - len(bare) + 1):
        before, after = whole[:at], whole[at + len(bare) :]
        if whole[at : at + len(bare)] == bare and tokenizer.encode("b a") == [
            *before,
            *tokenizer.encode("b a", add_special_tokens=False),
            *after,
        ]:
            return before, after
    return None


def _piece_decoder(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """How this vocabulary spells bytes, told from the decoder that its file names."""
    decoder = json.dumps(spec.get("decoder"))
    if '"ByteLevel"' in decoder:
        return _byte_level_bytes
    if '"ByteFallback"' in decoder or '"Metaspace"' in decoder or "\\u2581" in decoder:
        return _sentencepiece_bytes
    return lambda piece: piece.encode()


_BYTE_OF: Final = byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:  # not of this alphabet: it stands for itself, as the library's decoder has it
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return piece.encode()
    return piece.replace("\u2581", " ").encode()

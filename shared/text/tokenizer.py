"""Text to token ids and back: the one implementation that both services use.

The engine loads a `TokenizerBundle` from the model directory and serves it; the gateway fetches it,
checks its hash, and counts with the very code and data that the engine encodes with.

Rules:

1. A chat is encoded without special tokens, because its template writes them itself; a completion's
   prompt is encoded with those that the tokenizer adds (a beginning-of-sequence token, mostly).
2. Truncation and padding that a tokenizer file may ask for are switched off.
3. The library is written in Rust. Where it panics, which is no `Exception` to Python and would end a thread
   or a connection, an error is raised instead (`_Library`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import BranchedPrompt, ChatPrompt, PromptForm, TextPrompt
from shared.fairness.fair_threads import at_once
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.chat_template import NO_DEFAULTS, ChatTemplate, variables_read
from shared.text.deciding import MARK, THINKS_NOT, Deciding
from shared.text.fill import Fill
from shared.text.model_files import BadModelFile, shown
from shared.text.reranking import Reranking
from shared.text.template_takes import Takes
from shared.text.text_slices import Slicer
from shared.text.token_text import DecodeStream, piece_spelling, whole_spelling
from shared.text.tokenizer_files import AddedToken, TokenizerFiles, read_tokenizer_files
from shared.text.words import WordEncoder
from shared.wire.errors import InvalidRequest, NotInPlace, TokenizerFailed
from shared.wire.shapes import TOKEN_ID_MAX

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Off, because the library would pass even one short text to threads of its own, which takes longer than
encoding it. `shared.fairness.fair_threads` has a bounded number of threads."""

log = logs.get(__name__)

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class UnusableTokenizer(Exception):
    """The model directory has no tokenizer that can be loaded. The message is for the operator."""


class _Library:
    """A guard around calls of the library: `with _LIBRARY:`. Raises TokenizerFailed where it panics."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            message = "The tokenizer failed on this text."
            raise TokenizerFailed(message, detail="the tokenizers library panicked") from None


_LIBRARY: Final = _Library()
REASON_LEN_MAX: Final = 300
"""Characters of what the library says of a file that it cannot load."""
HELD_IDS_MAX: Final = 512
"""The most ids that are decoded by a call that keeps other threads waiting, for half a millisecond. For more
there is one that lets them run."""


BUNDLE_LEN_MAX: Final = 64 * 1024 * 1024
"""Bytes of a bundle's JSON. That of a tokenizer of 250,000 tokens has about 30 MB."""
TEMPLATE_LEN_MAX: Final = 1024 * 1024
"""Characters of a chat template. Those of models have 20,000 at most."""
ARGUMENTS_LEN_MAX: Final = 64 * 1024
"""Bytes of the names and the values of a template's variables, as JSON."""
SLOW_S: Final = 0.02
"""The CPU time for a short prompt, in seconds, above which a tokenizer whose cuts are not known counts as
slow: so is one that has a regular expression which backtracks."""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that counting tokens needs, in one value that can travel as JSON."""

    tokenizer_json: str
    chat_template: str | None = None
    tool_template: str | None = None
    """The template for chats with tools, where that is another one."""
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    named_tokens: dict[str, str] = {}
    """Special tokens beside those four, by the names that templates know them by."""
    added_tokens: tuple[AddedToken, ...] = ()
    """The tokens that other files add to those of tokenizer.json."""
    template_arguments: tuple[str, ...] = ()
    """The variables of the chat template that requests may set."""
    template_defaults: dict[str, Any] = {}
    """Values for variables of the chat template that a request does not set."""
    takes: Takes | None = None
    """The forms that the chat template takes. None before it was looked at, which `Tokenizer` does."""
    tool_takes: Takes | None = None
    """The forms that the template for chats with tools takes. None without one, too."""
    reranker: str | None = None
    """The name of the format in which the model ranks documents (`shared.text.reranking`). None where it
    ranks none."""

    @property
    def hash(self) -> str:
        """`sha256:<hex>` of the bundle's JSON. Two bundles with the same hash encode the same."""
        return f"sha256:{hashlib.sha256(msgspec.json.encode(self)).hexdigest()}"

    @classmethod
    def from_dir(cls, path: Path | str) -> TokenizerBundle:
        """Read a model directory in Hugging Face layout. Raises UnusableTokenizer."""
        return cls.of(read_files(path))

    @classmethod
    def of(
        cls,
        files: TokenizerFiles,
        template_arguments: tuple[str, ...] | None = None,
        template_defaults: Mapping[str, Any] = NO_DEFAULTS,
        reranker: str | None = None,
    ) -> TokenizerBundle:
        """Without `template_arguments`, they are the variables that the chat template reads."""
        named = dict(files.special_tokens)
        if template_arguments is None:
            sources = files.chat_template or "", files.tool_template or ""
            template_arguments = tuple(
                sorted({name for each in sources for name in variables_read(each, named)})
            )
        own: dict[str, Any] = {name: named.pop(name, None) for name in _SPECIAL_NAMES}
        return cls(
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template,
            tool_template=files.tool_template,
            named_tokens=named,
            added_tokens=files.added_tokens,
            template_arguments=template_arguments,
            template_defaults=dict(template_defaults),
            reranker=reranker,
            **own,
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of all special tokens that templates know by a name."""
        special = {name: text for name in _SPECIAL_NAMES if (text := getattr(self, name)) is not None}
        return special | self.named_tokens


def read_files(path: Path | str) -> TokenizerFiles:
    """A model directory's tokenizer files, and which of their keys are unknown. Raises UnusableTokenizer."""
    try:
        return read_tokenizer_files(Path(path))
    except BadModelFile as error:
        raise UnusableTokenizer(str(error)) from error


class _SpecModel(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None


class _Spec(msgspec.Struct):
    """The parts of a tokenizer.json that say how it works, without its vocabulary: to make objects of a large
    one takes a second in which nothing else runs."""

    model: _SpecModel
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class Tokenizer:
    """A loaded tokenizer. Raises UnusableTokenizer when the bundle's parts cannot be loaded."""

    def __init__(
        self, bundle: TokenizerBundle, clock: Clock = SYSTEM_CLOCK, *, hash_: str | None = None
    ) -> None:
        """`hash_` is the bundle's, where its JSON was another text of the same meaning."""
        try:
            with _LIBRARY:
                self._load(bundle, clock)
        except TokenizerFailed as error:
            raise UnusableTokenizer(f"the tokenizer cannot be loaded: {error.detail}") from error
        except UnusableTokenizer as error:
            raise UnusableTokenizer(f"the tokenizer cannot be loaded: {error}") from error
        except Exception as error:  # of any kind: nobody has looked at what is in the file
            reason = f"{type(error).__name__}: {error}"[:REASON_LEN_MAX]
            raise UnusableTokenizer(f"the tokenizer cannot be loaded: {reason}") from error
        self.hash = hash_ or self.bundle.hash

    def _load(self, bundle: TokenizerBundle, clock: Clock) -> None:
        self.raw = tokenizers.Tokenizer.from_str(bundle.tokenizer_json)
        self.raw.no_truncation()
        self.raw.no_padding()
        self._template, own = _templates(bundle, clock)
        self._tool_template = own or self._template
        self.bundle = msgspec.structs.replace(
            bundle, takes=self._template and self._template.takes, tool_takes=own and own.takes
        )
        """The bundle, with what its templates take."""
        _add(self.raw, bundle.added_tokens)
        added_tokens = self.raw.get_added_tokens_decoder()
        self._added = {token_id: added.content for token_id, added in added_tokens.items()}
        self.special_ids: dict[str, int] = {
            content: token_id for token_id, content in self._added.items() if self._is_special(token_id)
        }
        """The id of each token that decoding leaves out, by its text."""
        self._special_ids = frozenset(self.special_ids.values())
        around = _around(self)
        vocabulary = self.raw.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""
        spec = msgspec.to_builtins(msgspec.json.decode(bundle.tokenizer_json, type=_Spec))
        self._piece_spelling, self._whole_spelling = piece_spelling(spec), whole_spelling(spec)
        self._pieces: dict[int, bytes | None] = {}
        """A cache of `piece_bytes`."""
        self._words = WordEncoder.of(self.raw, spec)
        self.around: tuple[list[int], list[int]] = around or ([], [])
        """The special tokens that are added before and behind a text."""
        self.knows_around = around is not None
        """True if that is all that is done for special tokens."""
        self.fill = Fill.of(self.raw.token_to_id, lambda text: self.encode(text, False), self.around[0])
        """The prompts with a suffix. None for a tokenizer without tokens for them."""
        self.reranking: Reranking | None = None
        """The way in which the model ranks documents. None where it ranks none."""
        if bundle.reranker is not None:
            try:
                self.reranking = Reranking.of(
                    bundle.reranker, self.raw.token_to_id, lambda text: self.encode(text, False)
                )
            except ValueError as error:
                raise UnusableTokenizer(str(error)) from error
        self.slicer = None if around is None else Slicer.of(self.raw, spec, vocabulary)
        """The cuts of long text. None for a tokenizer whose cuts are not known."""
        self._is_slow = False

    # -- encoding ---------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text, by the one call of the library that lets other threads run and computes
        no offsets."""
        with _LIBRARY:
            encodings = self.raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_spans(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of a text, and for each the characters [start, end) that it was made from, as the
        library has them."""
        with _LIBRARY:
            (encoding,) = self.raw.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.offsets

    def template_of(self, prompt: ChatPrompt) -> ChatTemplate:
        """The template that a chat is rendered with. Raises InvalidRequest where the model has none."""
        template = self._tool_template if prompt.tools else self._template
        if template is None:
            raise InvalidRequest("This model has no chat template. Use /v1/completions.", param="messages")
        return template

    @cached_property
    def deciding(self) -> Deciding | None:
        """The way in which the model decides questions. None for one that cannot."""
        try:
            return Deciding.of(self._decision, lambda text: self.encode(text, add_special_tokens=False))
        except (InvalidRequest, ValueError) as error:
            log.info("tokenizer.decides_nothing", reason=str(error))
            return None

    def _decision(self, text: str) -> str:
        """A rendered chat in which a question is asked."""
        chat = decision_chat(text)
        return at_once(self.template_of(chat).slices(chat))

    def prompt_ids(self, prompt: PromptForm) -> list[list[int]]:
        """The token ids of each of a request's prompts; a chat is one prompt, and short. Raises NotInPlace
        where template or tokenizer is not to be trusted here: `shared.text.prompts` has it done elsewhere."""
        if self._is_slow or isinstance(prompt, BranchedPrompt):
            raise NotInPlace("The prompt is too long for the model's tokenizer.")
        began_s = None if self.slicer is not None else time.thread_time()
        try:
            if isinstance(prompt, ChatPrompt):
                prompts = [self._chat_ids(self.template_of(prompt).render(prompt))]
            else:
                prompts = self._text_ids(prompt)
        finally:
            if began_s is not None:
                self._is_slow = time.thread_time() - began_s > SLOW_S
        if not all(prompts):
            raise InvalidRequest(f"{prompt.param} must not be empty.", param=prompt.param)
        return prompts

    def _chat_ids(self, text: str) -> list[int]:
        with _LIBRARY:
            ids = None if self._words is None else self._words.encode(text)
        return self.encode(text, add_special_tokens=False) if ids is None else ids

    def _text_ids(self, given: TextPrompt) -> list[list[int]]:
        if given.suffix or given.cut is not None:
            raise NotInPlace("A prompt with a suffix, or that is cut, is put together elsewhere.")
        prompt = given.prompt
        given.count()
        if isinstance(prompt, str):
            prompt = [prompt]
        texts = [item for item in prompt if isinstance(item, str)]
        if texts:
            return self.encode_all(texts) if all(texts) else [[]]
        ids = [item for item in prompt if isinstance(item, int)]
        prompts = [ids] if ids else [item for item in prompt if isinstance(item, list)]
        for prompt_ids in prompts:
            check_ids(prompt_ids, given.param)
        return prompts

    @property
    def added_ids(self) -> dict[str, int]:
        """The id of each token that is searched for in the text itself, by its text."""
        return {content: token_id for token_id, content in self._added.items()}

    @property
    def end_id(self) -> int | None:
        """The id of the end token that the tokenizer's files name. None without one."""
        named = self.bundle.eos_token
        return None if named is None else self.raw.token_to_id(named)

    # -- decoding ---------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids without a token have none."""
        with _LIBRARY:
            if len(ids) <= HELD_IDS_MAX:
                return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
            [text] = self.raw.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, possibly a piece of a character. A special token is its text."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        data = self.piece_bytes(token_id)
        return self._whole_spelling(self.raw.id_to_token(token_id) or "") if data is None else data

    def piece_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a piece of a character; empty for an id without a token. None for
        a token whose text is whole."""
        pieces = self._pieces
        if token_id not in pieces:
            piece = self.raw.id_to_token(token_id)
            pieces[token_id] = b"" if piece is None else self._piece_spelling(piece)
        return pieces[token_id]

    def _is_special(self, token_id: int) -> bool:
        """True if decoding leaves the token out. The flags of a token that was declared twice need not say
        so."""
        return bool(self.decode([token_id], False)) and not self.decode([token_id], True)

    def probe(self) -> None:
        """Encode and decode a little. Raises TokenizerFailed, at start rather than during an answer."""
        ids = self.encode("Hello, world!")
        for part in (ids, *([token_id] for token_id in ids), sorted(self._special_ids)[:1], []):
            self.decode(part)

    def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> DecodeStream:
        """A stream of the text that follows `prompt_ids`; their last few are enough."""
        return DecodeStream(self, prompt_ids, skip_special_tokens)

    def is_textless(self, token_id: int, skip_special_tokens: bool) -> bool:
        """True if decoding passes over this token: a special one, or an id without a token."""
        return token_id >= self.vocab_size or (skip_special_tokens and token_id in self._special_ids)


def _templates(bundle: TokenizerBundle, clock: Clock) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """The chat template, and that for chats with tools. Raises UnusableTokenizer for what is too long, and
    what `ChatTemplate` raises."""
    special, arguments, defaults = bundle.special_tokens, bundle.template_arguments, bundle.template_defaults
    if len(msgspec.json.encode((arguments, defaults))) > ARGUMENTS_LEN_MAX:
        raise UnusableTokenizer(f"the variables of its template take more than {ARGUMENTS_LEN_MAX} bytes")
    made = []
    for source, takes in ((bundle.chat_template, bundle.takes), (bundle.tool_template, bundle.tool_takes)):
        if len(source or "") > TEMPLATE_LEN_MAX:
            raise UnusableTokenizer(f"its chat template has more than {TEMPLATE_LEN_MAX} characters")
        template = None
        if source is not None:
            template = ChatTemplate(source, special, clock, arguments, defaults, takes)
        made.append(template)
    return made[0], made[1]


def decision_chat(said: str) -> ChatPrompt:
    """The chat in which a question about an input is asked."""
    message = ChatMessage("user", f"{said}\n\n{MARK}")
    return ChatPrompt([message], "input", wishes=dict(THINKS_NOT), places=("input",))


def check_ids(ids: Sequence[int], param: str) -> None:
    """Raise InvalidRequest where some of a prompt's ids can be no token's of any model. How many tokens the
    model has is for the engine to say: a model may have more of them than its tokenizer."""
    if ids and not 0 <= min(ids) <= max(ids) <= TOKEN_ID_MAX:
        message = f"{param} holds token ids that are not between 0 and {TOKEN_ID_MAX}."
        raise InvalidRequest(message, param=param)


def _add(raw: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to the library's tokenizer. Raises UnusableTokenizer where one gets another id than it is
    declared with."""
    new = [token for token in tokens if raw.token_to_id(token.content) is None]
    with _LIBRARY:
        raw.add_tokens(
            [
                tokenizers.AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=not token.special if token.normalized is None else token.normalized,
                    special=token.special,
                )
                for token in tokens
            ]
        )
    for token in new:
        token_id = raw.token_to_id(token.content)
        if token.id not in (None, token_id):
            raise UnusableTokenizer(
                f"the token {shown(token.content)} is declared as {token.id}, and is none of tokenizer.json, "
                f"behind which it would be {token_id}"
            )


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and behind a text. None for a tokenizer that does more to it."""
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

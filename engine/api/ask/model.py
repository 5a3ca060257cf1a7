"""The API process's view of the model: its name, its tokenizer, its end tokens and its default sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.api.ask.admission import SamplingDefaults
from engine.api.ask.rerankers import RerankerSetting, reranker_of
from engine.api.formats.format import AnswerFormat
from engine.api.formats.machine import AnswerMachine
from engine.api.formats.reading import AUTO, read_format
from engine.api.formats.response_template import BadFormat
from engine.config import ModelTokens
from engine.contract.embedders import Embedder, EmbeddingsSetting, read_embedder
from engine.contract.generation_keys import GENERATION_KEYS
from engine.contract.grammars import BadGrammar, Vocabulary, vocabulary_of
from engine.contract.messages import END_TOKENS_MAX
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.apis.completions import CompletionRequest
from shared.apis.models import Capabilities
from shared.apis.prompt import ChatPrompt
from shared.apis.validation import parse
from shared.fairness.fair_threads import at_once
from shared.process import logs
from shared.text.model_files import BadModelFile, S, filled, read_object, refusals, shown, unexplained
from shared.text.prompts import prompt_slices
from shared.text.template_takes import EFFORT
from shared.text.tokenizer import Tokenizer, TokenizerBundle, read_files
from shared.text.tokenizer_files import CONFIG as TOKENIZER_CONFIG
from shared.text.tokenizer_files import TokenizerFiles
from shared.wire.errors import InvalidRequest, TokenizerFailed

GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
_ANSWER = "Good morning"
VALUE_MAX = 2**31
"""Every default of sampling must be below this number."""

log = logs.get(__name__)


class UnusableModel(Exception):
    """A file of the model directory cannot be read, or asks for what is not implemented. The message is
    for the operator."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    created: int
    """Unix time at which this process began to serve it."""
    tokenizer: Tokenizer
    bundle_json: bytes
    """The body of the answer to `GET /penstock/tokenizer`."""
    eos_ids: frozenset[int]
    special_ids: Mapping[str, int]
    """The id of each special token that the model has, by its text."""
    sampling: SamplingDefaults
    vocab_size: int
    """The number of token ids that the model has."""
    answer_format: AnswerFormat | None = None
    """The format of the model's answers. None where it is not known."""
    vocabulary: Vocabulary | None = None
    """The tokens as grammars know them. None where llguidance cannot read them, or no answer ends."""
    decides: bool = False
    """True if it decides questions about an input."""
    embedder: Embedder | None = None
    """How the model makes vectors of texts. None where it makes none."""

    @property
    def capabilities(self) -> Capabilities:
        format_ = self.answer_format
        return Capabilities(
            tools=format_ is not None and format_.calls is not None,
            reasoning=format_ is not None and format_.reasoning is not None,
            structured_output=self.vocabulary is not None,
            effort=EFFORT in self.tokenizer.bundle.template_arguments,
            reranking=self.tokenizer.reranking is not None,
            decisions=self.decides,
            embeddings=self.embedder is not None,
            generation=self.embedder is None or self.embedder.generates,
        )

    @property
    def tokens(self) -> ModelTokens:
        """The tokens for grammars. None for a model that generates nothing."""
        if not self.capabilities.generation:
            return ModelTokens("", 0, ())
        bundle = self.tokenizer.bundle
        whole = self.tokenizer.raw.to_str() if bundle.added_tokens else bundle.tokenizer_json
        return ModelTokens(whole, self.vocab_size, tuple(sorted(self.eos_ids)))


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The end tokens and the default sampling, from the model's own files."""

    eos_ids: frozenset[int]
    """Tokens that end an answer. Empty where neither file names one."""
    sampling: SamplingDefaults
    vocab_size: int
    """The number of token ids that the model has."""
    unread: tuple[str, ...] = ()
    """Keys of generation_config.json that have no meaning here; they are logged."""


def load_model(
    directory: Path,
    *,
    name: str,
    created: int,
    template_arguments: tuple[str, ...] | None = None,
    template_defaults: str | None = None,
    answer_format: str = AUTO,
    embeddings: EmbeddingsSetting = "auto",
    embedding_dimensions: str | None = None,
    reranker: RerankerSetting = "auto",
) -> ServedModel:
    """Read the directory's tokenizer and configuration. Blocks for as long as that takes. What concerns the
    template is for `TokenizerBundle.of`, the defaults as JSON; `answer_format` is for `read_format`, what
    concerns embeddings for `read_embedder`, and `reranker` for `reranker_of`.

    Raises UnusableTokenizer and UnusableModel.
    """
    _check_files(directory)
    files = read_files(directory)
    defaults_given = msgspec.json.decode(template_defaults or "{}", type=dict[str, Any])
    bundle = TokenizerBundle.of(
        files, template_arguments, defaults_given, _reranker(directory, reranker, files)
    )
    tokenizer = _probed(directory, bundle)
    defaults = read_generation_defaults(directory, tokenizer.vocab_size)
    eos_ids = _all_ends(defaults, tokenizer)
    _tell_of_files(files, defaults, eos_ids, tokenizer.bundle)
    model = ServedModel(
        name=name,
        created=created,
        tokenizer=tokenizer,
        bundle_json=msgspec.json.encode(tokenizer.bundle),
        eos_ids=eos_ids,
        special_ids={
            text: token_id
            for text, token_id in tokenizer.special_ids.items()
            if token_id < defaults.vocab_size
        },
        sampling=defaults.sampling,
        answer_format=_answer_format(answer_format, files, tokenizer, defaults.vocab_size),
        vocab_size=defaults.vocab_size,
        embedder=_embedder(directory, embeddings, embedding_dimensions),
    )
    model = replace(model, decides=model.capabilities.generation and _decides(model))
    may_follow = eos_ids and model.capabilities.generation
    return replace(model, vocabulary=_vocabulary(model.tokens)) if may_follow else model


def _tell_of_files(
    files: TokenizerFiles, defaults: GenerationDefaults, eos_ids: frozenset[int], bundle: TokenizerBundle
) -> None:
    """Log what is not read in the model's files, and what they lack."""
    _tell_of_reasoning(bundle)
    for file, unread in ((TOKENIZER_CONFIG, files.unread), (GENERATION_CONFIG, defaults.unread)):
        if unread:
            log.warning("engine.keys_ignored", file=file, names=unread)
    if not eos_ids:
        log.warning("engine.no_end_token", reason="no file of the model names one: answers end by max_tokens")


def _probed(directory: Path, bundle: TokenizerBundle) -> Tokenizer:
    """The tokenizer, which has been used. Raises UnusableTokenizer and UnusableModel."""
    tokenizer = Tokenizer(bundle)
    try:
        tokenizer.probe()
        _warm_up(tokenizer)
    except TokenizerFailed as error:
        raise UnusableModel(f"the tokenizer of {directory} cannot be used: {error.detail}") from error
    return tokenizer


def _embedder(directory: Path, setting: EmbeddingsSetting, cuts: str | None) -> Embedder | None:
    """How the model makes vectors of texts. Raises UnusableModel."""
    try:
        return read_embedder(directory, setting, cuts)
    except BadModelFile as error:
        raise UnusableModel(f"{directory}: {error}") from error


def _decides(model: ServedModel) -> bool:
    """True if the token behind a question is the answer to it."""
    deciding, format_ = model.tokenizer.deciding, model.answer_format
    if deciding is None:
        return False
    if format_ is not None and AnswerMachine(format_, deciding.behind, tools=None).is_reasoning:
        log.info("engine.decides_nothing", reason="the chat template opens the model's reasoning")
        return False
    return all(token < model.vocab_size for labels in deciding.labels.values() for token in labels.ids)


def _reranker(directory: Path, setting: RerankerSetting, files: TokenizerFiles) -> str | None:
    """The format in which the model ranks documents. Raises UnusableModel."""
    try:
        return reranker_of(directory, setting, files)
    except BadModelFile as error:
        raise UnusableModel(f"{directory}: {error}") from error


def _tell_of_reasoning(bundle: TokenizerBundle) -> None:
    """Log which templates leave out the reasoning of earlier turns, and what keeps it."""
    for takes in (bundle.takes, bundle.tool_takes):
        if takes is not None and not takes.past_reasoning:
            log.warning(
                "engine.past_reasoning_left_out",
                reason="the chat template drops reasoning before the user's last message: from there on a "
                "chat's next turn is computed again",
                template_defaults=takes.reasoning_kept_by or None,
            )


def _vocabulary(tokens: ModelTokens) -> Vocabulary | None:
    """The tokens as grammars know them. It takes a third of a second for 150,000 of them."""
    try:
        return vocabulary_of(tokens.tokenizer_json, tokens.vocab_size, tokens.end_ids)
    except BadGrammar as error:
        log.warning("engine.no_grammars", reason=str(error))
        return None


def _answer_format(
    choice: str, files: TokenizerFiles, tokenizer: Tokenizer, vocab_size: int
) -> AnswerFormat | None:
    """The format of the model's answers. Raises UnusableModel."""
    token_ids = {text: token_id for text, token_id in tokenizer.added_ids.items() if token_id < vocab_size}
    template, own = files.tool_template or files.chat_template, files.response_template
    try:
        return read_format(choice, own=own, chat_template=template, token_ids=token_ids)
    except BadFormat as error:
        raise UnusableModel(str(error)) from error


def _check_files(directory: Path) -> None:
    """Look at the files that the core reads later: it takes seconds to start. Raises UnusableModel."""
    if _fields(directory / MODEL_CONFIG) is None:
        raise UnusableModel(f"{directory} has no {MODEL_CONFIG}")
    for path in directory.glob("*.safetensors"):
        if path.exists() and not path.is_file():
            raise UnusableModel(f"{path} is not a regular file")


def _warm_up(tokenizer: Tokenizer) -> None:
    """Encode and decode once, so that whatever the tokenizer builds at its first use does not slow the
    first request."""
    chat = parse(b'{"model": "", "messages": [{"role": "user", "content": "Hello"}]}', ChatRequest).request
    text = parse(b'{"model": "", "prompt": "Hello"}', CompletionRequest).request
    for request in (chat, text):
        try:
            tokenizer.decode_stream(at_once(prompt_slices(tokenizer, request.prompt_form, None))[0]).step(0)
        except InvalidRequest as error:  # a template may well refuse this message
            if request is chat and tokenizer.bundle.chat_template is not None:
                log.warning("engine.chat_template_fails", problem=error.message, detail=error.detail)


def _all_ends(defaults: GenerationDefaults, tokenizer: Tokenizer) -> frozenset[int]:
    """The end tokens of the model's files and the tokenizer's own. They differ where a model was trained
    further with other ends than its base's, whose files it kept. Raises UnusableModel."""
    eos_ids, own = defaults.eos_ids, tokenizer.end_id
    if own is not None and own < defaults.vocab_size and own not in eos_ids:
        if eos_ids:
            log.warning("engine.end_tokens_differ", model=sorted(eos_ids), tokenizer=own)
        eos_ids |= {own}
    if len(eos_ids) > END_TOKENS_MAX:
        raise UnusableModel(
            f"eos_token_id: the model has {len(eos_ids)} end tokens, more than {END_TOKENS_MAX}"
        )
    turns_end = _turns_end(tokenizer)
    if turns_end is not None and tokenizer.special_ids[turns_end] not in eos_ids:
        reason = "the chat template ends an answer with it, and no file says that it does"
        log.warning("engine.turn_end_is_no_end", named=turns_end, reason=reason)
    return eos_ids


def _turns_end(tokenizer: Tokenizer) -> str | None:
    """The special token that the chat template writes behind an assistant's message. None without one."""
    turns = ChatPrompt([ChatMessage("user", "Hello"), ChatMessage("assistant", _ANSWER)])
    try:
        rendered = at_once(tokenizer.template_of(turns).slices(turns))
    except InvalidRequest:  # there is no template, or `_warm_up` has told of it
        return None
    behind = rendered.rpartition(_ANSWER)[2].lstrip()
    return max(filter(behind.startswith, tokenizer.special_ids), key=len, default=None)


class _EndTokens(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Mode(msgspec.Struct):
    do_sample: bool = True


class _Vocabulary(msgspec.Struct):
    vocab_size: int | None = None


def read_generation_defaults(directory: Path, vocab_size: int) -> GenerationDefaults:
    """Read the end tokens and the default sampling from generation_config.json.

    Where there is no such file, config.json is read in its place, as transformers does. End tokens are
    read from config.json, too, where generation_config.json names none. `vocab_size` is the tokenizer's,
    and used where config.json states none. Raises UnusableModel.
    """
    files = {name: _fields(directory / name) for name in (GENERATION_CONFIG, MODEL_CONFIG)}
    own, config = files.values()
    if config is not None and isinstance(inner := config.get("text_config"), dict):
        files[MODEL_CONFIG] = config = {**inner, **config}  # the text part of a model of more
    where, fields = (MODEL_CONFIG, config or {}) if own is None else (GENERATION_CONFIG, own)
    refused = list(refusals(fields, GENERATION_KEYS))
    if refused:
        raise UnusableModel(f"{where} of {directory}: {'; '.join(refused)}")
    vocab_size = _read(MODEL_CONFIG, config or {}, _Vocabulary).vocab_size or vocab_size
    eos_ids: frozenset[int] = frozenset()
    for name, stated in files.items():
        eos_ids = eos_ids or _end_tokens(name, stated or {}, vocab_size)
    unread = () if own is None else unexplained(own, GENERATION_KEYS)
    return GenerationDefaults(eos_ids, _sampling(where, fields), vocab_size, unread)


def _end_tokens(name: str, fields: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """The end tokens that one file names. Empty where it names none."""
    stated = _read(name, fields, _EndTokens).eos_token_id
    eos_ids = [stated] if isinstance(stated, int) else stated or []
    outside = [token_id for token_id in eos_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise UnusableModel(
            f"{name}: eos_token_id {outside[0]} is no token of this model, which has {vocab_size}: answers "
            "would not end by it"
        )
    return frozenset(eos_ids)


def _sampling(name: str, fields: Mapping[str, Any]) -> SamplingDefaults:
    sampling = _read(name, fields, SamplingDefaults)
    for key, value in msgspec.structs.asdict(sampling).items():
        if not value < VALUE_MAX:  # false for NaN, too
            raise UnusableModel(f"{name}: {key} {shown(value)} is too large")
    if _read(name, fields, _Mode).do_sample:
        return sampling
    return msgspec.structs.replace(sampling, temperature=0.0)


def _fields(path: Path) -> dict[str, Any] | None:
    """The keys and values of a JSON file; None where there is no such file. Raises UnusableModel."""
    try:
        return read_object(path)
    except BadModelFile as error:
        raise UnusableModel(f"{path.parent}/{error}") from error


def _read(name: str, fields: Mapping[str, Any], kind: type[S]) -> S:
    """`filled`. Raises UnusableModel."""
    try:
        return filled(name, fields, kind)
    except BadModelFile as error:
        raise UnusableModel(str(error)) from error

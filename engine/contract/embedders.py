"""How a model makes one vector of a prompt: what a directory says by the files of sentence-transformers, or
the operator by a setting.

    modules.json                        the modules, in their order: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json, ...          the settings of each
    sentence_bert_config.json           the settings of Transformer
    config_sentence_transformers.json   prompts, and the kind of the whole

Rules:

1. A vector is what sentence-transformers (6.2) makes of the same tokens. What is not implemented is refused
   by name, as `engine.runtime.models.decoder_config` has it of config.json: a vector that is slightly another
   is found by nobody.
2. A model with a modules.json embeds and does nothing else: its checkpoint has no head. That of a reranker
   which answers by two tokens (`LogitScore`) says nothing of vectors (`engine.api.ask.rerankers`).
3. A prompt's vector is of all its tokens. What sentence-transformers puts before a text (`prompts`), a caller
   sends as part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from shared.text.model_files import (
    NO_EFFECT,
    USED,
    BadModelFile,
    KeyMeanings,
    filled,
    only,
    read_object,
    read_text,
    refusals,
    shown,
)

MODULES: Final = "modules.json"
MODULES_MAX: Final = 16
_LOGIT_SCORE: Final = "LogitScore"
PoolingMode = Literal["lasttoken", "mean", "cls"]
Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]
EmbeddingsSetting = Literal["auto", "mean"]
ANY_LEN: Final = "any"
"""The text that lets requests cut vectors to any length."""
_SENTENCE: Final = "sentence_embedding"
_LEGACY_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys(
        ("embedding_dimension", "word_embedding_dimension", "pooling_mode", *_LEGACY_MODES), USED
    ),
    "include_prompt": only(True),
}
_DENSE_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys(("in_features", "out_features", "bias", "activation_function"), USED),
    "module_input_name": only(None, _SENTENCE),
    "module_output_name": only(None, _SENTENCE),
    "use_residual": only(None, False),
}
_NORMALIZE_KEYS: Final[KeyMeanings] = {
    "module_input_name": only(None, _SENTENCE),
    "module_output_name": only(None, _SENTENCE),
}
_TRANSFORMER_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys(("max_seq_length", "modality_config"), USED),
    "unpad_inputs": NO_EFFECT,
    "do_lower_case": only(None, False),
    "module_output_name": only(None, "token_embeddings"),
    "processing_kwargs": only(None, {}),
    "transformer_task": only(None, "feature-extraction"),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), only(None)),
}
_TEXT: Final = {"method": "forward", "method_output_name": "last_hidden_state"}
_WHOLE_KEYS: Final[KeyMeanings] = {
    **dict.fromkeys(("prompts", "default_prompt_name"), USED),
    **dict.fromkeys(("__version__", "similarity_fn_name"), NO_EFFECT),
    "model_type": only(None, "SentenceTransformer"),
    "truncate_dim": only(None),
}
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class DenseModule:
    """activation(weight x + bias)"""

    directory: str
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class Normalization:
    """x / |x|"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The lengths to which a request may cut a vector."""

    are_any: bool = False
    lens: tuple[int, ...] = ()

    def allow(self, length: int, vector_len: int) -> bool:
        return length == vector_len or (length < vector_len and (self.are_any or length in self.lens))

    def __str__(self) -> str:
        return "any" if self.are_any else ", ".join(map(str, self.lens)) or "none"


@dataclass(frozen=True, slots=True)
class Embedder:
    """The modules behind the network, and what requests may ask of them."""

    pooling: PoolingMode
    behind: tuple[DenseModule | Normalization, ...]
    hidden_len: int | None = None
    """The numbers of a token's hidden state, where the files say so."""
    generates: bool = False
    """True if the model also answers, as one without a modules.json does."""
    tokens_max: int | None = None
    """The most tokens of a prompt, where the files say so."""
    cuts: Cuts = Cuts()

    def vector_len(self, hidden_len: int) -> int:
        """The numbers of a vector. `hidden_len`: those of the network's hidden states. Raises BadModelFile
        where the modules do not fit onto each other."""
        length = hidden_len
        if self.hidden_len not in (None, hidden_len):
            raise BadModelFile(f"Pooling takes {self.hidden_len} numbers, and the network gives {hidden_len}")
        for module in self.behind:
            if isinstance(module, DenseModule):
                if module.inputs != length:
                    raise BadModelFile(
                        f"{module.directory} takes {module.inputs} numbers, and is given {length}"
                    )
                length = module.outputs
        return length


def read_embedder(
    directory: Path, setting: EmbeddingsSetting = "auto", cuts: str | None = None
) -> Embedder | None:
    """How the directory's model embeds; None where it does not. `setting` and `cuts`: the operator's. Raises
    BadModelFile, whose message names the file."""
    config = read_object(directory / "config.json") or {}
    own = _cuts(config) if cuts is None else read_cuts(cuts)
    modules = read_text(directory / MODULES)
    if modules is None or logit_score(modules) is not None:
        if setting == "auto":
            return None
        return Embedder("mean", (Normalization(),), generates=True, cuts=own)
    if setting != "auto":
        raise BadModelFile(f"{MODULES} says how the model embeds, and --embeddings says {setting}")
    if config.get("auto_map"):
        raise BadModelFile("config.json: auto_map names code of the model's own, which is never run")
    if problems := [*_problems(directory, "config_sentence_transformers.json", _WHOLE_KEYS)]:
        raise BadModelFile("; ".join(problems))
    _check_prompt(directory)
    transformer, pooling, *others = _modules(modules)
    behind = tuple(_behind(directory, module) for module in others)
    mode, hidden_len = _pooling(directory, pooling)
    return Embedder(mode, behind, hidden_len, False, _tokens_max(directory, transformer), own)


def read_cuts(text: str) -> Cuts:
    """The lengths that a setting names: numbers, separated by commas, or `any`. Raises ValueError."""
    if text == ANY_LEN:
        return Cuts(are_any=True)
    lens = tuple(sorted({int(part) for part in text.split(",")}))
    if lens[0] < 1:
        raise ValueError("a length must be 1 at least")
    return Cuts(lens=lens)


# -- the files ------------------------------------------------------------------------------------


class _Module(msgspec.Struct):
    type: str
    path: str = ""
    kwargs: list[str] = []

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2] if self.type.startswith("sentence_transformers.") else self.type


class _Matryoshka(msgspec.Struct):
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None


class _Pooling(msgspec.Struct):
    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None
    pooling_mode: str | list[str] | None = None


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


class _Transformer(msgspec.Struct):
    max_seq_length: int | None = None
    modality_config: dict[str, Any] | None = None


class _Prompts(msgspec.Struct):
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class _TokenizerConfig(msgspec.Struct):
    model_max_length: float | None = None


def logit_score(text: str) -> str | None:
    """The directory of the module by which a reranker makes a relevance of logits (`LogitScore`), in the text
    of a modules.json. None where there is none: it is no reranker's. Raises BadModelFile."""
    return next((module.path for module in _listed(text) if module.kind == _LOGIT_SCORE), None)


def _listed(text: str) -> list[_Module]:
    try:
        return msgspec.json.decode(text, type=list[_Module])
    except msgspec.MsgspecError as error:
        raise BadModelFile(f"{MODULES} cannot be read: {error}") from error


def _modules(text: str) -> Sequence[_Module]:
    """The modules, which begin with Transformer and Pooling."""
    modules = _listed(text)
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise BadModelFile(
            f"{MODULES} is not supported, only Transformer and Pooling, and Dense and Normalize behind them: "
            f"it has {shown(', '.join(kinds))}"
        )
    if len(modules) > MODULES_MAX:
        raise BadModelFile(f"{MODULES} has more than {MODULES_MAX} modules")
    for module in modules:
        if module.path and (Path(module.path).is_absolute() or Path(module.path).name != module.path):
            raise BadModelFile(f"{MODULES}: path {shown(module.path)} is no directory of the model's own")
        if module.kwargs:
            raise BadModelFile(f"{MODULES}: kwargs {shown(', '.join(module.kwargs))} are not supported")
    return modules


def _pooling(directory: Path, module: _Module) -> tuple[PoolingMode, int | None]:
    name = f"{module.path}/config.json"
    fields = _checked(directory, name, _POOLING_KEYS)
    stated = filled(name, fields, _Pooling)
    mode = stated.pooling_mode or [of for key, of in _LEGACY_MODES.items() if fields.get(key)] or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        [mode] = mode
    known = get_args(PoolingMode)
    if mode not in known:
        said = mode if isinstance(mode, str) else " and ".join(mode)
        raise BadModelFile(f"{name}: pooling_mode {shown(said)} is not supported, only {', '.join(known)}")
    found: PoolingMode = msgspec.convert(mode, PoolingMode)
    return found, stated.embedding_dimension or stated.word_embedding_dimension


def _behind(directory: Path, module: _Module) -> DenseModule | Normalization:
    name = f"{module.path}/config.json"
    if module.kind == "Normalize":
        _checked(directory, name, _NORMALIZE_KEYS)
        return Normalization()
    if module.kind != "Dense":
        raise BadModelFile(f"{MODULES}: {shown(module.kind)} is not supported, only Dense and Normalize")
    dense = filled(name, _checked(directory, name, _DENSE_KEYS), _Dense)
    activation = dense.activation_function.rpartition(".")[2]
    known = get_args(Activation)
    if not dense.activation_function.startswith("torch.nn.") or activation not in known:
        said = shown(dense.activation_function)
        raise BadModelFile(f"{name}: activation_function {said} is not supported, only {', '.join(known)}")
    if min(dense.in_features, dense.out_features) < 1:
        raise BadModelFile(f"{name}: in_features and out_features must be at least 1")
    made: Activation = msgspec.convert(activation, Activation)
    return DenseModule(module.path, dense.in_features, dense.out_features, dense.bias, made)


def _tokens_max(directory: Path, module: _Module) -> int | None:
    """The most tokens that the model takes: the file of Transformer says so, else the tokenizer's, where no
    length is a number without end."""
    name = f"{module.path}/sentence_bert_config.json".removeprefix("/")
    stated = filled(name, _checked(directory, name, _TRANSFORMER_KEYS), _Transformer)
    modes = stated.modality_config
    if modes is not None and modes.get("text") != _TEXT:
        raise BadModelFile(f"{name}: modality_config of text must be the network's last_hidden_state")
    own = read_object(directory / "tokenizer_config.json") or {}
    length = stated.max_seq_length or filled("tokenizer_config.json", own, _TokenizerConfig).model_max_length
    return int(length) if length is not None and 1 <= length < 1 << 31 else None


def _check_prompt(directory: Path) -> None:
    """Refuse a prompt that is put before every text: no request would know of it."""
    name = "config_sentence_transformers.json"
    stated = filled(name, read_object(directory / name) or {}, _Prompts)
    default = stated.default_prompt_name
    if default is not None and (stated.prompts or {}).get(default):
        raise BadModelFile(
            f"{name}: default_prompt_name {shown(default)} is not supported, only null: callers send what is "
            "to stand before their texts"
        )


def _cuts(config: Mapping[str, Any]) -> Cuts:
    stated = filled("config.json", config, _Matryoshka)
    if stated.matryoshka_dimensions:
        return Cuts(lens=tuple(sorted(length for length in stated.matryoshka_dimensions if length > 0)))
    return Cuts(are_any=bool(stated.is_matryoshka))


def _problems(directory: Path, name: str, table: KeyMeanings) -> Iterator[str]:
    """A sentence for each key of a file that is not supported, and for each that is not known."""
    fields = read_object(directory / name) or {}
    yield from (f"{name}: {problem}" for problem in refusals(fields, table))
    unknown = [shown(key) for key, value in fields.items() if key not in table and value is not None]
    if unknown:
        yield f"{name}: {', '.join(unknown)}: not known"


def _checked(directory: Path, name: str, table: KeyMeanings) -> dict[str, Any]:
    if problems := [*_problems(directory, name, table)]:
        raise BadModelFile("; ".join(problems))
    return read_object(directory / name) or {}

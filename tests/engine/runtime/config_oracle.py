"""One configuration, loaded by transformers and by the engine: do they compute the same?

Checkpoints are made once for each set of tensors; a configuration is its own config.json beside a link to one
of them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.host.host_shard import host_network
from engine.runtime.setup.model_errors import ModelError
from engine.runtime.setup.runner_config import Kernels, RunnerConfig
from engine.runtime.start import starting
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.seats import HostSlots

TOLERANCE = 1e-4
ROUNDING_MAX = 3e-4
"""The most that float32's rounding sets two computations apart that are the same."""
PAGE_SIZE = 16
PROMPT_LEN, DECODED = 46, 2
TOKENS = PROMPT_LEN + DECODED
"""More than any window of the matrix."""
KERNELS: tuple[Kernels, ...] = ("native", "torch")

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 300.0,
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": 12}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    "exaone4": ("Exaone4", {"sliding_window": 12, "sliding_window_pattern": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_local_experts": 0,
            "layer_types": ["attention", "attention"],
            "shared_intermediate_size": 64,
            "mamba_n_heads": 2,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "seed_oss": ("SeedOss", {"attention_out_bias": True}),
    "arcee": ("Arcee", {"hidden_act": "relu2"}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {"rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0}},
    ),
    "qwen3_5_text": (
        "Qwen3_5",
        {
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "glm4": ("Glm4", {"attention_bias": True}),
    "cohere2": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 12, "sliding_window_pattern": 2}),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.7,
            }
        },
    ),
}
"""The families whose tensors transformers itself names: the prefix of their classes, and their own keys of
config.json, which tell something where the plain ones do not."""


BY_KERNELS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "smollm3": {},
    "granite": {},
    "granitemoehybrid": {},
    "glm4": {},
    "hunyuan_v1_dense": {},
    "phi3": {},
    "seed_oss": {},
    "ernie4_5": {},
    "ministral": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {},
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
    "arcee": {},
    "qwen3_5_text": {"linear_key_head_dim": 16},
}
"""Those that a device's kernels compute, and sizes that these take, where they are not as above."""


class Outcome(Enum):
    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"
    """The engine computes something else, or what nobody could compare."""
    BOTH_REFUSE = "both refuse"
    NO_ORACLE = "only transformers refuses"


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    said: str
    """The engine's refusal, or how far apart the two are."""
    heard: tuple[str, ...] = ()
    """What the engine's log says of the load."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint: those of `model_type` in these sizes."""

    model_type: str
    hidden: int = 32
    intermediate: int = 48
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    vocab: int = 64
    biases: bool = False
    """Of attention and MLP, where the family may have them."""
    head: str = "none"
    """`own`, `none`, or `tied`: a copy of the embedding."""
    sizes: tuple[tuple[str, int], ...] = ()
    """The family's own keys of config.json that say how large tensors are, where they differ."""

    def config(self, **fields: Any) -> dict[str, Any]:
        """A plain config.json for them."""
        names = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2"}
        plain = {
            "architectures": [f"{names.get(self.model_type, 'Qwen3')}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": self.head != "own",
        }
        if self.biases:
            plain |= {"attention_bias": True, "mlp_bias": True}
        if self.model_type in FAMILIES:
            prefix, own = FAMILIES[self.model_type]
            plain |= {"architectures": [f"{prefix}ForCausalLM"], "pad_token_id": None, **own}
        return plain | dict(self.sizes) | fields

    def saved(self, path: Path, **fields: Any) -> Path:
        """A model directory, with these keys in its config.json, of one of `FAMILIES`."""
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config(**fields)))
        save_file(self._as_in_transformers(**fields), path / "model.safetensors", {"format": "pt"})
        return path

    def tensors(self) -> dict[str, Tensor]:
        if self.model_type in FAMILIES:
            return self._as_in_transformers()
        family, q, kv = self.model_type, self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv_bias = family == "qwen2" or (self.biases and family in ("llama", "qwen3"))
        output_bias, mlp_bias = qkv_bias and family != "qwen2", self.biases and family == "llama"
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, rows, columns, bias in (
                ("self_attn.q_proj", q, self.hidden, qkv_bias),
                ("self_attn.k_proj", kv, self.hidden, qkv_bias),
                ("self_attn.v_proj", kv, self.hidden, qkv_bias),
                ("self_attn.o_proj", self.hidden, q, output_bias),
                ("mlp.gate_proj", self.intermediate, self.hidden, mlp_bias),
                ("mlp.up_proj", self.intermediate, self.hidden, mlp_bias),
                ("mlp.down_proj", self.hidden, self.intermediate, mlp_bias),
            ):
                shapes[f"{at}.{name}.weight"] = rows, columns
                if bias:
                    shapes[f"{at}.{name}.bias"] = (rows,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{at}.{norm}.weight"] = (self.hidden,)
            if family == "qwen3":
                for norm in ("q_norm", "k_norm"):
                    shapes[f"{at}.self_attn.{norm}.weight"] = (self.head_dim,)
        return self._made(shapes)

    def _as_in_transformers(self, **fields: Any) -> dict[str, Tensor]:
        import transformers

        config: Any = transformers.AutoConfig.for_model(**self.config(**fields))
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        shapes.pop("lm_head.weight")
        return self._made(shapes)

    def _made(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors of these shapes, and the head."""
        if self.head == "own":
            shapes["lm_head.weight"] = self.vocab, self.hidden
        norm = 0.0 if self.model_type.startswith(("gemma", "qwen3_5")) else 1.0
        tensors = {name: _made_up(name, shape, norm) for name, shape in shapes.items()}
        if self.head == "tied":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        return tensors


def _made_up(name: str, shape: tuple[int, ...], norm: float = 1.0) -> Tensor:
    """From the name alone, and so large that attention is far from even. `norm`: about what norms are."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if "norm" in name:
        return norm + values / 5
    return values * (0.5 if len(shape) == 1 or "embed" in name or "lm_head" in name else 0.3)


@dataclass
class Workshop:
    """Where configurations are tried, in a directory that they share."""

    path: Path
    _files: dict[Weights, Path] = field(default_factory=dict)

    def verdict(self, weights: Weights, config: Mapping[str, Any] | str) -> Verdict:
        """`config`: config.json, or its text."""
        model = self.model(weights, config)
        theirs, heard = _theirs(model, torch.float32), list[str]()
        try:
            ours = {kernels: our_logprobs(model, kernels, heard) for kernels in KERNELS}
        except ModelError as error:
            computed = isinstance(theirs, Tensor | Contradiction)
            return Verdict(Outcome.REFUSED if computed else Outcome.BOTH_REFUSE, str(error))
        if isinstance(theirs, Exception):
            return Verdict(Outcome.NO_ORACLE, f"{type(theirs).__name__}: {theirs}", tuple(heard))
        if isinstance(theirs, Contradiction):
            return Verdict(Outcome.WRONG, theirs.what, tuple(heard))
        distance = max(_distance(own, theirs, model) for own in ours.values())
        outcome = Outcome.EQUAL if distance < TOLERANCE else Outcome.WRONG
        return Verdict(outcome, f"off by {distance:.2g}", tuple(heard))

    def model(self, weights: Weights, config: Mapping[str, Any] | str) -> Path:
        """A directory with such a model, until the next is made."""
        model = self.path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        link = model / "model.safetensors"
        link.unlink(missing_ok=True)
        os.link(self._file(weights), link)
        return model

    def _file(self, weights: Weights) -> Path:
        if weights not in self._files:
            file = self.path / f"{len(self._files)}.safetensors"
            save_file(weights.tensors(), file, {"format": "pt"})
            self._files[weights] = file
        return self._files[weights]


def _distance(ours: Tensor, theirs: Tensor, path: Path) -> float:
    """The worst difference. Two that compute in float32 may err in opposite directions, on some processors
    more than on others. The sum is not the engine's error: where it is large, that from float64 counts."""
    apart = float((ours - theirs).abs().max())
    if TOLERANCE <= apart < ROUNDING_MAX and isinstance(exact := _theirs(path, torch.float64), Tensor):
        apart = min(apart, float((ours - exact).abs().max()))
    return apart


@dataclass(frozen=True, slots=True)
class Contradiction:
    """transformers loads the model, and there is no one answer: it is to be refused."""

    what: str


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Layers are made without drawing the values that a checkpoint replaces, a tenth of a verdict's time.
    transformers itself draws what a checkpoint lacks, and then there is no answer."""
    with ExitStack() as stack:
        for layer in (torch.nn.Linear, torch.nn.Embedding):
            stack.enter_context(mock.patch.object(layer, "reset_parameters", return_value=None))
        yield


def _loaded(path: Path, dtype: torch.dtype) -> Any:
    import transformers

    with without_initial_values():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)


@torch.inference_mode()
def their_logprobs(path: Path, dtype: torch.dtype) -> Tensor:
    """[TOKENS, vocab], in one pass, float32."""
    model, _ = _loaded(path, dtype)
    ids = torch.tensor([tokens(model.config.vocab_size)])
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _theirs(path: Path, dtype: torch.dtype) -> Tensor | Contradiction | Exception:
    """[TOKENS, vocab], by its real way of starting."""
    try:
        model, info = _loaded(path, dtype)
        if info["missing_keys"]:
            return Contradiction(f"transformers makes up {sorted(info['missing_keys'])}")
        with torch.inference_mode():
            return _both_ways(model.eval())
    except Exception as error:  # any: the oracle has no answer
        return error


def _both_ways(model: Any) -> Tensor | Contradiction:
    """All tokens in one pass, and as `generate` has them, with a cache that may be of another mind."""
    ids = torch.tensor([tokens(model.config.vocab_size)])
    whole: Tensor = model(ids, use_cache=False).logits[0].log_softmax(-1)
    step = model(ids[:, :PROMPT_LEN], use_cache=True)
    for at in range(PROMPT_LEN, TOKENS):
        step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
        difference = (step.logits[0, -1].log_softmax(-1) - whole[at]).abs().max()
        if not difference < TOLERANCE:
            return Contradiction(f"transformers generates what is {difference:.2g} from its own forward pass")
    return whole


def tokens(vocab_size: int) -> list[int]:
    return [(7 * i + i * i) % vocab_size for i in range(TOKENS)]


@torch.inference_mode()
def our_logprobs(
    path: Path, kernels: Kernels, heard: list[str], dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """[TOKENS, vocab], by the engine's way of loading: a prompt, then one token after the other. `options`:
    further settings."""
    settings = RunnerConfig(
        str(path), device="cpu", kernels=kernels, page_size=PAGE_SIZE, threads=1, **options
    )
    config = starting.read_model(settings, heard.append)
    config, checkpoint = starting.checked_checkpoint(settings, config, dtype, heard.append)
    config = replace(config, context_len=TOKENS)
    network = host_network(settings, config, checkpoint, dtype, threads=1)
    geometry = KVGeometry(len(config.attentions), config.kv_heads, PAGE_SIZE, config.head_dim, dtype)
    pages = -(-TOKENS // PAGE_SIZE)
    model = network.attach(KVCache(geometry, pages), slots=1)
    slots = HostSlots(1, TOKENS, PAGE_SIZE, config.vocab_size)
    start = SlotAssignment.of(0, tokens(config.vocab_size), TOKENS, SamplingParams(seed=0, max_tokens=1))
    slots.apply(Plan(0, [], [start], [(0, list(range(pages)))], [], [], [], []))
    rows = [(0, PROMPT_LEN), *((at, 1) for at in range(PROMPT_LEN, TOKENS))]
    steps = [Plan(0, [], [], [], [0], [at], [length], [Want.NOTHING]) for at, length in rows]
    hidden = torch.cat([model.forward(PackedBatch.of(step, slots)).clone() for step in steps])
    return model.logits(hidden).float().log_softmax(-1)

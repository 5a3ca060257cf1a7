"""Every rank reads its part and no more, and the parts make up the whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.group import Group
from engine.runtime.collective.shard import Shard
from engine.runtime.models.decoder_config import parse_model_config, read_model_config
from engine.runtime.models.spec import DecoderSpec, Names
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.model_errors import BadRunnerConfig, CollectiveFailed, WeightsMismatch
from engine.runtime.step.batch import Row
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights import checkpoint
from engine.runtime.weights.checkpoint import Checkpoint, Inspection, TensorPart, checkpoint_files
from tests import effort
from tests.engine.decoders import dense, like
from tests.engine.models import VOCAB_SIZE
from tests.engine.runtime.config_oracle import FAMILIES, Weights
from tests.engine.runtime.conftest import MakeModel

CPU = torch.device("cpu")
TOKENS = 12
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, tied, 2 of 2 kv heads": ("llama", 2, {}),
    "llama, untied, biases everywhere": (
        "llama",
        2,
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "mistral, one kv head for two ranks": ("mistral", 2, {"num_key_value_heads": 1}),
    "mistral, two kv heads for four ranks": ("mistral", 4, {}),
    "qwen2, odd vocabulary": (
        "qwen2",
        2,
        {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "vocab_size": 321},
    ),
    "qwen2, three ranks, a padded and tied head": (
        "qwen2",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "tie_word_embeddings": True},
    ),
    "qwen3, qk norm, several files": ("qwen3", 2, {"shard_bytes": 100_000}),
}
variants = pytest.mark.parametrize(("family", "size", "overrides"), VARIANTS.values(), ids=list(VARIANTS))


def together(size: int, store: Path, work: Callable[[Collective], Any]) -> list[Any]:
    """`work` of every rank, each in a thread of its own, over gloo."""

    def run(rank: int) -> Any:
        with torch.inference_mode():
            return work(Group(Shard(rank, size), str(store), CPU))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


class OnTheStream:
    """A backend of one rank that computes in the call itself and gives no handle, as NCCL does when asked for
    none."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        assert not options.asyncOp

    def _allgather_base(self, out: Tensor, own: Tensor, options: Any) -> None:
        assert not options.asyncOp
        out.copy_(own)


def test_a_backend_that_gives_no_handle_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Shard(), str(tmp_path / "store"), CPU)
    monkeypatch.setattr(group, "_backend", OnTheStream())
    x = torch.arange(12.0).reshape(3, 4)
    assert group.all_reduce_(x) is x
    assert torch.equal(group.all_gather(x), x)


class EachForItself:
    """Attention among the packed tokens, causal, by the heads that there are."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, is_causal=True
        )
        return out.transpose(0, 1)


def logits_of(decoder: TorchDecoder) -> Tensor:
    tokens = torch.arange(TOKENS) * 7 % VOCAB_SIZE
    states = States(StateGeometry.of(decoder.config, torch.float32), 1)
    step = StepStates(states, [Row(0, 0, TOKENS, 0)], 0)
    return decoder.logits(decoder.forward(tokens, torch.arange(TOKENS), EachForItself(), step))


@variants
def test_ranks_compute_what_one_does(
    tiny_model: MakeModel, tmp_path: Path, family: str, size: int, overrides: dict[str, Any]
) -> None:
    path = tiny_model(family, **overrides)
    config, files = read_model_config(path), checkpoint_files(path)
    with torch.inference_mode():
        expected = logits_of(TorchDecoder(config, Checkpoint(files, torch.float32)))

    def work(ranks: Collective) -> Tensor:
        return logits_of(TorchDecoder(config, Checkpoint(files, torch.float32), ranks))

    found = together(size, tmp_path / "store", work)
    assert found[0].shape == (TOKENS, config.vocab_size)
    assert torch.allclose(found[0], expected, rtol=0, atol=1e-4)
    assert not torch.equal(found[0], torch.zeros_like(expected))
    for other in found[1:]:
        assert torch.equal(other, found[0]), "every rank has the same bits"


@pytest.mark.parametrize(
    "family", effort.some(sorted(FAMILIES, key=lambda name: name != "qwen3_5_text"), usual=7)
)
def test_ranks_compute_every_family(tmp_path: Path, family: str) -> None:
    """Fused matrices, norms over the width of all ranks, rows of heads in another order."""
    weights = Weights(family, vocab=VOCAB_SIZE, heads=4, kv_heads=2, biases=True)
    file = tmp_path / "model.safetensors"
    save_file(weights.tensors(), file)
    config = parse_model_config(json.dumps(weights.config()).encode())
    files = checkpoint_files(tmp_path)
    with torch.inference_mode():
        expected = logits_of(TorchDecoder(config, Checkpoint(files, torch.float32)))

    def work(ranks: Collective) -> Tensor:
        return logits_of(TorchDecoder(config, Checkpoint(files, torch.float32), ranks))

    for found in together(2, tmp_path / "store", work):
        assert torch.allclose(found, expected, rtol=0, atol=1e-4)


@variants
def test_a_rank_reads_its_part(
    tiny_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    size: int,
    overrides: dict[str, Any],
) -> None:
    """Bytes asked of the files: what is split is read once by all ranks together, the rest once by each."""
    path = tiny_model(family, **overrides)
    config, files = read_model_config(path), checkpoint_files(path)
    asked: dict[str, int] = {}
    monkeypatch.setattr(checkpoint, "_open", counting(checkpoint._open, asked))

    def bytes_of(shard: Shard) -> dict[str, int]:
        asked.clear()
        TorchDecoder(config, Checkpoint(files, torch.float32), Silent(shard))
        return dict(asked)

    whole = bytes_of(Shard())
    parts = [bytes_of(Shard(rank, size)) for rank in range(size)]
    for name, count in whole.items():
        read = [part.get(name, 0) for part in parts]
        if name == Names().embedding or "norm" in name:
            assert read == [count] * size, name
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert read == [count] + [0] * (size - 1), name
        elif config.kv_heads < size and ("k_proj" in name or "v_proj" in name):
            assert read == [count // config.kv_heads] * size, name
        elif name == "lm_head.weight":
            assert sum(read) == count
            assert max(read) - min(read) <= size * count // config.vocab_size
        else:
            assert read == [count // size] * size, name


class Silent:
    """Loads like a rank, and is never asked to compute."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.neighbours = shard.size

    def all_reduce_(self, x: Tensor) -> Tensor:
        raise AssertionError

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError


def counting(opened: Callable[[Path], Any], asked: dict[str, int]) -> Callable[[Path], Any]:
    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self._name, self._inner = name, inner

        def get_shape(self) -> list[int]:
            shape: list[int] = self._inner.get_shape()
            return shape

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self._inner[index]
            asked[self._name] = asked.get(self._name, 0) + found.nbytes
            return found

    class Handle:
        def __init__(self, path: Path) -> None:
            self._inner = opened(path)

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self._inner.get_slice(name))

    return Handle


@variants
def test_the_inspection_still_sees_whole_shapes(
    tiny_model: MakeModel, family: str, size: int, overrides: dict[str, Any]
) -> None:
    path = tiny_model(family, **overrides)
    config, files = read_model_config(path), checkpoint_files(path)
    inspection = Inspection(files, torch.float32)
    TorchDecoder(config, inspection, Silent(Shard(0, size)))
    inspection.verify()
    cut = Inspection(files, torch.float32)
    wrong = like(config, intermediate_size=config.intermediate_size * 2)
    TorchDecoder(wrong, cut, Silent(Shard(0, size)))
    with pytest.raises(WeightsMismatch, match="down_proj"):
        cut.verify()


def model(heads: int, kv_heads: int, intermediate: int = 96) -> DecoderSpec:
    return dense(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        norm_eps=1e-6,
        context_len=64,
        windows=(None,),
        tied_embeddings=False,
    )


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (model(4, 2), 3, ("--tensor-parallel-size 3", "num_attention_heads (4)", "takes 1, 2, 4")),
        (model(7, 1), 2, ("num_attention_heads (7)", "takes 1")),
        (model(12, 4), 6, ("num_key_value_heads (4)", "takes 1, 2, 4, 12")),
        (model(8, 8, intermediate=100), 8, ("intermediate_size (100)", "takes 1, 2, 4")),
    ],
)
def test_a_size_that_does_not_fit_is_named(config: DecoderSpec, size: int, words: tuple[str, ...]) -> None:
    with pytest.raises(BadRunnerConfig) as caught:
        Shard(0, size).of(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 2), (2, 2), (1, 4), (2, 8), (4, 8)])
def test_query_heads_find_their_key_heads(kv_heads: int, size: int) -> None:
    """The key head of each query head is on the rank that has the query head."""
    heads = 8
    for rank in range(size):
        shard = Shard(rank, size)
        queries, keys = range(*shard.span(heads)), range(*shard.span(kv_heads))
        local = len(queries) // len(keys)
        for i, query in enumerate(queries):
            assert keys[i // local] == query * kv_heads // heads


def test_a_part_of_nothing() -> None:
    """More ranks than rows: the last ones have none, and pad."""
    spans = [Shard(rank, 4).padded_span(5) for rank in range(4)]
    assert spans == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert TensorPart(rows=((5, 5),)).shape([5], [3]) == (0, 3)


def test_sums_and_rows_put_together(tmp_path: Path) -> None:
    def work(ranks: Collective) -> tuple[Tensor, Tensor]:
        own = torch.arange(6.0).reshape(2, 3) + 10 * ranks.shard.rank
        return ranks.all_gather(own), ranks.all_reduce_(own)

    for gathered, summed in together(2, tmp_path / "store", work):
        assert gathered.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert summed.tolist() == [[10, 12, 14], [16, 18, 20]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_of_a_sum_do_not_depend_on_its_place(tmp_path: Path, size: int) -> None:
    rows = torch.randn(size, 300, generator=torch.Generator().manual_seed(1))

    def work(ranks: Collective) -> tuple[Tensor, Tensor]:
        own = rows[ranks.shard.rank]
        return ranks.all_reduce_(own.clone()[None]), ranks.all_reduce_(own.repeat(64, 1))

    for alone, many in together(size, tmp_path / "store", work):
        assert torch.equal(many, alone.expand(64, -1))


def test_alone_costs_nothing() -> None:
    x = torch.ones(2, 3)
    assert ALONE.all_reduce_(x) is x
    assert ALONE.all_gather(x) is x


def test_a_torch_that_lacks_what_a_group_is_made_of_fails_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        FileStore = staticmethod(torch.distributed.FileStore)  # type: ignore[attr-defined]

    monkeypatch.setattr("engine.runtime.collective.group._c10d", Other)
    with pytest.raises(CollectiveFailed, match="no attribute 'ProcessGroupGloo'"):
        Group(Shard(), str(tmp_path / "store"), CPU)


def test_a_rank_that_leaves_is_noticed_by_who_waits(tmp_path: Path) -> None:
    met = threading.Barrier(2)

    def work(ranks: Collective) -> str:
        ranks.all_reduce_(torch.ones(1))
        met.wait(60)
        if ranks.shard.rank == 1:
            return "left"
        with pytest.raises(CollectiveFailed):
            ranks.all_reduce_(torch.ones(1))
        return "noticed"

    assert together(2, tmp_path / "store", work) == ["noticed", "left"]

"""A network computes only what it declares: a family or a setting that it does not know goes to another
network, or is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.runtime.device import device_decoder as device_network
from engine.runtime.device import device_shard as device_load
from engine.runtime.device.device_decoder import DeviceDecoder
from engine.runtime.host import host_shard as host_load
from engine.runtime.load import load_runner
from engine.runtime.models.decoder_config import parse_model_config, read_model_config
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.pieces import lacking, pieces_of
from engine.runtime.models.quantization import Fp8Scheme
from engine.runtime.models.spec import Attention, DecoderSpec, Llama3, Rope
from engine.runtime.native import decoder as native_network
from engine.runtime.native.decoder import NativeDecoder, built_isas
from engine.runtime.reference import torch_decoder as torch_network
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.model_errors import BadRunnerConfig, UnsupportedModel
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.parameters import read_all
from tests.engine.decoders import dense, like
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, fake_config, load_on_card
from tests.engine.runtime.odd_configs import plain

Implements = Callable[[DecoderSpec], str | None]
NETWORKS: dict[str, Implements] = {
    "native": lambda model: lacking(model, native_network.IMPLEMENTED),
    "torch": TorchDecoder.implements,
    "device": DeviceDecoder.implements,
}
MODULES = {"native": native_network, "torch": torch_network, "device": device_network}
PLAIN = dense(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context_len=256,
)


@dataclass(frozen=True, slots=True)
class Biased(DecoderSpec):
    """A description of models with one field more, as the next family would bring it."""

    head_bias: bool = False


@dataclass(frozen=True, slots=True)
class Sunk(Attention):
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Turning:
    by: float


def extended(kind: type[Any], described: Any, **settings: Any) -> Any:
    return kind(**{own.name: getattr(described, own.name) for own in fields(described)}, **settings)


def with_layer(**changes: Any) -> DecoderSpec:
    return replace(PLAIN, layers=tuple(replace(layer, **changes) for layer in PLAIN.layers))


SIZED: Mapping[str, Mapping[str, Any]] = {"qwen3_5_text": {"linear_key_head_dim": 16}}
"""Sizes that the device's kernels take, where a plain configuration has others."""
FOREIGN = {
    "mlp.act gelu": like(PLAIN, act="gelu"),
    "norm.kind group": replace(PLAIN, norm=replace(PLAIN.norm, kind="group")),  # type: ignore[arg-type]
    "layer.norms between": like(PLAIN, norms="between"),
    "head_bias": extended(Biased, PLAIN, head_bias=True),
    "sunk.sinks": with_layer(attention=extended(Sunk, PLAIN.attention, sinks=True)),
    "rope.scaling Turning": like(PLAIN, rope=Rope(1e4, Turning(4.0))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_plain_decoder_is_computed_by_all(network: str) -> None:
    assert NETWORKS[network](PLAIN) is None


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("piece", FOREIGN)
def test_what_a_network_does_not_declare_it_does_not_compute(network: str, piece: str) -> None:
    """All of these have Llama's sizes, which every network could compute with."""
    assert NETWORKS[network](FOREIGN[piece]) == f"{piece}: not implemented"


@pytest.mark.parametrize("network", NETWORKS)
def test_each_setting_counts_where_it_is_set(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the description says of weights and angles alone, the parameters have in them."""
    every = like(
        PLAIN,
        ropes=(None, Rope(1e4, Llama3(8.0, 1.0, 4.0, 64), 0.5, interleaved=True)),
        windows=(None, 8),
        norm_offset=1.0,
        tied_embeddings=True,
        fp8=Fp8Scheme("fp8"),
        bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm="heads",
    )
    own = MODULES[network].IMPLEMENTED
    assert pieces_of(every) <= own
    for piece in pieces_of(every):
        with monkeypatch.context() as patched:
            patched.setattr(MODULES[network], "IMPLEMENTED", own - {piece})
            assert NETWORKS[network](every) == f"{piece}: not implemented"
            expected = None if piece not in pieces_of(PLAIN) else f"{piece}: not implemented"
            assert NETWORKS[network](PLAIN) == expected


def test_torch_computes_every_piece_that_the_others_do() -> None:
    for module in MODULES.values():
        assert module.IMPLEMENTED <= torch_network.IMPLEMENTED


def test_the_readme_says_which_families_there_are_and_what_computes_them_on_a_gpu() -> None:
    readme = (Path(__file__).parents[3] / "engine/README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (Triton|torch|no) \|$", readme, re.MULTILINE)
    computes = {}
    for name in FAMILIES:
        model = parse_model_config(json.dumps({**plain(Weights(name)), **SIZED.get(name, {})}).encode())
        assert TorchDecoder.implements(model) is None
        assert lacking(model, native_network.IMPLEMENTED) is None
        computes[name] = "Triton" if DeviceDecoder.implements(model) is None else "torch"
    assert dict(rows) == computes


@dataclass(slots=True)
class Asked:
    """A WeightSource of zeros that notes what it is asked for."""

    names: list[str] = field(default_factory=list)

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        self.names += names
        return torch.zeros(part.shape(rows, columns))


def read_natively(config: DecoderSpec, source: Asked) -> object:
    settings = {"dtype": torch.float32, "page_size": 16, "threads": 1}
    return NativeDecoder(built_isas()[0], config, source, **settings)  # type: ignore[arg-type]


READERS: dict[str, Callable[[DecoderSpec, Asked], object]] = {
    "native": read_natively,
    "torch": TorchDecoder,
    "device": lambda config, source: DeviceDecoder(config, source, torch.device("cpu")),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_is_checked_for_what_every_network_reads(network: str, is_tied: bool) -> None:
    config = like(PLAIN, tied_embeddings=is_tied, qk_norm="heads", bias=True, out_bias=True, mlp_bias=True)
    checked, read = Asked(), Asked()
    read_all(config, checked)
    READERS[network](config, read)
    assert sorted(read.names) == sorted(checked.names)
    assert len(set(checked.names)) == len(checked.names)


def foreign_reader(**settings: Any) -> Callable[..., DecoderSpec]:
    """Reads a model as an unknown family's."""

    def read(config: RunnerConfig, progress: object) -> DecoderSpec:
        return like(read_model_config(Path(config.model)), **settings)

    return read


def test_what_only_torch_declares_goes_to_torch(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native kernels would fit its sizes."""
    config = RunnerConfig(str(tiny_model("llama")), device="cpu", dtype="float32", max_num_seqs=2, threads=1)
    own = native_network.IMPLEMENTED - {"mlp.act silu"}
    monkeypatch.setattr(native_network, "IMPLEMENTED", own)
    said: list[str] = []
    load_runner(config, said.append)
    assert "computing with torch kernels (mlp.act silu: not implemented)" in said
    with pytest.raises(BadRunnerConfig, match=r"kernels=native needs .*mlp\.act silu: not implemented"):
        load_runner(replace(config, kernels="native"), said.append)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_family_that_no_network_declares_is_refused_by_name(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kernels: Literal["auto", "torch"]
) -> None:
    config = RunnerConfig(str(tiny_model("llama")), device="cpu", max_num_seqs=2, threads=1, kernels=kernels)
    monkeypatch.setattr(host_load, "read_model", foreign_reader(act="gelu"))
    with pytest.raises(UnsupportedModel, match=r"on a CPU: mlp\.act gelu: not implemented"):
        load_runner(config, lambda stage: None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"act": "gelu"}, "no network computes this model on a GPU: mlp.act gelu: not implemented"),
        ({"act": "relu2"}, "weights=fp8 needs the Triton kernels: gated relu2"),
        ({"head_dim": 24}, "weights=fp8 needs the Triton kernels: head_dim 24 is not a power of two"),
    ],
)
def test_a_gpu_refuses_by_name_what_it_cannot_do(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(device_load, "read_model", foreign_reader(**settings))
    with pytest.raises((UnsupportedModel, BadRunnerConfig), match=said):
        load_on_card(fake_config(tiny_model("llama"), weights="fp8"), FakeCard(), lambda stage: None)

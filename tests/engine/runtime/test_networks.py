"""A network computes only what it declares: a family or a setting that it does not know goes to another
network, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.runtime.device import device_decoder as device_network
from engine.runtime.device import device_shard as device_load
from engine.runtime.device.device_decoder import DeviceDecoder
from engine.runtime.device.device_shard import load_on_card
from engine.runtime.host import host_shard as host_load
from engine.runtime.host import torch_decoder as torch_network
from engine.runtime.host.torch_decoder import TorchDecoder
from engine.runtime.load import load_runner
from engine.runtime.models import features
from engine.runtime.models.decoder_config import FAMILIES, DecoderConfig, read_model_config
from engine.runtime.models.features import features_of
from engine.runtime.models.rope import Llama3Scaling, RopeConfig
from engine.runtime.native import decoder as native_network
from engine.runtime.native.decoder import NativeDecoder, built_isas
from engine.runtime.setup.model_errors import BadRunnerConfig, UnsupportedModel
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.parameters import read_all
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, fake_config

Implements = Callable[[DecoderConfig], str | None]
NETWORKS: dict[str, Implements] = {
    "native": NativeDecoder.implements,
    "torch": TorchDecoder.implements,
    "device": DeviceDecoder.implements,
}
MODULES = {"native": native_network, "torch": torch_network, "device": device_network}
PLAIN = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context_len=256,
    rope=RopeConfig(1e4),
    windows=(None, None),
    tied_embeddings=False,
)


@dataclass(frozen=True, slots=True)
class SoftCapped(DecoderConfig):
    """A description of models with one field more, as the next family would bring it."""

    logit_softcap: float | None = None
    residual_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class YarnRope(RopeConfig):
    yarn: float | None = None


def extended(kind: type[Any], described: Any, **settings: Any) -> Any:
    return kind(**{own.name: getattr(described, own.name) for own in fields(described)}, **settings)


FOREIGN = {
    "architecture GemmaForCausalLM": replace(PLAIN, architecture="GemmaForCausalLM"),
    "activation gelu_pytorch_tanh": replace(PLAIN, activation="gelu_pytorch_tanh"),
    "norm rms_plus_one": replace(PLAIN, norm="rms_plus_one"),
    "logit_softcap": extended(SoftCapped, PLAIN, logit_softcap=30.0),
    "residual_multiplier": extended(SoftCapped, PLAIN, residual_multiplier=0.5),
    "rope.yarn": replace(PLAIN, rope=extended(YarnRope, PLAIN.rope, yarn=4.0)),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_family_that_is_read_is_declared(network: str) -> None:
    for family in FAMILIES.values():
        assert NETWORKS[network](replace(PLAIN, architecture=family.architecture)) is None


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("feature", FOREIGN)
def test_what_a_network_does_not_declare_it_does_not_compute(network: str, feature: str) -> None:
    """All of these have Llama's sizes, which every network could compute with."""
    assert NETWORKS[network](FOREIGN[feature]) == f"{feature}: not implemented"


@pytest.mark.parametrize("network", NETWORKS)
def test_each_setting_counts_where_it_is_set(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = replace(
        PLAIN,
        rope=RopeConfig(1e4, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        windows=(None, 8),
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
    )
    own = MODULES[network].IMPLEMENTED
    assert features_of(every) == own - {"fp8"} - (features_of_families() - features_of(PLAIN))
    for feature in features_of(every):
        with monkeypatch.context() as patched:
            patched.setattr(MODULES[network], "IMPLEMENTED", own - {feature})
            assert NETWORKS[network](every) == f"{feature}: not implemented"
            expected = None if feature not in features_of(PLAIN) else f"{feature}: not implemented"
            assert NETWORKS[network](PLAIN) == expected


def features_of_families() -> frozenset[str]:
    return frozenset(f"architecture {family.architecture}" for family in FAMILIES.values())


def test_a_field_that_is_no_setting_is_named_as_a_number_or_as_nothing() -> None:
    """A name in these tables that is no field any more would let the next field of that name through."""
    known = {own.name for own in fields(DecoderConfig)} | {f"rope.{own.name}" for own in fields(RopeConfig)}
    assert known >= features.NUMBERS | features.NO_ARITHMETIC


@dataclass(slots=True)
class Asked:
    """A WeightSource of zeros that notes what it is asked for."""

    names: list[str] = field(default_factory=list)

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        self.names += names
        return torch.zeros(part.shape(rows, columns))


def read_natively(config: DecoderConfig, source: Asked) -> object:
    settings = {"dtype": torch.float32, "page_size": 16, "max_model_len": 32, "threads": 1}
    return NativeDecoder(built_isas()[0], config, source, **settings)  # type: ignore[arg-type]


READERS: dict[str, Callable[[DecoderConfig, Asked], object]] = {
    "native": read_natively,
    "torch": TorchDecoder,
    "device": lambda config, source: DeviceDecoder(config, source, torch.device("cpu")),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_is_checked_for_what_every_network_reads(network: str, is_tied: bool) -> None:
    config = replace(
        PLAIN, tied_embeddings=is_tied, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    checked, read = Asked(), Asked()
    read_all(config, checked)
    READERS[network](config, read)
    assert sorted(read.names) == sorted(checked.names)
    assert len(set(checked.names)) == len(checked.names)


def foreign_reader(**settings: Any) -> Callable[..., DecoderConfig]:
    """Reads a model as an unknown family's."""

    def read(config: RunnerConfig, progress: object) -> DecoderConfig:
        return replace(read_model_config(Path(config.model)), **settings)

    return read


def test_a_family_that_only_torch_declares_goes_to_torch(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native kernels would fit its sizes."""
    config = RunnerConfig(str(tiny_model("llama")), device="cpu", dtype="float32", max_num_seqs=2, threads=1)
    monkeypatch.setattr(host_load, "read_model", foreign_reader(architecture="GemmaForCausalLM"))
    own = torch_network.IMPLEMENTED | {"architecture GemmaForCausalLM"}
    monkeypatch.setattr(torch_network, "IMPLEMENTED", own)
    said: list[str] = []
    load_runner(config, said.append)
    assert "computing with torch kernels (architecture GemmaForCausalLM: not implemented)" in said
    with pytest.raises(BadRunnerConfig, match=r"kernels=native needs .*GemmaForCausalLM: not implemented"):
        load_runner(replace(config, kernels="native"), said.append)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_family_that_no_network_declares_is_refused_by_name(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kernels: Literal["auto", "torch"]
) -> None:
    config = RunnerConfig(str(tiny_model("llama")), device="cpu", max_num_seqs=2, threads=1, kernels=kernels)
    monkeypatch.setattr(host_load, "read_model", foreign_reader(norm="rms_plus_one"))
    with pytest.raises(UnsupportedModel, match="on a CPU: norm rms_plus_one: not implemented"):
        load_runner(config, lambda stage: None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": "GemmaForCausalLM"}, "architecture GemmaForCausalLM: not implemented"),
        ({"activation": "gelu"}, "activation gelu: not implemented"),
        ({"head_dim": 24}, "head_dim 24 is not a power of two"),
    ],
)
def test_a_gpu_refuses_by_name_what_its_kernels_do_not_implement(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(device_load, "read_model", foreign_reader(**settings))
    with pytest.raises(UnsupportedModel, match=f"do not compute this model: {said}"):
        load_on_card(fake_config(tiny_model("llama")), FakeCard(), lambda stage: None)

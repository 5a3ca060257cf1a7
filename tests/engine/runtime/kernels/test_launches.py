"""How many kernels a decode step is. Each costs 2 to 4 us in a CUDA graph on an H200 whatever it does, so
that the number is the speed of a small model; here it cannot creep up unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runtime.attention.triton_paged import TritonDecode
from engine.runtime.device import device_sampling as device_sampling
from engine.runtime.device.device_decoder import DecodeStep, DeviceDecoder, DeviceSampler, StepTables
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch
from engine.runtime.device.graphs import DecodeInputs
from engine.runtime.kernels import begin, decode_attention, delta_net, fused, matmul, split_matmul
from engine.runtime.kernels.autotune import MatmulTable
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.states import StateGeometry, States
from tests.bench.engine.gpu.shapes import QWEN3_06B, RandomWeights
from tests.engine.decoders import like
from tests.engine.runtime.kernels.tables import all_by_tiles

CPU = torch.device("cpu")
SLOTS, PAGE = 20, 16
MODULES: Sequence[ModuleType] = (
    *(begin, decode_attention, delta_net, fused, matmul, split_matmul, device_sampling),
)


class Unrun:
    """Stands where a kernel stands, and counts its launches: dependent launches apart from the others."""

    def __init__(self, name: str, seen: Counter[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: object, PDL: bool, launch_pdl: bool = False, **kwargs: object) -> None:  # noqa: N803
            kind = {(False, False): "", (True, False): "plain ", (True, True): "dependent "}[PDL, launch_pdl]
            self._seen[kind + self._name] += 1

        return launch


class Launches(TorchDispatchMode):
    """Counts what a GPU would be sent: our kernels, which do not run, and torch's, which do. Views and fresh
    memory are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, found = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        first = found[0] if isinstance(found, (list, tuple)) else found
        is_view = isinstance(first, Tensor) and first.untyped_storage().data_ptr() in given
        if func._schema.is_mutable or not (is_view or "empty" in name):
            self.seen[f"torch {name}"] += 1
        return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with ExitStack() as stack, Launches() as launches:
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(patch.object(module, name, Unrun(name, launches.seen)))
        yield launches.seen


def step_of(config: DecoderSpec) -> DecodeStep:
    cache = KVCache(
        KVGeometry(len(config.attentions), config.kv_heads, PAGE, config.head_dim, torch.float32), 8
    )
    spec = AttentionSpec.of(config)
    decoder = DeviceDecoder(config, RandomWeights(CPU, torch.float32), CPU)
    attention = TritonDecode(cache, spec, rows_max=SLOTS, multiprocessors=1)
    tokens = torch.zeros(SLOTS, 64, dtype=torch.int32)
    table = torch.zeros(SLOTS, 4, dtype=torch.int32)
    sampling = DeviceSampling.empty(SLOTS, config.vocab_size, CPU)
    scratch = SamplingScratch.empty(SLOTS, config.vocab_size, torch.float32, CPU)
    states = States(StateGeometry.of(config, torch.float32), SLOTS)
    kept = StepTables(tokens, table, cache, attention, states)
    return DecodeStep(kept, DeviceSampler(decoder, tokens, sampling, scratch, states))


Table = Callable[[DeviceDecoder], MatmulTable]


def by_library(decoder: DeviceDecoder) -> MatmulTable:
    return MatmulTable({})


def by_tiles(decoder: DeviceDecoder) -> MatmulTable:
    return all_by_tiles(decoder.linears)


def launches(layers: int, table: Table, rows: int = 2, *, dependently: bool = False) -> Counter[str]:
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "heads": 2, "kv_heads": 1}
    model = like(QWEN3_06B, head_dim=16, windows=(None,) * layers, **small)
    return launched(model, table, rows, dependently=dependently)


def launched(model: DecoderSpec, table: Table, rows: int, *, dependently: bool = False) -> Counter[str]:
    step = step_of(model)
    decoder = step.sampler.decoder
    assert isinstance(decoder, DeviceDecoder)
    decoder.table = table(decoder)
    inputs = DecodeInputs.empty(rows, CPU)
    inputs.lengths.fill_(1)
    with torch.inference_mode(), counted() as seen:
        replace(step, launches_dependently=dependently)(inputs)
    return seen


def counts(table: Table, rows: int = 2) -> tuple[Counter[str], Counter[str]]:
    """Of a layer, and of what is before the first and behind the last."""
    two, three = (launches(layers, table, rows) for layers in (2, 3))
    layer = three - two
    return layer, two - layer - layer


def test_a_single_row_is_six_kernels_per_layer_and_seven_besides() -> None:
    layer, ends = counts(by_tiles, 1)
    assert layer == {"skinny_kernel": 4, "norm_rotate_store_kernel": 1, "decode_kernel": 1}
    ours = ("begin_step", "list_work", "skinny", "measure", "weigh", "order", "choose")
    assert ends == {f"{name}_kernel": 1 for name in ours}


def test_a_delta_net_is_a_kernel_between_two_products_and_an_output_gate_one_more() -> None:
    qwen3_5 = _with_states(2)
    layer = launched(_with_states(3), by_tiles, 1) - launched(qwen3_5, by_tiles, 1)
    assert layer == {"skinny_kernel": 4, "delta_step_kernel": 1}
    first = Counter({"skinny_kernel": 8, "delta_step_kernel": 1, "norm_rotate_store_kernel": 1})
    first += Counter({"decode_kernel": 1, "sigmoid_mul_kernel": 1})
    assert launched(qwen3_5, by_tiles, 1) - first == counts(by_tiles, 1)[1]


def _with_states(layers: int) -> DecoderSpec:
    """As Qwen3.5: delta nets, and attention with an output gate in the last layer."""
    plain = like(QWEN3_06B, head_dim=16, vocab_size=300, hidden_size=32, intermediate_size=48, heads=2)
    own = plain.layers[0]
    assert isinstance(own.attention, Attention)
    gated = replace(own, attention=replace(own.attention, kv_heads=1, output_gate=True))
    delta = replace(own, attention=DeltaNet(1, 2, 16, 16, 4))
    return replace(plain, layers=(delta,) * (layers - 1) + (gated,))


def test_by_the_library_they_are_nine_and_eight() -> None:
    layer, ends = counts(by_library)
    assert layer.total() == 9, layer
    assert ends.total() == 8, ends


def test_kernels_that_overlap_all_wait_but_the_first_is_launched_plainly() -> None:
    plain, dependent = launches(1, by_tiles), launches(1, by_tiles, dependently=True)
    first = "begin_step_kernel"
    assert dependent.pop(f"plain {first}") == plain.pop(first) == 1
    assert dependent == {f"dependent {name}": count for name, count in plain.items()}

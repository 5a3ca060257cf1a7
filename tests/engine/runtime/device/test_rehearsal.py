"""What is compiled while weights are read is what a start and its first steps launch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from engine.runtime.collective.collective import Alone
from engine.runtime.collective.shard import Shard
from engine.runtime.device.device_shard import load_shard
from engine.runtime.device.rehearsal import Workers, rehearsed
from engine.runtime.kernels.launching import compiling
from engine.runtime.setup.model_errors import WeightsMismatch
from engine.runtime.start.starting import warm_up
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel
from tests.engine.runtime.device.card import FakeCard, Specialized, fake_config, load_fake, specialized
from tests.engine.runtime.device.test_runner import COMPANY, HYBRID, SMALL, lead, lead_by_drafts, lead_few
from tests.engine.runtime.guessing import guessing_model
from tests.engine.runtime.guessing import lead as lead_guessing

# the interpreter computes bfloat16 wrongly: which products overflow depends on the tiles that were drawn
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


@dataclass
class Seen(FakeCard):
    """Whatever is launched is kept in `launched`, on top of what was compiled before. It is not run: what
    else is launched does not depend on what a kernel computes. Any kernel may be the fastest."""

    launched: set[Specialized] = field(default_factory=set)

    def timer(self) -> Callable[[Callable[[], object]], float]:
        rng = random.Random(0)

        def took_us(run: Callable[[], object]) -> float:
            run()
            return rng.uniform(1.0, 9.0)

        return took_us

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What this thread launches."""

        with compiling(self._see):
            yield

    def _see(self, kernel: Any, grid: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.launched.add(specialized(kernel, args, named))
        if kernel.fn.__name__ == "choose_kernel":
            args[kernel.arg_names.index("tokens")].zero_()  # log-probabilities are looked up by them

    def assert_compiled_before(self) -> None:
        """But for the first layer's product, of the chosen tile: once for a row alone, once for more."""
        late = [(name, dict(kinds)) for name, kinds in self.launched - self.compiled]
        first = [kinds for name, kinds in late if name == "skinny_kernel" and kinds["change"] is None]
        assert all(kinds["norm"] is not None for kinds in first)
        assert len(late) == len(first) <= 2, late


@pytest.mark.parametrize(
    ("family", "kinds", "overrides"),
    [
        ("llama", 13, {"dtype": "float32"}),
        ("qwen3", 80, {"dtype": "bfloat16", "weights": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_a_start_compiles_nothing_anew(
    tiny_model: MakeModel, family: str, kinds: int, overrides: dict[str, Any]
) -> None:
    card = Seen()
    with card.watched():
        load_fake(tiny_model(family, **SMALL), card, timed=True, **overrides)
    assert len(card.launched) >= kinds
    card.assert_compiled_before()


def test_nor_do_steps_whose_kernels_overlap(tiny_model: MakeModel) -> None:
    """Those of the chosen products are compiled before the first capture."""
    times = iter((1.0, 2.0) * 9)
    card = Seen(replay_us=lambda run: next(times))
    with card.watched():
        load_fake(tiny_model("qwen3", **SMALL), card, timed=True, dtype="bfloat16", max_num_seqs=2)
    overlapping = {name for name, kinds in card.launched if ("launch_pdl", True) in kinds}
    assert {"skinny_kernel", "decode_kernel", "choose_kernel"} <= overlapping
    card.assert_compiled_before()


def test_nor_does_anything_that_can_be_asked_for(tiny_model: MakeModel) -> None:
    card = Seen()
    with card.watched():
        slots = len(COMPANY) + 2
        path = tiny_model("qwen3", **SMALL)
        lead(load_fake(path, card, timed=True, max_num_seqs=slots, dtype="bfloat16"), 3)
    assert len(card.launched) >= 50
    card.assert_compiled_before()


@pytest.mark.parametrize("right", [0.5])
def test_nor_do_steps_with_drafts(tiny_model: MakeModel, right: float) -> None:
    """Alone and beside prompts, in tiles for few tokens of a row and for many."""
    card, slots = Seen(), len(COMPANY) + 2
    with card.watched():
        path = tiny_model("qwen3", **SMALL | {"num_attention_heads": 4})
        settings: dict[str, Any] = {"max_num_seqs": slots, "dtype": "bfloat16", "max_drafts": 15}
        runner = load_fake(path, card, timed=True, **settings)
        lead_by_drafts(runner, [[0] * 9] * len(COMPANY), right, 15)
    assert {shape.together for shape in runner.steps.verified} == {4, 16}
    assert "settle_kernel" in {name for name, _ in card.launched}
    card.assert_compiled_before()


def test_nor_does_a_rank(tiny_model: MakeModel) -> None:
    shape = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("llama", **shape)
    config = fake_config(model, dtype="bfloat16", max_num_seqs=2, max_model_len=48, tensor_parallel_size=2)
    card = Seen()
    stages: list[str] = []
    with card.watched(), torch.inference_mode():
        shard = load_shard(config, card, stages.append, Alone(Shard(1, 2)))
        warm_up(shard.build(shard.info(shard.page_count()), stages.append))
    assert "in 2 shards" in stages[0]
    card.assert_compiled_before()


def test_nor_does_a_model_with_states(tmp_path: Path) -> None:
    path = Weights("qwen3_5_text").saved(tmp_path, **HYBRID)
    card = Seen()
    with card.watched():
        lead_few(load_fake(path, card, timed=True, max_num_seqs=3, dtype="bfloat16"), 3)
    assert {"delta_step_kernel", "carry_kernel"} <= {name for name, _ in card.launched}
    card.assert_compiled_before()


def test_nor_do_drafts_of_a_model_with_states_and_an_mtp_layer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 2, "dtype": "bfloat16", "max_drafts": 4}
    card = Seen()
    with card.watched():
        lead_guessing(load_fake(guessing_model(tmp_path / "model"), card, timed=True, **settings), 4)
    assert {"delta_verify_kernel", "turn_kernel"} <= {name for name, _ in card.launched}
    card.assert_compiled_before()


def test_what_it_ends_in_does_not_end_the_start() -> None:
    def walk() -> None:
        raise ValueError("no such thing")

    with rehearsed(FakeCard(), walk, threads=1) as compiled:
        assert compiled() == "kernels are compiled when they are first needed (ValueError: no such thing)"


def test_who_leaves_early_waits_for_what_is_being_compiled_and_no_more() -> None:
    begun = Event()
    ended: list[int] = []

    class Slow(FakeCard):
        @contextmanager
        def compiling(self, workers: Executor) -> Iterator[None]:
            assert isinstance(workers, Workers)

            def compile_one() -> None:
                begun.set()
                workers.called_off.wait(10)
                ended.append(1)

            compiles = [workers.submit(compile_one) for _ in range(5)]
            yield
            for one in as_completed(compiles):
                assert (one is compiles[0]) == (one.exception() is None)

    def load_what_is_wrong() -> None:
        with rehearsed(Slow(), lambda: None, threads=1):
            assert begun.wait(10)
            raise WeightsMismatch("a tensor is missing")

    with pytest.raises(WeightsMismatch):
        load_what_is_wrong()
    assert len(ended) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]

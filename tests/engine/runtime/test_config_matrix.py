"""Whatever config.json says: what transformers computes, or a refusal by name.

First each key by itself, in every family: present, absent, moved, in old and new spelling. Then odd
configurations, drawn from seeds: keys that contradict each other, are there twice, misspelt, or another
family's. Every run has a third of the former and 100 of the latter; by command all, and a thousand.

A case counts when transformers computes something. Then the engine computes the same, with native and with
torch kernels, or refuses. Where transformers raises, as it does for many a type or value out of range, nobody
can say what is right: such cases are not counted, and the odd ones are drawn again.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from engine.runtime.models.decoder_config import key_meanings
from engine.runtime.models.families import FAMILIES as SERVED
from tests import effort
from tests.engine.runtime.config_oracle import (
    KERNELS,
    Outcome,
    Verdict,
    Weights,
    Workshop,
    our_logprobs,
    their_logprobs,
)
from tests.engine.runtime.conftest import load
from tests.engine.runtime.odd_configs import (
    EVERYWHERE,
    FAMILIES,
    FULL,
    LLAMA3,
    LONG,
    NONSENSE,
    ORIGINAL,
    OWN,
    SHAPING,
    SLIDING,
    UNKNOWN,
    WITHOUT_EFFECT,
    Odd,
    drawn,
)

pytestmark = pytest.mark.slow

ODD_COUNTED = effort.drawn(24, whole=250)
"""Of each of the four seeds."""
ODD_DRAWN_MAX = 400


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(action="ignore"):
        yield Workshop(tmp_path_factory.mktemp("configurations"))


def judged(workshop: Workshop, odd: Odd) -> Verdict:
    """The verdict, which is right, names what is refused, and logs what is ignored."""
    verdict = workshop.verdict(odd.weights, odd.text)
    assert verdict.outcome is not Outcome.WRONG, f"{verdict.said}: {odd}"
    if verdict.outcome is Outcome.REFUSED:
        assert "tensors" in verdict.said or any(key in verdict.said for key in odd.keys), f"{verdict}: {odd}"
    if verdict.outcome is Outcome.EQUAL:
        heard = "\n".join(verdict.heard)
        known = {key for family in SERVED.values() for key in key_meanings(family)}
        assert all(key in heard for key in odd.keys - known), f"{verdict}: {odd}"
    return verdict


def singles(family: str) -> Iterator[Odd]:
    """Every value of every key by itself; those that all families share, in one family each."""
    own = Weights(family), Weights(family, head="own"), Weights(family, biases=True)
    for name, values in SHAPING.items():
        weights = own[1 if name == "tie_word_embeddings" else 2 if name.endswith("bias") else 0]
        yield from (Odd(weights, {name: value}, {}) for value in values)
    for table in (NONSENSE, WITHOUT_EFFECT, UNKNOWN):
        for i, (name, values) in enumerate(table.items()):
            if FAMILIES[i % len(FAMILIES)] == family:
                yield from (Odd(own[0], {name: value}, {}) for value in values)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {"rope_type": "llama3", **LLAMA3, **ORIGINAL}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
KNOWN: Mapping[str, tuple[Outcome, Weights, Mapping[str, Any]]] = {
    "YaRN beside rope_parameters": (
        Outcome.EQUAL,
        Weights("qwen3"),
        {"rope_parameters": PLAIN, "rope_scaling": YARN},
    ),
    "llama3 beside rope_parameters": (
        Outcome.EQUAL,
        Weights("llama"),
        {"rope_parameters": PLAIN, "rope_scaling": SCALED},
    ),
    "llama3 with an original length at the top level": (
        Outcome.EQUAL,
        Weights("llama"),
        {"rope_parameters": SCALED, "original_max_position_embeddings": 48},
    ),
    "a head beside tied embeddings": (
        Outcome.EQUAL,
        Weights("llama", head="own"),
        {"tie_word_embeddings": True},
    ),
    "Mistral with layer types": (
        Outcome.EQUAL,
        Weights("mistral"),
        {"sliding_window": 12, "layer_types": [SLIDING, FULL]},
    ),
    "Mistral under the architecture of Llama": (
        Outcome.REFUSED,
        Weights("mistral"),
        {"sliding_window": 12, "architectures": ["LlamaForCausalLM"]},
    ),
    "Llama with a window in its cache alone": (Outcome.REFUSED, Weights("llama"), {"sliding_window": 12}),
    "attention to the future": (Outcome.REFUSED, Weights("llama"), {"is_causal": False}),
    "a number that is none": (Outcome.REFUSED, Weights("llama"), {"rms_norm_eps": math.nan}),
    "a number that is none, and not read": (Outcome.EQUAL, Weights("llama"), {"attention_dropout": math.nan}),
}


@pytest.mark.parametrize(("outcome", "weights", "changes"), KNOWN.values(), ids=KNOWN.keys())
def test_configurations_that_are_easily_misread(
    workshop: Workshop, outcome: Outcome, weights: Weights, changes: Mapping[str, Any]
) -> None:
    assert judged(workshop, Odd(weights, changes, {})).outcome is outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_by_itself_is_as_in_transformers_or_refused(workshop: Workshop, family: str) -> None:
    every = effort.drawn(10, whole=1)
    cases = list(singles(family))[FAMILIES.index(family) % every :: every]
    outcomes = Counter(judged(workshop, odd).outcome for odd in cases)
    assert outcomes[Outcome.EQUAL] >= 60 // every, outcomes
    assert outcomes[Outcome.REFUSED] >= 20 // every, outcomes
    assert outcomes[Outcome.NO_ORACLE] <= 5, outcomes


@pytest.mark.parametrize("family", OWN)
def test_families_that_transformers_names_are_as_there_or_refused(workshop: Workshop, family: str) -> None:
    """The plain model in every run, and a tenth of the changes."""
    every = effort.drawn(10, whole=1)
    changes = [*EVERYWHERE, *OWN[family]]
    drawn_changes = [{}, *changes[list(OWN).index(family) % every :: every]]
    own = Weights(family), Weights(family, head="own")
    cases = [Odd(own[bool(i % 2)], change, {}) for i, change in enumerate(drawn_changes)]
    found = [judged(workshop, odd).outcome for odd in cases]
    assert found[0] is Outcome.EQUAL
    outcomes = Counter(found)
    assert outcomes[Outcome.EQUAL] >= len(cases) // 3, outcomes


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"),
    [(1, 1, 32, 64, 4), (1, 3, 16, 48, 3), (2, 6, 128, 32, 2), (3, 3, 64, 128, 1)],
)
def test_delta_nets_of_odd_sizes_are_as_in_transformers(
    workshop: Workshop, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> None:
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
    }
    weights = Weights("qwen3_5_text", layers=3, heads=4, kv_heads=2, sizes=tuple(sizes.items()))
    verdict = workshop.verdict(weights, weights.config())
    assert verdict.outcome is Outcome.EQUAL, verdict.said


def test_pages_of_long_and_of_short_ropes_are_not_taken_for_each_other(workshop: Workshop) -> None:
    weights = Weights("phi3")
    scaling = {"type": "longrope", **LONG}
    text = weights.config(rope_scaling=scaling, original_max_position_embeddings=32)
    model = workshop.model(weights, text)
    short, edge, long = (load(model, max_model_len=n).info.arithmetic for n in (16, 32, 48))
    assert short == edge != long


@pytest.mark.parametrize("family", effort.some([*OWN], usual=5))
def test_families_in_bfloat16_are_as_close_as_transformers_and_in_int8_close(
    workshop: Workshop, family: str
) -> None:
    weights = Weights(family)
    model = workshop.model(weights, weights.config())
    exact = their_logprobs(model, torch.float32)
    theirs = their_logprobs(model, torch.bfloat16)
    for kernels in KERNELS:
        ours = our_logprobs(model, kernels, [], torch.bfloat16)
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm(), kernels
    rounded = our_logprobs(model, "native", [], weights="int8")
    assert (rounded - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("seed", effort.some(range(4), usual=1))
def test_odd_configurations_are_as_in_transformers_or_refused(workshop: Workshop, seed: int) -> None:
    rng, outcomes = random.Random(seed), Counter[Outcome]()
    for _ in range(ODD_DRAWN_MAX):
        outcomes[judged(workshop, drawn(rng)).outcome] += 1
        if outcomes[Outcome.EQUAL] + outcomes[Outcome.REFUSED] == ODD_COUNTED:
            break
    assert outcomes[Outcome.EQUAL] + outcomes[Outcome.REFUSED] == ODD_COUNTED, outcomes
    assert outcomes[Outcome.EQUAL] >= ODD_COUNTED * 2 // 5, outcomes
    assert outcomes[Outcome.REFUSED] >= ODD_COUNTED // 5, outcomes
    assert outcomes[Outcome.NO_ORACLE] <= ODD_DRAWN_MAX // 20, outcomes

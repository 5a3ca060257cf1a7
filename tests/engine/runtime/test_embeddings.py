"""Vectors of prompts: what sentence-transformers' modules make of a network's hidden states, the same in any
company and however a prompt is cut."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.contract.embedders import MODULES_MAX, Cuts, read_cuts, read_embedder
from engine.contract.messages import FinishReason, SamplingParams
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.setup.model_errors import ModelError, UnsupportedModel, WeightsMismatch
from engine.runtime.step.pooling import _added
from shared.text.model_files import BadModelFile
from tests.engine.embedders import DENSE_LEN, KINDS, Kind, make_embedder, reference_vectors
from tests.engine.models import CONTEXT_LEN, FAMILIES, VOCAB_SIZE
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.driver import Driver
from tests.engine.runtime.test_with_scheduler import serve

if TYPE_CHECKING:  # it imports Triton, which a CPU's tests do without
    from engine.runtime.device.device_runner import DeviceRunner

TOLERANCE = 2e-6
NETWORKS = ("native", "torch")
MakeEmbedder = Callable[..., Path]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> MakeEmbedder:
    """make_embedder, remembering what it made."""
    made: dict[str, Path] = {}

    def make(family: str = "qwen3", kind: Kind = KINDS[0], **overrides: Any) -> Path:
        key = f"{family} {kind} {overrides}"
        if key not in made:
            made[key] = make_embedder(family, tmp_path_factory.mktemp(family), kind, **overrides)
        return made[key]

    return make


def prompts(seed: int = 1, lengths: Sequence[int] = (5, 17, 100, 1, 64, 90)) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB_SIZE), k=length) for length in lengths]


def vectors(
    runner: HostRunner | DeviceRunner,
    given: Sequence[list[int]],
    *,
    chunk: int = 1 << 20,
    at_once: int = 8,
    length: int = 0,
) -> list[Tensor]:
    """By plans of so many rows at most, each of so many tokens at most."""
    driver, found = Driver(runner), dict[int, bytes]()
    sampling = SamplingParams(seed=0, max_tokens=0, vector_len=length or runner.info.vector_len)
    for slot, ids in enumerate(given):
        driver.seat(slot, ids, sampling)
    while waiting := [slot for slot in driver.lives if slot not in found]:
        rows = [
            (slot, min(chunk, len(driver.lives[slot].tokens) - driver.lives[slot].computed))
            for slot in waiting[:at_once]
        ]
        found |= dict(driver.read(rows).vectors)
    for slot in range(len(given)):
        driver.leave(slot)
    driver.read([])
    return [torch.from_numpy(np.frombuffer(found[slot], "<f4").copy()) for slot in range(len(given))]


def apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference, as a part of the largest number of its vector where that is above 1."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(1.0)) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kernels", NETWORKS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_of_module(embedder: MakeEmbedder, kind: Kind, kernels: str) -> None:
    path, given = embedder(kind=kind), prompts()
    found = vectors(load(path, kernels=kernels), given)
    assert apart(found, reference_vectors(path, kind, given)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(embedder: MakeEmbedder, family: str) -> None:
    path, given = embedder(family, KINDS[1]), prompts()
    assert apart(vectors(load(path), given), reference_vectors(path, KINDS[1], given)) < TOLERANCE


@pytest.mark.parametrize("kernels", NETWORKS)
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_vector_is_the_same_in_any_company_and_however_its_prompt_is_cut(
    embedder: MakeEmbedder, kind: Kind, kernels: str
) -> None:
    """To the bit by the native kernels; torch's products have other last bits for other numbers of rows."""
    runner, given = load(embedder(kind=kind), kernels=kernels), prompts()
    together = vectors(runner, given)
    for chunk, at_once in ((1, 8), (7, 8), (33, 1), (64, 3), (1 << 20, 1)):
        again = vectors(runner, given, chunk=chunk, at_once=at_once)
        if kernels == "native":
            assert all(map(torch.equal, together, again)), (chunk, at_once)
        assert apart(together, again) < 1e-6, (chunk, at_once)


@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_in_bfloat16_a_vector_is_the_same_however_its_prompt_is_cut(
    embedder: MakeEmbedder, weights: str
) -> None:
    path, given = embedder(kind=KINDS[1]), prompts()
    runner = load(path, dtype="bfloat16", weights=weights)
    together = vectors(runner, given)
    assert all(map(torch.equal, together, vectors(runner, given, chunk=9, at_once=2)))
    expected = reference_vectors(path, KINDS[1], given)
    assert min(float(a @ b) for a, b in zip(together, expected, strict=True)) > 0.995


def test_the_sum_of_a_mean_adds_one_token_after_the_other() -> None:
    """So that its bits do not depend on chunks."""
    made = torch.Generator().manual_seed(3)
    for width in (16, 64, 1024):
        hidden = torch.randn(300, width, generator=made) * 1000
        one_by_one = hidden[0].double()
        for row in hidden[1:]:
            one_by_one = one_by_one + row.double()
        for first in (1, 7, 128, 299):
            assert torch.equal(_added(_added(None, hidden[:first]), hidden[first:]), one_by_one)


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_what_is_cut_is_normalized_behind_the_cut(embedder: MakeEmbedder, kind: Kind) -> None:
    runner, given = load(embedder(kind=kind)), prompts()
    whole = vectors(runner, given)
    for length in (1, 20, runner.info.vector_len):
        cut = [one[:length] for one in whole]
        if kind[1][-1:] == ("Normalize",):
            cut = [one / one.norm() for one in cut]
        assert apart(vectors(runner, given, length=length), cut) < TOLERANCE


def test_a_model_that_answers_makes_vectors_by_the_mean(tiny_model: MakeModel) -> None:
    """And answers as it did, in the same steps."""
    path, given = tiny_model("qwen3"), prompts()
    runner, sampling = load(path, embeddings="mean"), SamplingParams(seed=1, max_tokens=4, temperature=0.0)
    assert runner.info.vector_len == 64
    expected = reference_vectors(path, ("mean", ("Normalize",)), given)
    assert apart(vectors(runner, given), expected) < TOLERANCE
    scheduler = _scheduler(runner)
    alone = serve(scheduler, runner, [AddSequence(1, "r", given[2], sampling)])
    asked = [AddSequence(at + 10, "v", ids, _pooled(64)) for at, ids in enumerate(given)]
    beside = serve(scheduler, runner, [*asked, AddSequence(2, "r", given[2], sampling)])
    assert _tokens(beside, 2) == _tokens(alone, 1)
    found = {handle: vector for step in beside for handle, vector in step.vectors}
    told = [torch.from_numpy(np.frombuffer(found[at + 10], "<f4").copy()) for at in range(len(given))]
    assert apart(told, expected) < TOLERANCE


def test_nothing_is_kept_of_a_prompt_and_nothing_found(embedder: MakeEmbedder) -> None:
    """Under pressure, too: sequences step aside and begin anew."""
    path, given = embedder(kind=KINDS[1]), prompts(2, [90] * 6 + [200, 64])
    geometry = load(path).cache.geometry
    sizes = {"max_num_seqs": 4, "max_step_tokens": 48, "kv_cache_memory": 16 * geometry.page_bytes}
    runner = load(path, **sizes)
    scheduler = Scheduler(SchedulerConfig(step_tokens_max=48, queue_len_max=64), runner.info)
    steps = []
    for turn in (0, 100):
        added = [
            AddSequence(turn + at, "v", ids, _pooled(64), tenant=f"t{at % 3}") for at, ids in enumerate(given)
        ]
        steps += serve(scheduler, runner, added)
    assert {end.reason for step in steps for end in step.finished} == {FinishReason.LENGTH}
    assert {started.cached_len for step in steps for started in step.started} == {0}
    assert scheduler.stats().pages_cached == 0
    found = {handle: vector for step in steps for handle, vector in step.vectors}
    assert all(found[at] == found[100 + at] for at in range(len(given)))
    expected = reference_vectors(path, KINDS[1], given)
    told = [torch.from_numpy(np.frombuffer(found[at], "<f4").copy()) for at in range(len(given))]
    assert apart(told, expected) < TOLERANCE


def test_a_vector_that_is_not_finite_ends_its_sequence_alone(embedder: MakeEmbedder, tmp_path: Path) -> None:
    path = shutil.copytree(embedder(kind=KINDS[3]), tmp_path / "spoiled")
    weights = load_file(path / "model.safetensors")
    weights["embed_tokens.weight"][7] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    runner = load(path)
    added = [AddSequence(at, "v", ids, _pooled(DENSE_LEN)) for at, ids in enumerate(([5, 6], [5, 7], [8]))]
    steps = serve(_scheduler(runner), runner, added)
    reasons = {end.handle: end.reason for step in steps for end in step.finished}
    assert [reasons[at] for at in range(3)] == [
        FinishReason.LENGTH,
        FinishReason.NUMERIC,
        FinishReason.LENGTH,
    ]
    assert {handle for step in steps for handle, _ in step.vectors} == {0, 2}


def _scheduler(runner: HostRunner) -> Scheduler:
    return Scheduler(SchedulerConfig(step_tokens_max=64, queue_len_max=64), runner.info)


def _pooled(length: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=0, vector_len=length)


def _tokens(steps: Sequence[Any], handle: int) -> list[int]:
    told = [zip(step.handles, step.tokens, strict=True) for step in steps]
    return [token for one in told for own, token in one if own == handle]


# -- what is read ---------------------------------------------------------------------------------


def test_a_head_and_names_as_a_model_that_answers_has_them_are_read_too(
    embedder: MakeEmbedder, tiny_model: MakeModel, tmp_path: Path
) -> None:
    """As of an embedder that was saved with its head: the same vectors, and the head is not read."""
    bare, whole = embedder("qwen3"), shutil.copytree(tiny_model("qwen3"), tmp_path / "whole")
    for name in ("modules.json", "1_Pooling", "2_Normalize"):
        (shutil.copytree if (bare / name).is_dir() else shutil.copy)(bare / name, whole / name)
    assert all(map(torch.equal, vectors(load(bare), prompts()), vectors(load(whole), prompts())))


def test_the_tokenizer_or_the_transformer_says_how_long_a_prompt_may_be(
    embedder: MakeEmbedder, tmp_path: Path
) -> None:
    path = shutil.copytree(embedder(), tmp_path / "short")
    assert load(path).info.max_model_len == CONTEXT_LEN
    _change(path / "tokenizer_config.json", model_max_length=100)
    assert load(path).info.max_model_len == 100
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 60, "do_lower_case": false}')
    assert load(path).info.max_model_len == 60
    assert load(path, max_model_len=200).info.max_model_len == 200


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode max"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean and cls"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": None, "pooling_mode_max_tokens": True},
            "pooling_mode max",
        ),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt false"),
        ("1_Pooling/config.json", {"embedding_dimension": 32}, "32"),
        ("1_Pooling/config.json", {"unheard_of": 1}, "unheard_of"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Softplus"}, "Softplus"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "os.system"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("2_Dense/config.json", {"in_features": 32}, "2_Dense takes 32"),
        ("2_Dense/config.json", {"out_features": 0}, "out_features"),
        ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
        ("config.json", {"is_causal": False}, "is_causal"),
        ("config.json", {"architectures": ["BertModel"]}, "BertModel"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config"),
        ("config_sentence_transformers.json", {"truncate_dim": 32}, "truncate_dim"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            "default_prompt_name query",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    embedder: MakeEmbedder, tmp_path: Path, file: str, changes: dict[str, Any], named: str
) -> None:
    path = shutil.copytree(embedder(kind=KINDS[3]), tmp_path / "changed")
    _change(path / file, **changes)
    with pytest.raises(ModelError, match=named):
        load(path)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["Transformer"], "Transformer"),
        (["Transformer", "Pooling", "LSTM"], "LSTM"),
        (["WordEmbeddings", "Pooling"], "WordEmbeddings"),
        (["Transformer", "Pooling", "Dense/../../elsewhere"], "no directory"),
        (["Transformer", "Pooling", "own.Dense"], "own.Dense"),
    ],
)
def test_other_modules_are_refused_by_name(
    embedder: MakeEmbedder, tmp_path: Path, modules: list[str], named: str
) -> None:
    path = shutil.copytree(embedder(), tmp_path / "changed")
    listed = []
    for at, module in enumerate(modules):
        kind, _, place = module.partition("/")
        prefix = "" if "." in kind else "sentence_transformers.models."
        listed.append({"type": prefix + kind, "path": place or ("" if not at else f"{at}_{kind}")})
    (path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedModel, match=named):
        load(path)


def test_more_modules_than_any_model_has_are_refused(tmp_path: Path) -> None:
    kinds = ("Transformer", "Pooling", *["Normalize"] * (MODULES_MAX - 1))
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(BadModelFile, match="more than 16"):
        read_embedder(tmp_path)


def test_a_prompt_that_nobody_asks_for_is_no_hindrance(embedder: MakeEmbedder, tmp_path: Path) -> None:
    path = shutil.copytree(embedder(), tmp_path / "prompts")
    _change(
        path / "config_sentence_transformers.json",
        prompts={"query": "Instruct: \nQuery:", "document": ""},
        default_prompt_name=None,
        similarity_fn_name="cosine",
    )
    assert load(path).info.vector_len == 64


def test_weights_of_a_module_that_are_not_there_or_do_not_fit(embedder: MakeEmbedder, tmp_path: Path) -> None:
    path = shutil.copytree(embedder(kind=KINDS[3]), tmp_path / "lost")
    save_file({"linear.weight": torch.zeros(DENSE_LEN, 64)}, path / "2_Dense" / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"linear\.bias"):
        load(path)
    (path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="2_Dense"):
        load(path)


def test_a_setting_and_the_models_files_do_not_contradict_each_other(embedder: MakeEmbedder) -> None:
    with pytest.raises(BadModelFile, match="--embeddings"):
        read_embedder(embedder(), "mean")


def test_cuts() -> None:
    assert read_cuts("64,32") == Cuts(lens=(32, 64))
    assert [read_cuts("32").allow(length, 64) for length in (16, 32, 64, 65)] == [False, True, True, False]
    assert [read_cuts("any").allow(length, 64) for length in (1, 64, 65)] == [True, True, False]
    for wrong in ("", "a", "0", "3,"):
        with pytest.raises(ValueError, match=r".*"):
            read_cuts(wrong)


def _change(path: Path, **changes: Any) -> None:
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(told | changes))

"""The kernels that an image ships: which cards, models and weights are walked through, and by whom."""

from __future__ import annotations

import subprocess
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
import torch

from engine.runtime.device import shipping
from engine.runtime.device.shipping import LLAMA, MAKES, MODELS, compile_all, main
from engine.runtime.kernels.launching import compiling
from engine.runtime.models.decoder_config import parse_model_config
from tests.engine.runtime.device.card import specialized

Seen = set[tuple[object, ...]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The kernels that would be compiled. Neither Triton's driver nor its settings are changed."""
    found: Seen = set()

    def recording(workers: Executor, device: torch.device) -> AbstractContextManager[None]:
        return compiling(lambda kernel, grid, args, named: found.add(specialized(kernel, args, named)))

    monkeypatch.setattr(shipping, "compiling_in", recording)
    monkeypatch.setattr(shipping, "compile_as_for", lambda capability, listener: None)
    monkeypatch.setattr(shipping, "keep_compiled_in", lambda folder: None)
    return found


def test_models_share_nearly_all(seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A card that does not multiply fp8 gets plain weights' kernels alone."""
    assert main([str(tmp_path), "--cards", "a100", "--models", "qwen3-8b", "--threads", "1"]) == 0
    assert capsys.readouterr().out == "a100: 0 kernels compiled, 0 there already\n", "nobody counted"
    before = len(seen)
    assert 50 <= before < 100
    names = {name for name, *_ in seen}
    assert {"skinny_kernel", "prefill_kernel", "decode_kernel", "choose_kernel"} <= names
    compile_all(MAKES["a100"], ["llama-3.1-8b"], 1)
    assert len(seen) - before <= 5


def test_a_card_with_fp8_gets_kernels_for_it(seen: Seen) -> None:
    compile_all(MAKES["h100"], ["qwen3-8b"], 1)
    assert len(seen) >= 80


def test_the_configurations_are_of_whole_models() -> None:
    for name, fields in MODELS.items():
        model = parse_model_config(msgspec.json.encode(fields))
        assert (model.head_dim, model.kv_heads) == (128, 8), name
        assert not model.unread
    assert LLAMA["architectures"] == ["LlamaForCausalLM"]


def test_each_card_is_the_work_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first that fails ends it."""
    asked: list[list[str]] = []

    def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert "PYTHONPATH" in env
        asked.append(command[4:])
        return subprocess.CompletedProcess(command, len(asked) - 1)

    monkeypatch.setattr(f"{shipping.__name__}.subprocess.run", run)
    assert main([str(tmp_path), "--cards", "a100,h100,b200", "--threads", "2"]) == 1
    cards = [words[words.index("--cards") + 1] for words in asked]
    assert cards == ["a100", "h100"]
    assert all(words[0] == str(tmp_path) for words in asked)


@pytest.mark.parametrize("option", ["--cards", "--models"])
def test_what_is_unknown_is_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["folder", option, "nothing"])
    assert "unknown: nothing; known are " in capsys.readouterr().err


def test_what_triton_is_asked_for_is_counted() -> None:
    count = shipping.KernelCount()
    for cache_hit in (True, False, True):
        count.listen(cache_hit=cache_hit, src=None)
    assert (count.found, count.compiled) == (2, 1)

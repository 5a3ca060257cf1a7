"""The device's runner makes the vectors of prompts that a CPU's makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.effort import some
from tests.engine.embedders import KINDS, Kind, make_embedder, reference_vectors
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.device.test_runner import SMALL
from tests.engine.runtime.test_embeddings import apart, prompts, vectors

LENGTHS = (5, 17, 1, 30)


@pytest.mark.parametrize("kind", some([KINDS[3], KINDS[0]], usual=1), ids=str)
def test_each_module_and_in_chunks(tmp_path: Path, kind: Kind) -> None:
    path, given = make_embedder("qwen3", tmp_path / "model", kind, **SMALL), prompts(5, LENGTHS)
    runner = load_fake(path, FakeCard(), max_num_seqs=8, kv_cache_memory=1 << 20, enforce_eager=True)
    assert runner.info.vector_len == (32 if kind is KINDS[0] else 48)
    expected = reference_vectors(path, kind, given)
    assert apart(vectors(runner, given), expected) < 1e-5
    assert apart(vectors(runner, given, chunk=9, at_once=3), expected) < 1e-5

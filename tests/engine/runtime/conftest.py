"""Models are made once per session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.native.build import build
from engine.runtime.setup.runner_config import RunnerConfig
from tests.engine.models import make_tiny_model

MakeModel = Callable[..., Path]

build()  # what an installation does; a checkout whose sources have changed since needs it again


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_tiny_model, remembering what it made."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = f"{family} {json.dumps(overrides, sort_keys=True)}"
        if key not in made:
            made[key] = make_tiny_model(family, tmp_path_factory.mktemp(family), **overrides)
        return made[key]

    return make


def load(path: Path, **overrides: Any) -> HostRunner:
    """A small fp32 runner."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 16,
        "max_num_seqs": 8,
        "threads": 1,
    } | overrides
    runner = load_runner(RunnerConfig(str(path), **settings), lambda stage: None)
    assert isinstance(runner, HostRunner)
    return runner

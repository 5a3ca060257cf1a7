"""sentence-transformers itself beside `/v1/embeddings`, on tiny random models with each kind of module and of
several families: the same texts, whose vectors may differ by 10^-4 at most.

It runs in an environment of its own that takes torch and transformers from this one, so that both compute
with the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import tokenizers
import torch
from tokenizers import processors

from tests.bench.figures import Figure, at_most, figure
from tests.engine.embedders import KINDS, Kind, make_embedder
from tests.engine.models import EOS_ID, FAMILIES
from tests.services import client, engine
from tests.suites.cache import SuiteFailed, environment
from tests.suites.judging import SCRIPTS

SUMMARY: Final = "vectors of sentence-transformers, for each kind of module"
PACKAGES: Final = (
    *("--no-deps", "sentence-transformers==6.2.0", "scikit-learn==1.9.1", "scipy==1.17.1"),
    *("joblib==1.6.0", "threadpoolctl==3.8.0", "narwhals==2.29.0", "cloudpickle==3.1.3"),
)
APART_MAX: Final = 1e-4
TEXTS: Final = (
    "the water in the pipe turns the wheel",
    "gate",
    "nobody stands below who would rather have dry feet, because a river never asks before it comes " * 4,
    "Ein Fluß fragt nie: 水は流れる 🌊",
    *(f"{number} wheels turn, and the gate lets water through" for number in range(12)),
)


def run(cache: Path) -> list[Figure]:
    cases: list[tuple[str, Kind]] = [("qwen3", kind) for kind in KINDS]
    cases += [(family, KINDS[1]) for family in FAMILIES if family != "qwen3"]
    found = []
    with tempfile.TemporaryDirectory(prefix="e") as place, Sentences(cache) as theirs:
        for number, (family, kind) in enumerate(cases):
            path = make_embedder(family, Path(place, f"m{number}"), kind)
            if kind[0] == "lasttoken":
                _end_with_eos(path)
            told: list[list[float]] = theirs.ask(model=str(path), texts=TEXTS)
            pairs = zip(map(torch.tensor, told), _ours(path, Path(place)), strict=True)
            apart = max(float((a - b).abs().max()) for a, b in pairs)
            name = f"{family}, {kind[0]}" + "".join(f", {one}" for one in kind[1])
            found.append(figure(f"apart: {name}", apart, "", at_most(APART_MAX)))
    return found


class Sentences:
    """sentence-transformers in a process of its own (`scripts/sentences.py`), with torch and transformers of
    this environment."""

    def __init__(self, cache: Path) -> None:
        """Raises SuiteFailed."""
        python, own = environment(cache, "sentences", *PACKAGES), str(Path(torch.__file__).parents[1])
        variables = {"PYTHONPATH": own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [str(python), "sentences.py"],
            cwd=SCRIPTS,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: object) -> Any:
        """What it answers. Raises SuiteFailed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            raise SuiteFailed("sentence-transformers failed")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _ours(model: Path, place: Path) -> list[torch.Tensor]:
    with engine(place, "--dtype", "float32", model=str(model)) as served, client(served) as http:
        answer = http.post("/v1/embeddings", json={"model": model.name, "input": TEXTS})
        answer.raise_for_status()
        return [torch.tensor(one["embedding"]) for one in answer.json()["data"]]


def _end_with_eos(path: Path) -> None:
    """Let the tokenizer end each text with a token, as Qwen3-Embedding's does."""
    file = str(path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS_ID)]
    )
    tokenizer.save(file)

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
    python = sentence_transformers(cache)
    cases: list[tuple[str, Kind]] = [("qwen3", kind) for kind in KINDS]
    cases += [(family, KINDS[1]) for family in FAMILIES if family != "qwen3"]
    found = []
    with tempfile.TemporaryDirectory(prefix="e") as place:
        for number, (family, kind) in enumerate(cases):
            path = make_embedder(family, Path(place, f"m{number}"), kind)
            if kind[0] == "lasttoken":
                _end_with_eos(path)
            theirs, ours = vectors_of(python, path, TEXTS), _ours(path, Path(place))
            apart = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))
            name = f"{family}, {kind[0]}" + "".join(f", {one}" for one in kind[1])
            found.append(figure(f"apart: {name}", apart, "", at_most(APART_MAX)))
    return found


def sentence_transformers(cache: Path) -> Path:
    """The Python that has it. Raises SuiteFailed."""
    return environment(cache, "sentences", *PACKAGES)


def beside_ours(**variables: str) -> dict[str, str]:
    """Its variables: torch and transformers are those of this environment."""
    own = str(Path(torch.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": own,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }


def vectors_of(python: Path, model: Path, texts: Sequence[str]) -> list[torch.Tensor]:
    """What sentence-transformers makes of these texts. Raises SuiteFailed."""
    asked = json.dumps({"model": str(model), "texts": list(texts)})
    done = subprocess.run(
        [str(python), "sentences.py"],
        cwd=SCRIPTS,
        env=beside_ours(),
        input=asked,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SuiteFailed(f"sentence-transformers failed: {done.stderr[-2000:]}")
    told: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [torch.tensor(vector) for vector in told]


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

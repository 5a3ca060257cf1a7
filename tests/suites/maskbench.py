"""MaskBench, the schemas of JSONSchemaBench with documents for each: 11,305 that were found in use. A schema
is right where all of its documents are, by our door and matcher, beside llguidance as it comes.

It is a repository without a licence and in no index, so it is cloned into the cache, or put there by hand as
`jsonschemabench`. The schemas are drawn with a fixed seed.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Final

from tests.bench.figures import Figure, figure, quantile
from tests.suites.cache import SuiteFailed
from tests.suites.held import REFUSED, RIGHT, WRONG, Document, figures_of, llguidances, ours

SUMMARY: Final = "JSONSchemaBench with MaskBench, against our door and matcher"
URL: Final = "https://github.com/guidance-ai/jsonschemabench"
SCHEMAS: Final = 2_000
SEED: Final = 7


def run(cache: Path) -> list[Figure]:
    files = sorted((_repository(cache) / "maskbench/data").glob("*.json"))
    if len(files) < SCHEMAS:
        raise SuiteFailed(f"{cache}/jsonschemabench has {len(files)} schemas")
    counts, theirs, strict = Counter[str](), Counter[str](), Counter[str]()
    took_s = []
    for path in random.Random(SEED).sample(files, SCHEMAS):
        case = json.loads(path.read_text())
        documents = [Document(test["data"], test["valid"]) for test in case["tests"]]
        begun_s = time.thread_time()
        counts[_worst(ours(case["schema"], documents))] += 1
        took_s.append(time.thread_time() - begun_s)
        theirs[_worst(llguidances(case["schema"], documents))] += 1
        strict[_worst(ours(case["schema"], documents, strict=True))] += 1
    found = figures_of(counts, theirs, strict, "schemas")
    return [
        *found,
        figure("ours: CPU of a schema and its documents, p99", 1e3 * quantile(took_s, 0.99), "ms"),
    ]


def _repository(cache: Path) -> Path:
    folder = cache / "jsonschemabench"
    if not folder.exists():
        try:
            subprocess.run(["git", "clone", "-q", "--depth", "1", URL, str(folder)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuiteFailed(f"{URL} cannot be cloned: {error}") from error
    return folder


def _worst(found: list[str]) -> str:
    """What a schema counts as, by what its documents count as."""
    return next((kind for kind in (*WRONG, REFUSED) if kind in found), RIGHT)

"""Texts of which this engine and sentence-transformers make vectors in a second, on one CPU.

    python -m tests.bench.against_sentence_transformers [--shape 29M] [--rounds 2] [--check] [--out FILE]

The model is random, of the shape that `--shape` names (`tests.bench.models`), in float32, with the last
token's hidden state normalized. Both have as many threads, tokenize, and are asked for so many texts at
once, one request after another: ours over HTTP, sentence-transformers in a process of its own
(`tests.suites.embeddings`). They take turns, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from engine.runtime.setup.hardware import usable_cores
from tests.bench.against import show
from tests.bench.figures import Figure, at_least, figure
from tests.bench.models import CONTEXT_LEN, SHAPES, make_model
from tests.bench.services import free_port, service
from tests.engine.embedders import KINDS, write_modules
from tests.suites.cache import cache_folder
from tests.suites.embeddings import Sentences

SIZES: Final = (1, 8, 64)
TARGET: Final = at_least(1.0)
SHAPE: Final = "29M"
NAME: Final = "embedder"
WORDS: Final = (8, 64)
"""The least and the most words of a text."""
ANSWER_S: Final = 600.0


async def vector_figures(shape: str, rounds: int, rng: random.Random) -> list[Figure]:
    """Raises SuiteFailed where sentence-transformers cannot be had."""
    with tempfile.TemporaryDirectory() as place:
        directory = make_model(Path(place, NAME), SHAPES[shape])
        _as_embedder(directory, SHAPES[shape].hidden)
        port, threads = free_port(), usable_cores()
        argv = [sys.executable, "-m", "engine", "serve", "--model", str(directory), "--port", str(port)]
        argv += ["--dtype", "float32", "--threads", str(threads), "--kv-cache-memory", "256MiB"]
        async with service(argv, f"http://127.0.0.1:{port}/readyz"):
            with Sentences(cache_folder()) as theirs:
                await asyncio.to_thread(theirs.ask, model=str(directory), threads=threads)
                return await _in_turns(theirs, port, rounds, rng)


async def _in_turns(theirs: Sentences, port: int, rounds: int, rng: random.Random) -> list[Figure]:
    found, url = list[Figure](), f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
        for size in SIZES:
            texts = [_text(rng) for _ in range(max(64, size))]
            batches = [texts[at : at + size] for at in range(0, len(texts), size)]
            own_s, their_s = float("inf"), float("inf")
            for _ in range(rounds + 1):  # the first one warms both up
                own_s = min(own_s, await _own_s(http, batches))
                their_s = min(their_s, await asyncio.to_thread(theirs.ask, batches=batches))
            own, other, name = len(texts) / own_s, len(texts) / their_s, f"embeddings, {size} at once"
            found += [
                figure(name, own, "texts/s"),
                figure(f"{name}, by sentence-transformers", other, "texts/s"),
                figure(f"{name}, beside sentence-transformers", own / other, "x", TARGET),
            ]
    return found


async def _own_s(http: httpx.AsyncClient, batches: Sequence[list[str]]) -> float:
    began_s = time.perf_counter()
    for batch in batches:
        body = {"model": NAME, "input": batch, "encoding_format": "base64"}
        answer = await http.post("/v1/embeddings", json=body)
        answer.raise_for_status()
    return time.perf_counter() - began_s


def _text(rng: random.Random) -> str:
    """Made-up words, which the tokenizer of the model has in pieces."""
    syllables = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru")
    return " ".join("".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(rng.randint(*WORDS)))


def _as_embedder(directory: Path, hidden_len: int) -> None:
    write_modules(directory, KINDS[0], hidden_len)
    file = directory / "tokenizer_config.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    told |= {"pad_token": told.get("eos_token"), "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(told | {"model_max_length": CONTEXT_LEN}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default=SHAPE)
    parser.add_argument("--rounds", type=int, default=2, help="the best one counts")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure misses its target")
    options = parser.parse_args()
    return show(asyncio.run(vector_figures(options.shape, options.rounds, random.Random(0))), options)


if __name__ == "__main__":
    sys.exit(main())

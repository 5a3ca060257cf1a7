"""Drafts beside those of other engines in one run, in turns: vLLM's n-grams and llama.cpp's two lookups.

    python -m tests.bench.against_drafts [--vllm PYTHON] [--llama-cpp FILE] [--overlapped] [--drafts K]
        [--dtype float32] [--kinds edits JSON prose] [--streams 1 8 32] [--turns N]

`PYTHON` is as in `tests.bench.against_vllm`, `FILE` as in `tests.bench.against_llama_cpp`; `--overlapped` is
this engine with steps that overlap, with drafts and without. At least one of them is given. All have the
checkpoint of `tests.bench.draft_model`, llama.cpp as a GGUF file of the same weights, and are asked the same
questions: the row `drafts` of `python -m tests.bench engine`, a run of it for each number of streams.

All compute in `--dtype`. Where a processor does not multiply bfloat16, a step of one token is short in it,
and a further token of the step costs nearly as much: there drafts gain little in bfloat16, and this engine's
default is float32.

vLLM finds its drafts by the last 4 to 2 tokens, and verifies `--drafts` of them. llama.cpp has two servers:
`ngram-cache`, its lookup decoding, of 8 drafts and no other number, by the last 4 to 1 tokens and how often
each token followed; and `ngram-simple`, which takes `--drafts` tokens behind the last 3. Both keep a stream's
prompt in its slot, so that prompts are found there as in the prefix caches of the others.

Target: more tokens per second than each, of every kind of text and at every number of streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench.against import Other, Piece, add_arguments, compare, server, show
from tests.bench.against_llama_cpp import START_S, llama_cpp
from tests.bench.against_vllm import add_vllm_arguments, vllm
from tests.bench.draft_texts import KINDS, folder
from tests.bench.engine.drafts import OFF, STREAMS
from tests.bench.figures import Figure
from tests.bench.gguf_model import Format, write_gguf
from tests.bench.services import free_port

DRAFTS: Final = 8
MATCHED_MIN, MATCHED_MAX = 2, 4
"""Tokens by which vLLM finds drafts."""
OVERLAPPED: Final = {"overlapped": (), "overlapped without drafts": OFF}
FORMATS: Final[dict[str, Format]] = {"bfloat16": "bf16", "float32": "f32"}
"""llama.cpp's by the type of this engine's weights."""
CONTEXT_LEN: Final = 1024
"""Of a stream of llama.cpp's: any question with its answer."""


def of_vllm(drafts: int) -> list[str]:
    ngrams = {"method": "ngram", "num_speculative_tokens": drafts}
    ngrams |= {"prompt_lookup_min": MATCHED_MIN, "prompt_lookup_max": MATCHED_MAX}
    return ["--speculative-config", json.dumps(ngrams)]


def of_llama_cpp(drafts: int) -> dict[str, list[str]]:
    """The options of each server, by its name."""
    simple = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(drafts)]
    return {
        "llama.cpp ngram-cache": ["--spec-type", "ngram-cache"],
        "llama.cpp ngram-simple": ["--spec-type", "ngram-simple", *simple],
    }


def others(options: argparse.Namespace) -> Iterator[contextlib.AbstractContextManager[Other]]:
    """Those that are asked for, each to be started."""
    model = folder()
    if options.vllm:
        further = of_vllm(options.drafts)
        cores, dtype = options.all_cores, options.dtype
        yield vllm(options.vllm, model, options.tcmalloc, all_cores=cores, dtype=dtype, further=further)
    for name, further in of_llama_cpp(options.drafts).items() if options.llama_cpp else ():
        weights, streams = write_gguf(model, FORMATS[options.dtype]), max(options.streams)
        yield llama_cpp(name, options.llama_cpp, weights, streams, CONTEXT_LEN, further)
    for name, drafting in OVERLAPPED.items() if options.overlapped else ():
        port = free_port()
        argv = [sys.executable, "-m", "engine", "serve", "--model", str(model), "--port", str(port)]
        argv += ["--served-model-name", "bench", "--overlap", "--dtype", options.dtype, *drafting]
        yield server(name, argv, port, START_S, health="/readyz")


def measured(options: argparse.Namespace) -> Iterator[Figure]:
    with contextlib.ExitStack() as started:
        running = [started.enter_context(other) for other in others(options)]
        pieces = [
            Piece(["drafts"], streams, options.turns, kinds=options.kinds) for streams in options.streams
        ]
        yield from compare(options.dtype, folder(), running, pieces, options, ["--dtype", options.dtype])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FILE")
    parser.add_argument("--overlapped", action="store_true", help="this engine, with steps that overlap")
    parser.add_argument("--drafts", type=int, default=DRAFTS, metavar="K", help="of a row, at most")
    parser.add_argument("--dtype", choices=list(FORMATS), default="float32")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--turns", type=int, help="of each engine; default: by the streams")
    add_vllm_arguments(parser)
    add_arguments(parser)
    options = parser.parse_args()
    if not (options.vllm or options.llama_cpp or options.overlapped):
        parser.error("none is given of --vllm, --llama-cpp and --overlapped")
    return show(measured(options), options)


if __name__ == "__main__":
    sys.exit(main())

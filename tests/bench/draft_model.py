"""`python -m tests.bench.draft_model`: makes the model of the row `drafts` of the engine's bench.

It is the demo model, trained on until it says the answers of `tests.bench.draft_texts` by heart, and then
made larger without a change of what it says: the feed-forwards are padded with units that have no say, and
layers are added that add nothing. So it takes the time of a model of 27 million parameters, and learns in
minutes what one of three million does. It is a Llama in Hugging Face's layout, which every engine reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo import MODEL_DIR
from engine.demo.train.__main__ import (
    Example,
    encode_conversations,
    loaded,
    optimizers,
    train,
    write,
)
from engine.demo.train.network import DemoModel, Shape
from engine.demo.train.text import PAD, token_id
from tests.bench.draft_texts import KINDS, SEED, folder, is_made, messages, texts

EPOCHS: Final = 24
BATCH: Final = 2
"""Texts of one kind that are learned from in a step."""
PEAK: Final = 0.7
"""The learning rate's, beside that of the demo model's first round."""
WARMUP_STEPS: Final = 10
DECAY_SHARE: Final = 0.7
THREADS: Final = 2
LAYERS: Final = 8
INTERMEDIATE: Final = 4096
LOG_EVERY: Final = 12


def make_model(directory: Path) -> Path:
    """Train it, and write it. A directory that is complete already is left alone."""
    if not is_made(directory):
        torch.set_num_threads(THREADS)
        torch.manual_seed(SEED)
        tokenizer, small = loaded(MODEL_DIR)
        for step, loss, seconds in _trained(small, tokenizer):
            if step % LOG_EVERY == 0:
                sys.stdout.write(f"step {step} loss {loss:.4f} seconds {seconds:.0f}\n")
                sys.stdout.flush()
        write(enlarged(small), tokenizer, directory)
    return directory


def _trained(model: DemoModel, tokenizer: Tokenizer) -> Iterator[tuple[int, float, float]]:
    """Train the model on all texts. Yields (steps done, loss, seconds) after each step."""
    kinds = [
        encode_conversations(tokenizer, model.shape.context_len, map(messages, texts(kind))) for kind in KINDS
    ]
    rng, began_s = Random(SEED), time.monotonic()
    plan = list(chain.from_iterable(_epoch(kinds, rng) for _ in range(EPOCHS)))
    steps = len(plan)
    factors = [
        PEAK * min(1.0, (at + 1) / WARMUP_STEPS, (steps - at) / (DECAY_SHARE * steps)) for at in range(steps)
    ]
    for step, loss in train(model, optimizers(model), plan, token_id(tokenizer, PAD), 0, factors):
        yield step, loss, time.monotonic() - began_s


def _epoch(kinds: list[list[Example]], rng: Random) -> list[list[Example]]:
    """Batches of all texts, in random order."""
    batches: list[list[Example]] = []
    for examples in kinds:
        order = rng.sample(examples, len(examples))
        batches += [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    rng.shuffle(batches)
    return batches


def enlarged(small: DemoModel) -> DemoModel:
    """A larger model that says the same: what a new unit or layer computes is multiplied by nought."""
    model = DemoModel(Shape(layers=LAYERS, intermediate_size=INTERMEDIATE))  # its layers say nothing yet
    weights: Mapping[str, Tensor] = model.state_dict()
    for name, own in small.state_dict().items():
        weights[name][tuple(slice(length) for length in own.shape)] = own
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=folder())
    sys.stdout.write(f"{make_model(parser.parse_args().directory)}\n")


if __name__ == "__main__":
    main()

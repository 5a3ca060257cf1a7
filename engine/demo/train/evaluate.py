"""Greedy answers in wordings that training never saw, checked against the pattern of each exchange."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.demo.train import corpus
from engine.demo.train.network import DemoModel
from engine.demo.train.text import ANSWER_TOKENS_MAX, END, PAD, Messages, render, token_id

CONVERSATIONS = 400
BATCH = 100


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation up to a question, and the pattern that the answer has to match."""

    topic: str
    messages: Messages
    check: str


def held_out(count: int = CONVERSATIONS) -> list[Probe]:
    """The last question of each held-out conversation, with the right answers to those before it."""
    probes = []
    for index in range(count):
        conversation = corpus.conversation(index, held_out=True)
        last = conversation.turns[-1]
        probes.append(Probe(last.topic, conversation.messages()[:-1], last.check))
    return probes


def answers(model: DemoModel, tokenizer: Tokenizer, conversations: Sequence[Messages]) -> list[str]:
    """One greedy answer to each conversation."""
    prompts = [tokenizer.encode(render(messages, ask=True)).ids for messages in conversations]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    result = [""] * len(prompts)
    for begin in range(0, len(order), BATCH):
        part = order[begin : begin + BATCH]
        rows = model.generate(
            [prompts[index] for index in part],
            token_id(tokenizer, END),
            token_id(tokenizer, PAD),
            ANSWER_TOKENS_MAX,
        )
        for index, row in zip(part, rows, strict=True):
            result[index] = tokenizer.decode(row)
    return result


def report(model: DemoModel, tokenizer: Tokenizer, failures_max: int = 30) -> str:
    """Accuracy per topic, and some of what went wrong."""
    probes = held_out()
    right: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    failures = []
    for probe, answer in zip(probes, answers(model, tokenizer, [p.messages for p in probes]), strict=True):
        total[probe.topic] += 1
        if re.search(probe.check, answer):
            right[probe.topic] += 1
        else:
            failures.append(f"  {probe.topic}: {probe.messages[-1][1]!r} -> {answer[:120]!r}")
    lines = [f"{topic:12} {right[topic]:4}/{total[topic]:4}" for topic in sorted(total)]
    lines.append(f"{'all':12} {sum(right.values()):4}/{sum(total.values()):4}")
    return "\n".join(lines + failures[:failures_max])

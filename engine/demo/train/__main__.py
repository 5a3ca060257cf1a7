"""`python -m engine.demo.train`: trains the demo model and writes its Hugging Face directory.

Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for the matrices and AdamW for the
embedding and the norms; no text is seen twice but the documents. Conversations are
batched with others of like length, so that little is padded. Matrices multiply in bf16 under autocast, where
the CPU has instructions for it; what is evaluated and written are the bf16 weights.

Four rounds: one over `corpus`, then a shorter one at a lower rate over `polish`, whose wordings are freer,
one over `calls`, for functions and JSON, and a short one that brings back what the third has unsettled. For
the same reason a part of the weights is that of before the third (Wortsman et al., 2022, arXiv 2203.05482).
`--onward DIR` begins with the third, from the weights of a directory.

The run is seeded throughout. Other thread counts or CPUs round sums differently, so weights may differ in
the last bits there; the tokenizer and the corpus do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from engine.demo import MODEL_DIR
from engine.demo.train import calls, corpus, evaluate, polish
from engine.demo.train.network import DemoModel, Shape
from engine.demo.train.text import (
    END,
    PAD,
    START,
    Messages,
    answer_spans,
    render,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

THREADS = 2
BATCH_TOKENS = 4096
WIDTH_UNIT, POSITIONS_UNIT = 16, 256
WEIGHT_MIN, WEIGHT_MAX, UNIT_WEIGHT_TOKENS = 0.5, 2.0, 24
POOL = 2048  # conversations among which batches of like length are formed
DOCUMENT_COPIES = 6
TOKENIZER_CONVERSATIONS = 12_000
MUON_RATE, ADAM_RATE, WARMUP_STEPS = 0.02, 0.004, 60
WEIGHT_DECAY = 0.01
SECOND_PEAK, THIRD_PEAK, FOURTH_PEAK = 0.35, 0.5, 0.25
EARLIER_PART = 0.05
STEPS, DECAY_SHARE = 2600, 0.4
GRADIENT_NORM_MAX = 1.0
HAS_BF16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
TEMPERATURE = 0.1  # what a request that asks for none gets: so small a model means what it says most surely


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and the weight of each in the loss: zero for all that the assistant does not say."""

    ids: list[int]
    weights: list[float]


def weighted(ids: list[int], spans: list[range]) -> Example:
    """A short answer is a fact in a few tokens, a story many tokens of one fact: short ones weigh more."""
    weights = [0.0] * len(ids)
    for span in spans:
        weight = min(WEIGHT_MAX, max(WEIGHT_MIN, (UNIT_WEIGHT_TOKENS / len(span)) ** 0.5))
        weights[span.start : span.stop] = [weight] * len(span)
    return Example(ids, weights)


def encode_conversations(
    tokenizer: Tokenizer, context_len: int, conversations: Iterable[Messages]
) -> list[Example]:
    """Conversations as token ids, cut at the context."""
    cut = (e.ids[:context_len] for e in tokenizer.encode_batch([render(each) for each in conversations]))
    return [weighted(ids, answer_spans(ids, tokenizer)) for ids in cut]


def encode_corpus(tokenizer: Tokenizer, context_len: int, count: int = corpus.CONVERSATIONS) -> list[Example]:
    """All conversations and documents of the first round."""
    told = (each.messages() for each in corpus.conversations(count))
    examples = encode_conversations(tokenizer, context_len, told)
    for document in corpus.documents() * DOCUMENT_COPIES:
        ids = tokenizer.encode(document + END).ids
        examples.append(weighted(ids, [range(1, len(ids))]))
    return examples


def batches(examples: list[Example], rng: Random) -> list[list[Example]]:
    """Batches of at most BATCH_TOKENS padded tokens, of examples of like length, in random order."""
    order = list(examples)
    rng.shuffle(order)
    result: list[list[Example]] = []
    for begin in range(0, len(order), POOL):
        batch: list[Example] = []
        for example in sorted(order[begin : begin + POOL], key=lambda e: len(e.ids)):
            if (len(batch) + 1) * _up(len(example.ids), WIDTH_UNIT) > BATCH_TOKENS:
                result.append(batch)
                batch = []
            batch.append(example)
        result.append(batch)
    rng.shuffle(result)
    return result


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def tensors(batch: list[Example], pad_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids [B, T], flat positions whose next token is learned [N], these next tokens [N], their weights
    [N].

    T and N are rounded up, because the CPU's matrix library compiles and keeps a kernel for each new size.
    """
    width = _up(max(len(e.ids) for e in batch), WIDTH_UNIT)
    ids = torch.tensor([e.ids + [pad_id] * (width - len(e.ids)) for e in batch])
    weights = torch.tensor([e.weights + [0.0] * (width - len(e.weights)) for e in batch]).flatten()
    learned = weights.nonzero().squeeze(1)
    spare = (0, _up(len(learned), POSITIONS_UNIT) - len(learned))
    positions, targets = learned - 1, ids.flatten()[learned]
    return (
        ids,
        functional.pad(positions, spare),
        functional.pad(targets, spare),
        functional.pad(weights[learned], spare),
    )


class _Muon(torch.optim.Optimizer):
    """Muon as in `torch.optim`, in float32, as that computes in bf16 whatever the processor can do."""

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonal(param.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest matrix [m, n] with orthogonal rows or columns, by five steps of Newton and Schulz."""
    wide = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    wide = wide / wide.norm().clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if gradient.shape[0] > gradient.shape[1] else wide


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        _Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int, decay_share: float = DECAY_SHARE) -> float:
    """The learning rate's factor: it rises over the first steps, stays, then falls linearly to zero over the
    last `decay_share` of them."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (decay_share * steps))


def save_progress(path: Path, model: DemoModel, opts: list[torch.optim.Optimizer], step: int) -> None:
    """Weights and optimizer state after `step` steps, from which `load_progress` goes on exactly."""
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for number, opt in enumerate(opts):
        for index, state in opt.state_dict()["state"].items():
            tensors |= {f"{number}/{index}/{name}": value for name, value in state.items()}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"step": str(step)})
    part.rename(path)


def load_progress(path: Path, model: DemoModel, opts: list[torch.optim.Optimizer]) -> int:
    """The number of steps already done."""
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
    tensors = load_file(path)
    model.load_state_dict({name: tensors.pop(f"model/{name}") for name in model.state_dict()})
    for number, opt in enumerate(opts):
        states: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            owner, index, name = key.split("/")
            if int(owner) == number:
                states[int(index)][name] = value
        opt.load_state_dict({"state": states, "param_groups": opt.state_dict()["param_groups"]})
    return step


def train(
    model: DemoModel,
    opts: list[torch.optim.Optimizer],
    plan: list[list[Example]],
    pad_id: int,
    first: int,
    factors: Sequence[float] | None = None,
) -> Iterator[tuple[int, float]]:
    """Runs the plan from step `first` on; yields (steps done, loss) after each step. `factors` are the
    learning rate's, one per step; by default those of a single round."""
    factors = factors or [learning_rate_factor(step, len(plan)) for step in range(len(plan))]
    peaks = [[group["lr"] for group in opt.param_groups] for opt in opts]
    for step in range(first, len(plan)):
        ids, positions, targets, weights = tensors(plan[step], pad_id)
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BF16):
            hidden, _ = model.hidden(ids)
            logits = model.logits(hidden.flatten(0, 1)[positions])
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        factor = factors[step]
        for opt, own in zip(opts, peaks, strict=True):
            for group, peak in zip(opt.param_groups, own, strict=True):
                group["lr"] = peak * factor
            opt.step()
            opt.zero_grad(set_to_none=True)
        yield step + 1, loss.item()


def copied(model: DemoModel) -> dict[str, Tensor]:
    """The weights as they are now, by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def rounded(model: DemoModel) -> DemoModel:
    """A copy of the model with the weights that will be written, rounded to bf16."""
    copy = DemoModel(model.shape)
    copy.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    return copy.eval()


def write(model: DemoModel, tokenizer: Tokenizer, directory: Path) -> None:
    """The model directory in Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    pad_id, end_id = token_id(tokenizer, PAD), token_id(tokenizer, END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_len,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    generation = {
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "do_sample": True,
        "temperature": TEMPERATURE,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    save_tokenizer(tokenizer, directory, shape.context_len)


def tokenizer_of_corpus() -> Tokenizer:
    """The tokenizer, trained on the first round's text."""
    texts = [render(c.messages()) for c in corpus.conversations(TOKENIZER_CONVERSATIONS)] + corpus.documents()
    return train_tokenizer(text.replace(START, "").replace(END, "") for text in texts)


def extend(
    plan: list[list[Example]],
    factors: list[float],
    examples: list[Example],
    seed: int,
    peak: float = SECOND_PEAK,
) -> None:
    """Add a round to the plan, whose rate is at most `peak` times that of the first."""
    more = batches(examples, Random(seed))
    plan += more
    factors += [peak * learning_rate_factor(at, len(more), decay_share=1.0) for at in range(len(more))]


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches, and the learning rate's factor of each."""

    batches: list[list[Example]]
    factors: list[float]


def first_rounds(tokenizer: Tokenizer, context_len: int, steps: int) -> Plan:
    """The first round, of so many steps, and the second."""
    first = batches(encode_corpus(tokenizer, context_len), Random(corpus.SEED))[:steps]
    plan = Plan(first, [learning_rate_factor(step, len(first)) for step in range(len(first))])
    second = (each.messages() for each in polish.conversations())
    extend(plan.batches, plan.factors, encode_conversations(tokenizer, context_len, second), polish.SEED)
    return plan


def later_rounds(tokenizer: Tokenizer, context_len: int) -> list[Plan]:
    """The third round and the fourth."""
    plans = []
    for said, peak in ((calls.conversations(), THIRD_PEAK), (calls.settling(), FOURTH_PEAK)):
        plans.append(Plan([], []))
        told = encode_conversations(tokenizer, context_len, said)
        extend(plans[-1].batches, plans[-1].factors, told, calls.SEED, peak)
    return plans


def loaded(directory: Path) -> tuple[Tokenizer, DemoModel]:
    """The tokenizer and the model of a directory."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = DemoModel(Shape(vocab_size=tokenizer.get_vocab_size()))
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return tokenizer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="where the model directory is written")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of the first round")
    parser.add_argument("--onward", type=Path, help="a model directory from which the third round goes on")
    parser.add_argument("--log-every", type=int, default=25, help="steps between two lines of the log")
    parser.add_argument("--progress", type=Path, help="a file to keep the progress in, and to go on from")
    parser.add_argument("--keep-every", type=int, default=50, help="steps between two writes of that file")
    options = parser.parse_args()

    torch.set_num_threads(THREADS)
    torch.manual_seed(corpus.SEED)
    began = time.monotonic()
    if options.onward:
        tokenizer, model = loaded(options.onward)
        plan = Plan([], [])
    else:
        tokenizer = tokenizer_of_corpus()
        model = DemoModel(Shape(vocab_size=tokenizer.get_vocab_size()))
        plan = first_rounds(tokenizer, model.shape.context_len, options.steps)
    later = later_rounds(tokenizer, model.shape.context_len)
    whole = [batch for own in (plan, *later) for batch in own.batches]
    parameters, tokens = sum(p.numel() for p in model.parameters()), sum(len(e.ids) for b in whole for e in b)
    print(f"{parameters} parameters, {tokens} tokens, {len(whole)} steps", flush=True)

    opts, losses, first, pad_id = optimizers(model), list[float](), 0, token_id(tokenizer, PAD)
    if options.progress and options.progress.exists():
        first = load_progress(options.progress, model, opts)
    runs = [train(model, opts, plan.batches, pad_id, first, plan.factors)]
    runs += [train(model, optimizers(model), own.batches, pad_id, 0, own.factors) for own in later]
    earlier = copied(model)
    for step, (_, loss) in enumerate(chain.from_iterable(runs), first + 1):
        losses.append(loss)
        if step == len(plan.batches):
            earlier = copied(model)
        if step % options.log_every == 0:
            mean = sum(losses[-options.log_every :]) / len(losses[-options.log_every :])
            print(f"step {step} loss {mean:.4f} seconds {time.monotonic() - began:.0f}", flush=True)
        if options.progress and step % options.keep_every == 0 and step <= len(plan.batches):
            save_progress(options.progress, model, opts, step)
    own = model.state_dict()
    model.load_state_dict({name: own[name].lerp(earlier[name], EARLIER_PART) for name in own})
    write(model, tokenizer, options.out)
    print(evaluate.report(rounded(model), tokenizer), flush=True)
    print(f"done in {time.monotonic() - began:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()

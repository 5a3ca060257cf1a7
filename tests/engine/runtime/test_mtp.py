"""Drafts by Qwen3.5's own MTP layer: it computes what an oracle of transformers' parts does, and no token
depends on it."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.contract.messages import Finished, Plan, RunResult, SamplingParams, SlotAssignment, Want
from engine.core.drafts.drafter import NGramDrafts
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.host.sampler import Draw, draw_by_torch
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import Kernels, RunnerConfig
from engine.runtime.step.seats import SamplingColumns
from tests import effort
from tests.bench.engine.core_window import draft_by, in_slot
from tests.engine.runtime.config_oracle import Weights, _made_up
from tests.engine.runtime.test_states import Answers, conversations, scheduled, served

MODEL = Weights("qwen3_5_text", layers=4, heads=4, kv_heads=2)
PAGE, SLOTS, LEN = 16, 4, 90
VOCAB = MODEL.vocab


def mtp_tensors(inner: int = 48) -> dict[str, Tensor]:
    hidden, heads, kv, dim = 32, 4, 2, 16
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (2 * heads * dim, hidden),
        "self_attn.k_proj": (kv * dim, hidden),
        "self_attn.v_proj": (kv * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (hidden, 2 * hidden)}
    shapes |= dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (hidden,))
    names = {f"mtp.{name}.weight": shape for name, shape in shapes.items()}
    return {name: _made_up(name, shape, 0.0) for name, shape in names.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    config = MODEL.config(max_position_embeddings=128, mtp_num_hidden_layers=1)
    (path / "config.json").write_text(json.dumps(config))
    save_file(MODEL.tensors() | mtp_tensors(), path / "model.safetensors", {"format": "pt"})
    return path


def loaded(path: Path, dtype: Any = "float32", kernels: Kernels = "native", **options: Any) -> HostRunner:
    config = RunnerConfig(
        str(path),
        device="cpu",
        dtype=dtype,
        kernels=kernels,
        page_size=PAGE,
        max_num_seqs=SLOTS,
        max_model_len=LEN,
        threads=1,
        **options,
    )
    runner = load_runner(config, lambda _: None)
    assert isinstance(runner, HostRunner)
    return runner


# -- the oracle -----------------------------------------------------------------------------------


class Oracle:
    """Qwen3.5 in transformers, and its MTP layer put together from transformers' parts; all positions at
    once, without a cache."""

    def __init__(self, path: Path) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

        self.model = theirs.Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        own, config = mtp_tensors(), self.model.config
        config._attn_implementation = "eager"
        self.layer = theirs.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).eval()
        at = "mtp.layers.0."
        self.layer.load_state_dict({n.removeprefix(at): t for n, t in own.items() if n.startswith(at)})
        self.norms = {}
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            norm = theirs.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
            norm.load_state_dict({"weight": own[f"mtp.{name}.weight"]})
            self.norms[name] = norm
        self.fc = own["mtp.fc.weight"]

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """The model's last hidden states, normed, [1, T, hidden]."""
        hidden: Tensor = self.model.model(torch.tensor([tokens]))[0]
        return hidden

    def next(self, tokens: list[int]) -> int:
        """The likeliest token behind these."""
        return int((self.hidden(tokens)[0, -1] @ self.model.lm_head.weight.T).argmax())

    @torch.no_grad()
    def guesses(self, tokens: list[int], number: int) -> list[Tensor]:
        """The logits of each guess behind the tokens: each is the likeliest of its own."""
        hidden, following, found = self.hidden(tokens[:-1]), tokens[1:], []
        for _ in range(number):
            embedded = self.model.model.embed_tokens(torch.tensor([following]))
            parts = self.norms["pre_fc_norm_embedding"](embedded), self.norms["pre_fc_norm_hidden"](hidden)
            x = torch.cat(parts, dim=-1) @ self.fc.T
            count = x.shape[1]
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            angles = self.model.model.rotary_emb(x, positions[None].expand(3, -1, -1))
            out = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
            out = out[0] if isinstance(out, tuple) else out
            guessed = self.norms["norm"](out[:, -1:])
            logits = self.model.lm_head(guessed)[0, -1]
            found.append(logits)
            hidden = torch.cat((hidden, guessed), dim=1)
            following = [*following, int(logits.argmax())]
        return found


# -- its logits -----------------------------------------------------------------------------------


class Guessing:
    """A sequence in a runner's slot, computed as a test says; notes the logits of guesses."""

    def __init__(self, runner: HostRunner) -> None:
        assert runner.mtp is not None
        self.runner, self.logits = runner, list[Tensor]()
        head = runner.mtp.logits

        def noting(hidden: Tensor) -> Tensor:
            self.logits.append(head(hidden).clone())
            return self.logits[-1]

        runner.mtp.logits = noting

    def seat(self, slot: int, tokens: list[int]) -> None:
        own = list(range(slot * 6, slot * 6 + 6))
        start = SlotAssignment.of(slot, tokens, len(tokens), SamplingParams(0, 50, temperature=0.0))
        self.runner.run(Plan(0, [], [start], [(slot, own)], [], [], [], []))

    def run(self, rows: list[tuple[int, int, list[int]]], guesses: list[int]) -> RunResult:
        """Rows (slot, start, drafts): the known tokens from there on, all of which they are, and drafts."""
        seats = [self.runner.slots.seat(slot) for slot, _, _ in rows]
        slots, positions, drafts = map(list, zip(*rows, strict=True))
        lengths = [
            seat.known_len - start + len(own) for seat, (_, start, own) in zip(seats, rows, strict=True)
        ]
        wants = [Want.VERIFY if own else Want.SAMPLE for own in drafts]
        drafts = [own for own in drafts if own]
        plan = Plan(0, [], [], [], slots, positions, lengths, wants, drafts=drafts, guesses=guesses)
        return self.runner.run(plan)

    def chunk(self, slot: int, length: int) -> None:
        self.runner.run(Plan(0, [], [], [], [slot], [0], [length], [Want.NOTHING]))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_its_logits_are_those_of_an_oracle_put_together_from_transformers(
    checkpoint: Path, kernels: Kernels
) -> None:
    """Behind chunks, decodes, and rows that verified a right draft and a wrong one."""
    oracle, rng = Oracle(checkpoint), random.Random(1)
    rows = Guessing(loaded(checkpoint, "float32", kernels))
    tokens = [rng.choices(range(VOCAB), k=length) for length in (37, 5)]
    for slot, own in enumerate(tokens):
        rows.seat(slot, own)
        rows.chunk(slot, 3 + 20 * (slot == 0))
    said = rows.run([(0, 23, []), (1, 3, [])], [3, 1])
    for turn in range(9):
        sampled = iter(said.tokens)
        tokens[0] += [next(sampled) for _ in range(2)] if turn else [next(sampled)]
        if turn:
            next(sampled)  # what is behind the wrong draft
        tokens[1].append(next(sampled))
        first, second = oracle.guesses(tokens[0], 3), oracle.guesses(tokens[1], 1)
        found = [row for logits in rows.logits for row in logits]
        for row, right in zip(found, [first[0], second[0], *first[1:]], strict=True):
            assert float((row - right).abs().max()) < 1e-4
        guessed = [[int(each.argmax()) for each in own] for own in (first, second)]
        assert said.guesses == guessed
        rows.logits.clear()
        draft = oracle.next(tokens[0])
        wrong = (oracle.next([*tokens[0], draft]) + 1) % VOCAB
        said = rows.run([(1, len(tokens[1]) - 1, []), (0, len(tokens[0]) - 1, [draft, wrong])], [1, 3])
        said = RunResult([*said.tokens[1:], said.tokens[0]], [], [], guesses=said.guesses[::-1])
        rows.logits[0] = rows.logits[0].flip(0)


# -- the law --------------------------------------------------------------------------------------


class Silent(NGramDrafts):
    """Finds nothing."""

    def __init__(self) -> None:
        super().__init__(2, ())

    def look(self, tokens: array[int], most: int, read_max: int) -> None:
        return None


def agreeing(
    scheduler: Scheduler, added: Sequence[AddSequence], answers: Answers, right_share: float | None
) -> Draw:
    """Draws guesses by whoever knows the answers: a share of them right. None: as the layer guesses."""
    if right_share is None:
        return draw_by_torch
    rng, wholes = random.Random(1), dict[int, list[int]]()
    for message in added:
        wholes[message.handle] = [*message.prompt_ids, *(own[0] for own in answers[message.handle][:-1])]

    def draw(
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        columns: SamplingColumns,
        masks: Sequence[bytes] = (),
    ) -> Tensor:
        found = []
        for slot, position in zip(slots, positions, strict=True):
            whole = wholes[in_slot(scheduler, slot).handle]
            token = whole[position] if position < len(whole) else 0
            found.append(token if rng.random() < right_share else (token + 1) % VOCAB)
        return torch.tensor(found)

    return draw


@pytest.mark.parametrize(
    ("dtype", "kernels", "right_share"),
    [
        ("bfloat16", "native", None),
        ("bfloat16", "native", 1.0),
        ("float32", "native", 0.0),
        ("float32", "torch", 0.7),
    ],
)
def test_no_bit_depends_on_its_guesses(
    checkpoint: Path, dtype: str, kernels: Kernels, right_share: float | None
) -> None:
    """Whatever share of them is right: in histories of prefixes that are found, preemptions, and pauses."""
    rng = random.Random(5)
    cold = loaded(checkpoint, dtype, kernels, max_drafts=0)
    assert cold.mtp is None
    page_bytes, state_bytes = cold.info.page_bytes, cold.info.state_bytes
    runner = loaded(checkpoint, dtype, kernels, kv_cache_memory=15 * page_bytes + (SLOTS + 12) * state_bytes)
    assert runner.mtp is not None
    assert runner.info.guesses_max > 0
    asked = drafted = accepted = preempted = 0
    for _ in range(effort.drawn(2 if kernels == "native" else 1, whole=50)):
        added, expected = conversations(rng, cold)
        scheduler, plans, ends = scheduled(runner, rng), list[Plan](), list[Finished]()
        draft_by(scheduler, lambda _: Silent())
        runner.mtp.draw = agreeing(scheduler, added, expected, right_share)
        assert served(scheduler, runner, added, rng, plans, ends) == expected
        asked += sum(sum(plan.guesses) for plan in plans)
        drafted += sum(end.drafted for end in ends)
        accepted += sum(end.accepted for end in ends)
        preempted += scheduler.stats().preemptions
    assert asked >= drafted > 4
    assert preempted > 0
    if right_share is not None:
        assert abs(accepted / drafted - right_share) < (0.4 if 0.0 < right_share < 1.0 else 1e-9)

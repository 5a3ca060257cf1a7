"""The whole engine on the GPU, from `load_runner` through the core's loop, on small random models.

Everything is float32: tokens are equal or they are not.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.contract.messages import FinishReason, Pending, Plan, RunnerInfo, SamplingParams
from engine.contract.packing import Biases
from engine.core.drafts.drafter import Drafts
from engine.core.queue.newcomers import AddSequence
from engine.core.sequence import Sequence as Sequence_
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import RunnerConfig
from tests.bench.engine.gpu.measuring import check
from tests.engine.models import VOCAB_SIZE, not_greedy
from tests.engine.runtime.guessing import guessing_model, lead
from tests.fake_drafts import FakeDrafts
from tests.gpu.loop import Served, serve, vacate
from tests.gpu.models import other_model, plain_models
from tests.gpu.near import near

STEP_TOKENS_MAX = 64
LOGPROB_ERROR_MAX = 1e-4
"""Of a sequence's log-probabilities, by norm."""
SLOTS = 6
COMPANY: Sequence[dict[str, Any]] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 5},
    {"temperature": 0.7, "prompt_logprobs": 2},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": Biases.of(((3, 2.0),))},
)

Load = Callable[..., DeviceRunner]
"""(model directory, settings) -> a runner."""


def on_gpu(path: Path, **settings: Any) -> DeviceRunner:
    config = RunnerConfig(
        str(path),
        device="cuda",
        dtype="float32",
        page_size=16,
        max_num_seqs=SLOTS,
        max_step_tokens=STEP_TOKENS_MAX,
        gpu_memory_utilization=0.5,  # others share the card
        **settings,
    )
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, DeviceRunner)
    return runner


def prompts(count: int, longest: int, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 15, 16, 17, longest // 2, longest]) for _ in range(count)]
    return [rng.choices(range(VOCAB_SIZE), k=length) for length in lengths]


def requests(
    asked: Sequence[list[int]], outputs: int, company: Sequence[dict[str, Any]], first: int = 0
) -> list[AddSequence]:
    """`first`: the first one's handle."""
    return [
        AddSequence(
            handle,
            f"req-{handle}",
            prompt,
            SamplingParams(**{"seed": handle, "max_tokens": outputs} | company[handle % len(company)]),
        )
        for handle, prompt in enumerate(asked, first)
    ]


def through_the_core(path: Path, load: Load = on_gpu, count: int = 12, outputs: int = 32) -> dict[str, Any]:
    """More requests than slots, chunked prompts, a warm prefix cache: greedy is transformers' greedy."""
    asked = prompts(count, 100)
    runner = load(path)
    wanted = requests(asked + asked[:2], outputs, [{"temperature": 0.0}])
    served = serve(runner, wanted, step_tokens_max=STEP_TOKENS_MAX)
    found = [served.tokens[handle] for handle in range(len(wanted))]
    assert {len(tokens) for tokens in found} == {outputs}
    assert not (off := not_greedy(path, asked, found[:count])), f"prompts {off} differ from transformers'"
    assert found[count:] == found[:2], "tokens differ on cached prefixes"
    assert set(served.reasons.values()) == {FinishReason.LENGTH}
    return {"tokens": len(wanted) * outputs, "steps": served.steps}


def choices(path: Path, load: Load = on_gpu, count: int = 10, outputs: int = 16) -> dict[str, Any]:
    """Choices of one prompt, which take its last page from each other: each is transformers' greedy."""
    asked = prompts(4, 50)
    wanted = requests([prompt for prompt in asked for _ in range(count)], outputs, [{"temperature": 0.0}])
    served = serve(load(path), wanted, step_tokens_max=STEP_TOKENS_MAX)
    found = [served.tokens[handle] for handle in range(len(wanted))]
    first = found[::count]
    assert found == [tokens for tokens in first for _ in range(count)], "tokens differ between choices"
    assert {len(tokens) for tokens in first} == {outputs}
    assert not (off := not_greedy(path, asked, first)), f"prompts {off} differ from transformers'"
    assert served.stats is not None
    taken = served.stats.prefix_hit_tokens
    assert taken == sum((count - 1) * (len(prompt) - 1) for prompt in asked), "a prompt was computed twice"
    return {"tokens": len(wanted) * outputs, "steps": served.steps}


@dataclass
class Fewer:
    """A runner that tells of fewer pages than it has, so that sequences are preempted."""

    runner: DeviceRunner
    pages: int

    @property
    def info(self) -> RunnerInfo:
        return msgspec.structs.replace(self.runner.info, pages=self.pages)

    def launch(self, plan: Plan) -> Pending:
        return self.runner.launch(plan)


def said(served: Served) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    return dict(served.tokens), served.reasons


def overlapped(path: Path, load: Load = on_gpu, count: int = 14, outputs: int = 24) -> dict[str, Any]:
    """Every kind of sampling, preempted and swapped: steps that overlap bring what steps apart do."""
    asked = requests(prompts(count, 90), outputs, COMPANY)
    found = []
    for overlap in (False, True):
        served = serve(Fewer(load(path), 16), asked, overlap=overlap, step_tokens_max=STEP_TOKENS_MAX)  # type: ignore[arg-type]
        assert served.stats is not None
        assert served.stats.preemptions > 0, "nobody was preempted"
        found.append(served)
    plain, ahead = found
    assert said(ahead) == said(plain), "tokens differ between overlapped and plain"
    stats = ahead.stats
    assert stats is not None
    return {"steps": ahead.steps, "preemptions": stats.preemptions, "swaps_in": stats.swaps_in}


def snapshots(path: Path, load: Load = on_gpu, count: int = 8, outputs: int = 24) -> dict[str, Any]:
    """Of a model with states: prompts that go on from snapshots, of a prompt or behind its answer, and
    sequences that were preempted say what they say cold, alone in their slots. Log-probabilities differ by
    rounding."""
    asked, company = prompts(count, 48), [{"temperature": 0.0, "logprobs": 0}]
    asked[0] = asked[0][:1] * 48  # it ends with a page
    now = requests(asked, outputs, company)
    sizes: dict[str, Any] = {"step_tokens_max": STEP_TOKENS_MAX}
    runner = load(path)
    answers = serve(runner, now, prefix_cache=False, **sizes).tokens
    turns = [prompt + answers[at] * (at % 2) + [5, 6, 7] for at, prompt in enumerate(asked)]
    later = requests(turns, outputs, company, count)
    vacate(runner)
    cold = serve(runner, now, later, prefix_cache=False, **sizes)
    vacate(runner)
    warm = serve(Fewer(runner, 16), now, later, **sizes)  # type: ignore[arg-type]
    stats = warm.stats
    assert stats is not None
    assert stats.states.restored > 0, "nobody went on from a snapshot"
    assert said(warm) == said(cold), "tokens differ between warm and cold"
    for handle, found in warm.logprobs.items():
        near(torch.tensor(found), torch.tensor(cold.logprobs[handle]), LOGPROB_ERROR_MAX)
    return {"steps": warm.steps, "restored": stats.states.restored, "preemptions": stats.preemptions}


def graphs(path: Path, load: Load = on_gpu, count: int = 8, outputs: int = 24) -> dict[str, Any]:
    """Graphs bring what the same steps bring kernel by kernel. Log-probabilities differ by rounding, as steps
    with prompts are padded in a graph alone."""
    asked = requests(prompts(count, 90), outputs, COMPANY)
    replayed = serve(load(path), asked, step_tokens_max=STEP_TOKENS_MAX)
    eager = serve(load(path, enforce_eager=True), asked, step_tokens_max=STEP_TOKENS_MAX)
    assert said(replayed) == said(eager), "tokens differ between graphs and eager"
    for handle, found in replayed.logprobs.items():
        near(torch.tensor(found), torch.tensor(eager.logprobs[handle]), LOGPROB_ERROR_MAX)
    return {"steps": replayed.steps}


def drafted(
    path: Path, load: Load = on_gpu, count: int = 14, outputs: int = 24, right: float = 0.7
) -> dict[str, Any]:
    """Every kind of sampling, by graphs, beside prompts, preempted: with drafts of which a share is right the
    answers are those without. Log-probabilities differ by rounding."""
    asked = requests(prompts(count, 90), outputs, COMPANY)
    sizes: dict[str, Any] = {"step_tokens_max": STEP_TOKENS_MAX}
    plain = serve(Fewer(load(path, max_drafts=0), 16), asked, **sizes)  # type: ignore[arg-type]

    def drafter_of(sequence: Sequence_) -> Drafts:
        request = asked[sequence.handle]
        own = [*request.prompt_ids, *plain.tokens[sequence.handle]]
        stops, rng = request.sampling.stop_token_ids, random.Random(sequence.handle)
        return FakeDrafts(own, stops, VOCAB_SIZE, right, rng)

    runner = Fewer(load(path), 16)
    served = serve(runner, asked, **sizes, drafter_of=drafter_of)  # type: ignore[arg-type]
    assert said(served) == said(plain), "tokens differ between drafts and none"
    for handle, found in served.logprobs.items():
        near(torch.tensor(found), torch.tensor(plain.logprobs[handle]), LOGPROB_ERROR_MAX)
    assert served.accepted > 0, "no draft was right"
    drafts = {"drafted": served.drafted, "accepted": served.accepted}
    return {"steps": served.steps, "steps_plain": plain.steps} | drafts


def guesses(path: Path, load: Load = on_gpu, turns: int = 9) -> dict[str, Any]:
    """A model's own MTP layer guesses what it does by torch on a CPU, behind chunks, decodes, and rows that
    verified."""
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128, "page_size": 16}
    host = RunnerConfig(str(path), device="cpu", dtype="float32", kernels="torch", **sizes)
    own = load_runner(host, lambda stage: None)
    assert isinstance(own, HostRunner)
    found, expected = lead(load(path, max_drafts=4, max_model_len=128), turns), lead(own, turns)
    off = [step for step, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not off, f"steps {off} differ from torch's, first {found[off[0]]} for {expected[off[0]]}"
    return {"steps": len(found), "guesses": sum(len(each) for _, rows in found for each in rows)}


@dataclass
class Unwaiting:
    """A runner whose launches may not wait: torch raises where one would."""

    runner: DeviceRunner

    @property
    def info(self) -> RunnerInfo:
        return self.runner.info

    def launch(self, plan: Plan) -> Pending:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def no_waits(path: Path, outputs: int = 8) -> dict[str, Any]:
    """Nor where prompts are found again, and the states behind them."""
    asked = prompts(len(COMPANY), 96)  # of whole pages, some
    now = requests(asked, outputs, COMPANY)
    later = requests([[*prompt, 5, 6, 7] for prompt in asked], outputs, COMPANY, len(asked))
    runner = Unwaiting(on_gpu(path))
    served = serve(runner, now, later, step_tokens_max=STEP_TOKENS_MAX)  # type: ignore[arg-type]
    assert served.stats is not None
    assert served.stats.prefix_hit_tokens > 0, "no prompt was found again"
    return {"steps": served.steps}


def main() -> int:
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        paths = plain_models(Path(directory))
        for family, path in paths.items():
            row = f"engine {family}"
            ok &= check("engine", f"{row} against transformers", partial(through_the_core, path))
            ok &= check("engine", f"{row} graphs against eager", partial(graphs, path))
            ok &= check("engine", f"{row} choices of one prompt", partial(choices, path))
        ok &= check("engine", "engine launches wait for nothing", partial(no_waits, path))
        hybrid = other_model("qwen3_5_text", Path(directory) / "hybrid")
        row = "engine qwen3_5_text"
        ok &= check("engine", f"{row} against transformers", partial(through_the_core, hybrid))
        ok &= check("engine", f"{row} graphs against eager", partial(graphs, hybrid))
        ok &= check("engine", f"{row} from snapshots", partial(snapshots, hybrid))
        ok &= check("engine", f"{row} launches wait for nothing", partial(no_waits, hybrid))
        mtp = guessing_model(Path(directory) / "mtp")
        ok &= check("engine", f"{row} guesses as torch", partial(guesses, mtp))
        for family, path in {"qwen3_5_text": hybrid, **paths}.items():
            ok &= check("engine", f"engine {family} drafts against none", partial(drafted, path))
        for family, path in paths.items():
            row = f"engine {family} overlapped against plain"
            ok &= check("engine", row, partial(overlapped, path))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

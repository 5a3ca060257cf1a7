"""`python -m engine serve ...`: the API process. `python -m engine core`: its child, with the tensors.

The only place that knows all floors: it hands the runner to the core's loop, and to the API process
what it may not import itself. The API process never imports torch.
"""

from __future__ import annotations

import sys

from shared.process import interrupts

if __name__ == "__main__":
    if sys.argv[1:] == ["core"]:
        interrupts.leave_to_parent()
    else:
        interrupts.end_quietly()

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.config import CoreStart, EngineConfig, from_args
from shared.process import logs
from shared.process.environment import unread_in
from shared.process.loops import loop_factory

if TYPE_CHECKING:
    from engine.contract.messages import Runner, RunnerInfo
    from engine.core.grammars.threads import GrammarThreads
    from engine.core.scheduler_config import SchedulerConfig
    from engine.core.transport import CoreTransport
    from engine.runtime.parallel.rendezvous import Rendezvous
    from engine.runtime.setup.runner_config import RunnerConfig

    Told = Callable[[str], None]
    Load = Callable[[RunnerConfig, Told, Told], Runner]

DEMO: Final = "demo"
"""The built-in model's name for `--model`."""
NICENESS: Final = 5
"""Added to that of threads which compute on all cores: a thread with a message for a client, or with news of
one that left, runs at once, and not when a computing thread's turn of 4 ms is over. No setting, as nothing is
given away: alone on the core it makes no difference, and it binds only inside the container or session that
both processes share. Where computing threads leave a core to others, none is nicer: a flood of requests, all
of whose work is that of the others, would have three times the share of the threads that everybody's tokens
come from. (`tests/bench/results/neighbours-slow-2026-11-27.jsonl`: two cores, one computing thread.)"""

USAGE = "usage: python -m engine serve [--help] --model DIR|ID [options]\n"


def main(argv: list[str]) -> int:
    match argv:
        case ["serve", *options]:
            return _rank(from_args(options, os.environ))
        case ["core"]:
            return core(CoreStart.decode(sys.stdin.buffer.read()), _load)
        case _:
            sys.stderr.write(USAGE)
            return 2


def _rank(config: EngineConfig) -> int:
    """Serve, unless this process is another rank than 0 of a model on several machines. Returns its exit
    status."""
    from engine.runtime.parallel.rendezvous import rendezvous_in
    from shared.process.setting_values import ConfigError

    try:
        place = rendezvous_in(os.environ, config.tensor_parallel_size)
    except ConfigError as error:
        sys.stderr.write("".join(f"penstock engine: {problem}\n" for problem in error.problems))
        return 2
    if place is None or place.rank == 0:
        return serve(config)
    from engine.runtime.parallel.remote import follow

    logs.configure(f"engine-rank-{place.rank}", level=config.log_level)
    return follow(config.runner, place, config.startup_timeout_s, lambda: _model_directory(config))


def serve(config: EngineConfig) -> int:
    """The API process, until a stop signal. Returns its exit status."""
    from engine.api.core.process import CoreProcess
    from engine.api.http import server
    from engine.runtime.setup.model_errors import ModelError

    def resolve(_model: str) -> Path:
        try:
            return _model_directory(config)
        except ModelError as error:
            raise server.StartFailed(str(error)) from error

    logs.configure("engine", level=config.log_level)
    if unread := unread_in(os.environ):
        logs.get(__name__).warning("environment.unread", names=unread)
    problems: list[str] = []
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(server.serve(config, resolve, CoreProcess, problems.append))
    if problems and sys.stderr.isatty():
        logs.close()  # who sits there reads the last line, and no JSON
        sys.stderr.write(f"penstock engine: {problems[0]}\n")
    return code


def _model_directory(config: EngineConfig) -> Path:
    """The directory of the model that `config` names, which may be downloaded first. Raises ModelError."""
    from engine.demo import MODEL_DIR
    from engine.runtime.setup.hub import resolve_model

    if config.model == DEMO and not Path(DEMO).exists():
        return MODEL_DIR
    return resolve_model(config.model, config.revision)


def core(start: CoreStart, load: Load) -> int:
    """The core process, until it is told to stop or its parent is gone. Returns its exit status. `load`
    makes the runner: of its settings, what hears of each stage, and what hears that a rank was lost."""
    from engine.contract.messages import CoreFailed
    from engine.core.loop import CoreLoop
    from engine.core.pages.page_files import DirectoryRefused
    from engine.core.queue.policy import DISCIPLINES
    from engine.core.transport import CoreTransport, say_once
    from engine.disk_tier import open_disk_tier
    from engine.runtime.setup.hardware import computes_on_all_cores
    from shared.process.lifecycle import die_with_parent

    def lost(reason: str) -> None:
        """The main thread may wait for a rank that is gone, for ever: this one says why and ends both."""
        say_once(start.outbox, CoreFailed(reason))
        os._exit(1)

    die_with_parent(start.parent_pid, signal.SIGKILL)
    config = start.config
    logs.configure("engine-core", level=config.log_level)
    with CoreTransport(start.inbox, start.outbox) as transport:
        carriers = _threads() - {os.getpid()}  # the log's and ZeroMQ's
        grammars = _grammars(start, transport)
        runner = _runner(lambda progress: load(config.runner, progress, lost), transport)
        if runner is None:
            return 1
        try:
            disk = open_disk_tier(config.runner, runner)
        except DirectoryRefused as error:
            transport.outbox.send(CoreFailed(f"--kv-disk-dir: {error}"))
            return 1
        if not runner.info.is_async and computes_on_all_cores(config.runner.threads):
            _step_back(_threads() - carriers)
        gc.collect()
        gc.freeze()  # torch's modules live for ever: looking through them would hold up a step for 60 ms
        CoreLoop(
            runner,
            transport.inbox,
            transport.outbox,
            _scheduling(config, runner.info),
            discipline=DISCIPLINES[config.discipline],
            overlap=runner.info.is_async if config.overlap is None else config.overlap,
            disk=disk,
            grammars=grammars.result(),
        ).run()
        _say_goodbye(runner)
    return 0


def _grammars(start: CoreStart, transport: CoreTransport) -> Future[GrammarThreads | None]:
    """The threads that matchers work on, once the vocabulary is read, beside the loading of weights: that
    takes the interpreter's lock for a third of a second. None where llguidance cannot read the tokenizer."""
    from engine.contract.grammars import BadGrammar, vocabulary_of
    from engine.core.grammars.threads import GrammarThreads

    tokens = start.tokens

    def read() -> GrammarThreads | None:
        if not tokens.vocab_size:  # nothing is generated
            return None
        try:
            vocabulary = vocabulary_of(tokens.tokenizer_json, tokens.vocab_size, tokens.end_ids)
        except BadGrammar as error:
            logs.get(__name__).warning("core.no_grammars", reason=str(error))
            return None
        return GrammarThreads(vocabulary, transport.inbox.ring)

    reader = ThreadPoolExecutor(1, "vocabulary")
    try:
        return reader.submit(read)
    finally:
        reader.shutdown(wait=False)


def _runner(load: Callable[[Told], Runner], transport: CoreTransport) -> Runner | None:
    """The loaded runner; None, once the API process has been told why, when the model cannot be served."""
    from engine.contract.messages import CoreFailed, CoreProgress
    from engine.core.loop import last_words
    from engine.runtime.setup.model_errors import ModelError

    try:
        return load(lambda stage: transport.outbox.send(CoreProgress(stage)))
    except ModelError as error:
        transport.outbox.send(CoreFailed(str(error)))
        return None
    except Exception as error:
        transport.outbox.send(CoreFailed(last_words(error)))
        raise


def _say_goodbye(runner: Runner) -> None:
    from engine.runtime.parallel.leader import LeadingRunner

    if isinstance(runner, LeadingRunner):
        runner.close()


def _place(settings: RunnerConfig) -> Rendezvous | None:
    """The place of rank 0, which the API process has checked."""
    from engine.runtime.parallel.rendezvous import rendezvous_in

    return rendezvous_in(os.environ, settings.tensor_parallel_size)


def _scheduling(config: EngineConfig, runner: RunnerInfo) -> SchedulerConfig:
    from engine.core.scheduler_config import SchedulerConfig
    from shared.apis.embeddings import INPUTS_MAX
    from shared.fairness.fair_share import held_max
    from shared.wire.shapes import PROMPTS_MAX

    prompts_max = INPUTS_MAX if runner.vector_len else PROMPTS_MAX
    return SchedulerConfig(
        step_tokens_max=config.max_step_tokens,
        # the API process keeps the bounds, by fair shares; here those that were preempted wait as well
        queue_len_max=held_max(config.max_queue_len, prompts_max) + config.max_num_seqs,
        queue_tokens_max=held_max(config.max_queue_tokens, prompts_max * runner.max_model_len),
        prefix_cache=config.prefix_cache,
        session_keep_s=config.session_keep_s,
        stall_deadline_s=config.stall_deadline_s,
        gap_targets_s=(
            config.gap_target_flex_ms / 1e3,
            config.gap_target_ms / 1e3,
            config.gap_target_priority_ms / 1e3,
        ),
        prompt_share=config.prompt_share,
        drafts_max=config.max_drafts,
    )


def _load(settings: RunnerConfig, progress: Told, lost: Told) -> Runner:
    """Load the model. With ranks, torch is not imported before they have started, and do the same."""
    if settings.tensor_parallel_size > 1:
        from engine.runtime.parallel.leader import lead

        return lead(settings, progress, lost, place=_place(settings))
    from engine.runtime.load import load_runner

    return load_runner(settings, progress)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _step_back(threads: set[int]) -> None:
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # one that helped to load, and has ended
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, own + NICENESS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

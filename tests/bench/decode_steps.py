"""Decodes one row on this machine's CPU, for whoever counts: `python -m decode_steps STEPS`.

It is the core process of an engine, with the demo model, and in a thread of its own the other end of its
wire, which asks for one sequence and reads its tokens.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from engine.contract.messages import READ_EVERY, CoreOutput, Read, SamplingParams, StepOutput, StopCore
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler_config import SchedulerConfig
from engine.core.transport import CoreTransport
from engine.demo import MODEL_DIR
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import RunnerConfig
from tests.bench.engine.core_window import alone

PROMPT = [7] * 16
CACHE_LEN = 64 * 1024 * 1024


def ask(inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], steps: int) -> None:
    """Ask for a sequence that decodes for so many steps, and stop the core when it has ended."""
    encode = msgspec.msgpack.encode
    sampling = SamplingParams(seed=1, max_tokens=1 + steps)
    inbox.send(encode(alone(AddSequence(1, "req_1", PROMPT, sampling))))
    decoder = msgspec.msgpack.Decoder(CoreOutput)
    for number in range(1, steps + 1000):
        message = decoder.decode(outbox.recv())
        if number % READ_EVERY == 0:
            inbox.send(encode(Read(number)))
        if isinstance(message, StepOutput) and message.finished:
            break
    inbox.send(encode(StopCore()))


@contextmanager
def core(steps: int, config: SchedulerConfig | None = None) -> Iterator[CoreLoop]:
    """The loop of a core that is asked for so many steps, and then to stop."""
    runs = RunnerConfig(
        str(MODEL_DIR), device="cpu", threads=1, kv_cache_memory=CACHE_LEN, swap_memory=0, max_num_seqs=8
    )
    runner = load_runner(runs, lambda _: None)
    with tempfile.TemporaryDirectory() as directory, zmq.Context[zmq.Socket[bytes]]() as context:
        ends = f"ipc://{directory}/in", f"ipc://{directory}/out"
        with context.socket(zmq.PUSH) as inbox, context.socket(zmq.PULL) as outbox:
            inbox.bind(ends[0])
            outbox.bind(ends[1])
            client = threading.Thread(target=ask, args=(inbox, outbox, steps))
            client.start()
            with CoreTransport(*ends) as transport:
                yield CoreLoop(runner, transport.inbox, transport.outbox, config or SchedulerConfig())
            client.join()


def main() -> None:
    with core(int(sys.argv[1])) as loop:
        loop.run()


if __name__ == "__main__":
    main()

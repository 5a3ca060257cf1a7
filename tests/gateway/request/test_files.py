"""The way of a request through the code: few files, for whoever follows one through it. How many frames it
takes is measured by `python -m tests.bench.calls`."""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType

import pytest

from engine.demo import MODEL_DIR
from shared.text.tokenizer import TokenizerBundle
from tests.bench.calls import calls_of
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open
from tests.gateway.fake_engine import stream, unary

FILES = 50
"""The most of our files that a request enters: those of which some function is called."""
REQUESTS = 4
LIMITS = {"requests_per_min": 1000, "tokens_per_min": 1_000_000}
OF_TESTS = "shared/wire/completed_line.py"
"""By which the tests check every line that is logged."""


async def ask(house: House, *, streams: bool) -> None:
    house.engine.script = stream() if streams else unary()
    for _ in range(REQUESTS):
        async with house.chat(stream=streams) as answer:
            assert answer.status == 200
            await answer.read()


async def files_of(house: House, *, streams: bool) -> list[str]:
    await ask(house, streams=streams)  # what happens once has happened
    frames = Counter[CodeType]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            frames[frame.f_code] += 1

    sys.setprofile(note)
    try:
        await ask(house, streams=streams)
    finally:
        sys.setprofile(None)
    entered = calls_of(frames, REQUESTS).by_file.keys() - {OF_TESTS}
    return sorted(name for name in entered if not name.startswith("engine/"))


@pytest.mark.parametrize("protocol", ["http2"], indirect=True)
async def test_a_request_enters_few_files(open_house: Open) -> None:
    """What runs in the background sleeps, as the clock stands still."""
    bundle = TokenizerBundle.from_dir(MODEL_DIR)
    house = await open_house(bundle=bundle, clock=VirtualClock(), tenant={"limits": LIMITS})
    for streams in (False, True):
        files = await files_of(house, streams=streams)
        assert len(files) <= FILES, files

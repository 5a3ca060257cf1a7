"""Replay a world: `python -m tests.histories SEED [REQUEST]`.

Prints its setting, the history and the log lines of one request or of all, and the law that is broken, if one
is.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.engine.api.tiny import write_model_dir
from tests.histories.draw import draw_setting
from tests.histories.laws import check
from tests.histories.test_histories import REQUESTS
from tests.histories.world import run_world


def main(seed: int, request_id: str | None) -> None:
    setting = draw_setting(seed, REQUESTS)
    print(replace(setting, histories=()))  # noqa: T201 -- a command
    with tempfile.TemporaryDirectory() as directory:
        remains = run_world(setting, write_model_dir(Path(directory)))
    told: list[tuple[str, object]] = [(history.request_id, history) for history in setting.histories]
    told += [(line["request_id"], line) for line in (*remains.gateway_lines, *remains.engine_lines)]
    for name, one in told:
        if request_id in (None, name):
            print(one)  # noqa: T201
    for name, count in sorted(check(remains).items()):
        print(count, name)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)

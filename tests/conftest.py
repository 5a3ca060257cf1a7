"""What holds for every test."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import trustme
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# Where Python is told to keep no bytecode, each of the hundred processes that tests start compiles all that
# it imports: 3.2 s of CPU for torch instead of 1.4. So it is kept, though not beside the sources.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".pytest_cache" / "bytecode")

from tests import effort, outcomes, tracing  # noqa: E402

TRACING = tracing.Tracing() if tracing.VARIABLE in os.environ else None

# These import the product, which is to be traced.
from gateway.relay import checked_bundles  # noqa: E402
from gateway.relay.tokenizer_child import checked  # noqa: E402
from tests.line_check import SUITES  # noqa: E402
from tests.ship import tools  # noqa: E402

gc.disable()  # until all is collected: a tenth of what that takes

# Triton chooses between its interpreter and a GPU when it is imported, and torch may import it at any time.
os.environ["TRITON_INTERPRET"] = "1"

# Every client and every gateway reads whom its machine trusts: 40 ms of CPU each time, and more than half of
# what the gateway's tests took. Here the machine trusts one authority, of which nobody has a certificate.
_trusted = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 -- for as long as the process lives
_trusted.write(trustme.CA().cert_pem.bytes())
_trusted.flush()
atexit.register(_trusted.close)
os.environ["SSL_CERT_FILE"] = _trusted.name

# transformers loads each tensor on a thread, which for those of a toy model takes longer than the copying.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

settings.register_profile("penstock", deadline=None, print_blob=True)  # a busy machine is slow, not wrong
settings.load_profile("penstock")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    outcomes.install(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcomes.judge_skip(report)
    return report


def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than there are cores: a third of the suite's time is waiting for services that
    start, stop and die."""
    return (os.cpu_count() or 1) + 2


SLOW_FOLDERS = ("tests/neighbours/", "tests/engine/runtime/device/")
"""Their tests need services, or kernels in Triton's interpreter, which take seconds to be there."""
FIRST = ("tests/test_style.py", "tests/engine/runtime/kernels/test_compiled.py", "tests/neighbours/")
"""Files with one test that takes half a minute: at the end of a run the other cores would wait for it. And
tests that share two services: at the end each process would start its own for its part of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Begin with another part of the files in each process of a whole run. All import all files, and where
    none has been compiled yet, each finds what the others have compiled meanwhile."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    first, step = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    for path in paths[len(paths) * first // step : len(paths) * (first + 1) // step]:
        with contextlib.suppress(Exception):  # collecting it says what is wrong
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `.ci/nightly` what is marked so, and begin with what takes longest."""
    for item in items:
        if item.nodeid.startswith(SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if not effort.IS_WHOLE:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Exempt the millions of objects that importing and collecting made from garbage collection: each full
    collection would look at all of them, which took half of the time of tests that ask for one. Others come
    less often than is usual: a fifteenth of what tests take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    tools.asked_by = None if item.get_closest_marker("network") else item.nodeid
    if TRACING:
        TRACING.follow(item.path)


def pytest_unconfigure() -> None:
    if TRACING:
        TRACING.end()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes in one thread, whatever the test before loaded: several that wait for each other spin,
    and other tests want the cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def tokenizers_checked_here() -> Iterator[None]:
    """Gateways in the tests' own process check tokenizers there: another process takes half a second to
    start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_bundles, "check", check_here)
        yield


def check_here(file: BinaryIO) -> tuple[str, checked_bundles.CheckedBundle | str]:
    """The result of `checked_bundles.check`, without a process."""
    file.seek(0)
    return checked_bundles.outcome(*checked(file.read()))


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name of a Unix socket may have 107 bytes."""
    return tmp_path_factory.mktemp("s")


SUITES.install()


@pytest.fixture(autouse=True)
def completed_lines_keep_to_their_schema() -> Iterator[None]:
    """Whatever a test is about: no service writes a completed line that its schema does not describe."""
    yield
    problems = SUITES.take()
    assert not problems, "\n".join(problems)

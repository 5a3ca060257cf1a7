"""What the images' descriptions promise, read from the files. `tests/ship/run.sh` builds and runs them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runtime.device.shipping import MAKES
from engine.runtime.kernels.shipped import SHIPPED, ShippedCache
from tests.test_layering import imports

ROOT = Path(__file__).parent.parent.parent
FILES = {name: (ROOT / name / "Dockerfile").read_text() for name in ("gateway", "engine")}
USER = "10001:10001"


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with the rest of its logical line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    logical = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in logical]


def last_stage(text: str) -> list[tuple[str, str]]:
    found = instructions(text)
    return found[max(number for number, (word, _) in enumerate(found) if word == "FROM") :]


@pytest.mark.parametrize("name", FILES)
def test_what_runs_is_no_root_and_has_a_health_check(name: str) -> None:
    stage = dict(last_stage(FILES[name]))
    assert stage["USER"] == USER
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["HEALTHCHECK"].endswith('CMD ["python", "-m", "shared.process.probe"]')
    command = json.loads(stage["ENTRYPOINT"])
    assert command[:3] == ["python", "-m", name], "the service is the first process: it gets the signals"
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", stage["LABEL"])
    assert labels == ["title", "description", "version", "revision"]


@pytest.mark.parametrize("name", FILES)
def test_packages_are_held_to_their_hashes(name: str) -> None:
    installs = re.findall(r"pip (install|wheel) (.*?)(?:&&|\n|$)", FILES[name])
    assert installs
    for _, options in installs:
        assert "--require-hashes" in options or "--no-deps" in options


@pytest.mark.parametrize("name", FILES)
def test_what_runs_has_no_compiler_and_no_installer(name: str) -> None:
    """But for Triton's, which has to compile where there is a GPU."""
    runs = [rest for word, rest in last_stage(FILES[name]) if word == "RUN"]
    assert not [rest for rest in runs if "pip install" in rest]
    installing = [rest for rest in runs if "apt-get" in rest]
    assert len(installing) == (name == "engine")
    assert all(rest.startswith('test "${VARIANT}" = cpu || ') for rest in installing)


def test_what_triton_compiles_at_a_first_start_is_tried_when_the_image_is_built() -> None:
    """It needs Python's headers, which are the base's: without them every start on a GPU would fail."""
    runs = [rest for word, rest in last_stage(FILES["engine"]) if word == "RUN"]
    [trying] = [rest for rest in runs if "-fsyntax-only" in rest]
    assert trying.startswith('test "${VARIANT}" = cpu || ')
    assert trying.endswith(" driver.c; }")


def test_only_torch_for_cpus_is_looked_for_beyond_pypi() -> None:
    [install] = [rest for word, rest in instructions(FILES["engine"]) if "-r requirements.txt" in rest]
    assert '{ test "${VARIANT}" = cpu || unset PIP_EXTRA_INDEX_URL; }  && /opt' in install
    before = FILES["engine"].partition("ARG PIP_EXTRA_INDEX_URL")[0]
    assert "pip install -q --require-hashes -r requirements-build.txt" in before


def test_kernels_of_every_instruction_set_are_shipped() -> None:
    """Whatever their number is: what was built is what is installed, and a failure to build ends it."""
    runs = [rest for word, rest in instructions(FILES["engine"]) if word == "RUN"]
    assert "python3 engine/runtime/native/build.py" in runs
    [comparing] = [rest for rest in runs if "site-packages/engine/runtime/native/lib" in rest]
    assert 'test "$(ls engine/runtime/native/lib)" = ' in comparing


def _copied_before(text: str, command: str) -> set[str]:
    """What a Dockerfile has copied of the context when it runs a command: an edit of that makes the layer
    anew, and all behind it."""
    found: set[str] = set()
    for word, rest in instructions(text):
        if word == "RUN" and command in rest:
            return found
        if word == "COPY" and "--from" not in rest:
            found.update(rest.split()[:-1])
    raise AssertionError(f"no layer runs {command}")


def _needed(module: str) -> Iterator[Path]:
    """The project's files that a module imports, and those that these import."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or name.split(".")[0] not in ("engine", "shared", "gateway") or not file.is_file():
            continue
        seen.add(name)
        yield file.relative_to(ROOT)
        waiting += [*imports(file), name.rpartition(".")[0]]


def test_an_edit_elsewhere_compiles_no_kernel_again() -> None:
    """The layers of the kernels are made of what they are compiled from, and of what compiles them."""
    requirements = {"shared/requirements-build.txt", "engine/requirements-${VARIANT}.txt"}
    own = {"engine/runtime/native"}
    assert _copied_before(FILES["engine"], "engine/runtime/native/build.py") == requirements | own
    builder = imports(ROOT / "engine/runtime/native/build.py")
    assert {name.split(".")[0] for name in builder} <= sys.stdlib_module_names
    for_cards = {"engine/__init__.py", "engine/contract", "engine/runtime", "shared"}
    shipping = "engine.runtime.device.shipping"
    assert _copied_before(FILES["engine"], shipping) == requirements | own | for_cards
    for file in _needed(shipping):
        assert {str(file), *map(str, file.parents)} & for_cards, file


def test_an_edit_of_one_service_makes_no_layer_of_the_other_anew() -> None:
    for name, other in (("gateway", "engine"), ("engine", "gateway")):
        copied = _copied_before(FILES[name], "shared.process.sbom")
        assert not [source for source in copied if source.split("/")[0] == other], name


def test_the_context_is_what_the_images_copy_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for text in FILES.values():
        for word, rest in instructions(text):
            if word == "COPY" and "--from" not in rest:
                for source in rest.split()[:-1]:
                    top = source.split("/")[0]
                    assert top in allowed, source
    assert lines[1] == "*"


def test_the_version_is_the_projects() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for text in FILES.values():
        assert f"ARG VERSION={version[1]}\n" in text


def test_shipped_kernels_lie_where_they_are_looked_for() -> None:
    """Not where a volume would hide them."""
    text = FILES["engine"]
    [folder] = re.findall(r"engine\.runtime\.device\.shipping (\S+)", text)
    prefix = re.findall(r"python3 -m venv (/opt/\S+)", text)[-1]
    assert folder == f"{prefix}/{SHIPPED.relative_to(sys.prefix)}"
    assert f"TRITON_CACHE_MANAGER={ShippedCache.__module__}:{ShippedCache.__name__} " in text
    [cards] = re.findall(r"ARG CARDS=(\S+)", text)
    assert set(cards.split(",")) == set(MAKES)

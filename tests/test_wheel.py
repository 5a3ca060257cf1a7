"""The wheel: the product and the demo model's files, without what trains it and without tests, for anybody
who installs it by its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from shared.process.build import DISTRIBUTION
from tests.test_layering import SOURCES, imports

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("gateway", "engine", "shared")
STRANGERS = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx)\b[^&|;\n]*[ '\"]penstock(?!-llm\b)(?=[\s'\"\[=<>~]|$)"
    r"|\bpenstock\["
    r"|(?:version|distribution|metadata|files|requires)\([\"']penstock[\"']\)",
    re.MULTILINE,
)
"""What installs, or looks up, the distribution of another project."""
TOLD = {".py", ".md", ".toml", ".yaml", ".tpl", ".sh", ".txt", ".js", ".html", ""}
OF_THE_GATEWAY = {"gateway/hatch_hook.py", "gateway/pyproject.toml"}
"""What makes the distribution of a gateway alone."""
DEMO_FILES = {
    "engine/demo/__init__.py",
    "engine/demo/model/config.json",
    "engine/demo/model/generation_config.json",
    "engine/demo/model/model.safetensors",
    "engine/demo/model/tokenizer.json",
    "engine/demo/model/tokenizer_config.json",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as hatchling builds it of this checkout; kernels that are there are not compiled again."""
    return _built(tmp_path_factory.mktemp("wheel"), ROOT, "--wheel")


def _built(directory: Path, source: Path, kind: str) -> Path:
    """The one file that a build of `source` makes."""
    index = ("--default-index", "https://pypi.org/simple")
    _uv("build", kind, "--out-dir", str(directory), *index, str(source))
    [file] = [path for path in directory.iterdir() if path.suffix in (".whl", ".gz")]
    return file


def _tracked(*packages: str) -> set[str]:
    """All that git knows below packages, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *packages]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def _uv(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    command = [sys.executable, "-m", "uv", *arguments, "--no-config", "--system-certs", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_has_the_product_and_nothing_else(wheel: Path) -> None:
    """All that git knows below the three packages, whatever .gitignore leaves out, and the native kernels."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {name for name in names if not name.startswith("penstock_llm-")}
    kernels = {name for name in files if name.startswith("engine/runtime/native/lib/")}
    assert kernels
    tracked = _tracked(*PACKAGES) - OF_THE_GATEWAY
    assert files - kernels == {name for name in tracked if not name.startswith("engine/demo/train/")}
    assert {name for name in files if name.startswith("engine/demo/")} == DEMO_FILES


@pytest.mark.slow
@pytest.mark.network
def test_a_gateway_is_installed_without_the_engine_its_kernels_and_the_demo_model(tmp_path: Path) -> None:
    wheel = _built(tmp_path, ROOT / "gateway", "--wheel")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        told = archive.read(metadata).decode()
    assert names == _tracked("gateway", "shared") - OF_THE_GATEWAY - {"gateway/Dockerfile"}
    asked = {
        re.split(r"[<>=;\[ ]", one)[0] for one in re.findall(r"^Requires-Dist: (.+)$", told, re.MULTILINE)
    }
    own = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"]["gateway"]]
    assert {re.split(r"[<>=;\[ ]", one)[0] for one in own} <= asked
    assert "torch" not in asked
    assert f"\nVersion: {PYPROJECT['project']['version']}\n" in told


@pytest.mark.slow
@pytest.mark.network
def test_the_source_has_what_a_wheel_is_made_of(tmp_path: Path) -> None:
    with tarfile.open(_built(tmp_path, ROOT, "--sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _tracked(*PACKAGES) - OF_THE_GATEWAY <= names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_is_installed_and_runs(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, beside what it requires."""
    _uv("venv", "--python", sys.executable, str(tmp_path / "own"))
    python = tmp_path / "own" / "bin" / "python"
    _uv("pip", "install", "--no-deps", "--python", str(python), str(wheel))
    [site] = (tmp_path / "own" / "lib").glob("python3*/site-packages")
    (site / "required.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    installed = "import gateway, engine.demo, shared.cli; print(engine.demo.__file__)"
    for command in (
        [str(python), "-P", "-c", installed],
        *([str(python.with_name("penstock")), "settings", service] for service in ("gateway", "engine")),
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert str(site) in done.stdout or "PENSTOCK_" in done.stdout


def test_nothing_in_the_wheel_imports_tests() -> None:
    for path in SOURCES:
        assert not [name for name in imports(path) if name.split(".")[0] == "tests"], path


def test_its_name_is_ours_wherever_people_are_told_to_install_it() -> None:
    assert PYPROJECT["project"]["name"] == DISTRIBUTION
    wrong = "pip install penstock", "pip install -U 'penstock>=0.1'", '"penstock[all]"', 'version("penstock")'
    for told in wrong:
        assert STRANGERS.search(told)
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for name in ("gateway", "engine", "shared", "helm", "tests"):
        files += [path for path in (ROOT / name).rglob("*") if path.suffix in TOLD and path.is_file()]
    assert len(files) > 500
    for path in files:
        lines = path.read_bytes().splitlines() if path != Path(__file__) else ()
        found = [line for line in lines if b"penstock" in line and STRANGERS.search(line.decode())]
        assert not found, path

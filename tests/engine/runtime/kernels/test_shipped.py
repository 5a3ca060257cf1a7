"""Triton's cache with a shipped one behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runtime.kernels import shipped
from engine.runtime.kernels.shipped import ShippedCache

KEY, GROUP = "A" * 52, "k.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One shipped kernel, compiled elsewhere."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    folder = tmp_path / "shipped" / KEY
    folder.mkdir(parents=True)
    names = (GROUP, "k.cubin")
    for name in names:
        (folder / name).write_text("shipped")
    listed = {"child_paths": {name: f"/elsewhere/{KEY}/{name}" for name in names}}
    (folder / f"__grp__{GROUP}").write_text(json.dumps(listed))
    return folder


def test_a_shipped_kernel_is_found_where_it_lies(folder: Path) -> None:
    cache = ShippedCache(KEY)
    assert cache.get_group(GROUP) == {name: str(folder / name) for name in (GROUP, "k.cubin")}
    assert cache.get_file("k.cubin") == str(folder / "k.cubin")
    assert ShippedCache("B" * 52).get_group(GROUP) is None
    assert cache.get_file("other.cubin") is None


def test_what_was_compiled_here_comes_first(folder: Path) -> None:
    cache = ShippedCache(KEY)
    path = cache.put(b"own", "k.cubin")
    cache.put_group(GROUP, {"k.cubin": path})
    assert cache.get_group(GROUP) == {"k.cubin": path}
    assert cache.get_file("k.cubin") == path
    assert (folder / "k.cubin").read_text() == "shipped"


@pytest.mark.parametrize("listed", ["", "{", "[]", '{"child_paths": [1]}', '{"child_paths": null}'])
def test_a_list_that_cannot_be_read_is_no_kernel(listed: str, folder: Path) -> None:
    (folder / f"__grp__{GROUP}").write_text(listed)
    assert ShippedCache(KEY).get_group(GROUP) is None


def test_a_kernel_with_a_missing_file_is_no_kernel(folder: Path) -> None:
    (folder / "k.cubin").unlink()
    assert ShippedCache(KEY).get_group(GROUP) is None

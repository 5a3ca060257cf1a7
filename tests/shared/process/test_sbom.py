"""The list of an image's packages."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from shared.process import sbom
from shared.process.build import DISTRIBUTION


def test_every_package_is_listed_once_with_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert sbom.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    own = document["metadata"]["component"]
    assert (own["type"], own["name"]) == ("application", DISTRIBUTION)
    found = {one["name"]: one for one in document["components"]}
    assert len(found) == len(document["components"])
    version = importlib.metadata.version("prometheus_client")
    assert found["prometheus-client"]["purl"] == f"pkg:pypi/prometheus-client@{version}"
    assert found["msgspec"]["licenses"]
    assert DISTRIBUTION not in found

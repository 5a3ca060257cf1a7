"""Renders the chart as a cluster of a version would get it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from helm.make.values_schema import CHART
from tests.ship import tools

Manifest = dict[str, Any]

PRESETS: Final = tuple(sorted(path.stem for path in (CHART / "presets").glob("*.yaml")))
VERSIONS: Final = tuple(f"1.{minor}" for minor in range(29, 36))
NEWEST: Final = VERSIONS[-1]
IMAGE_VOLUMES_SINCE: Final = "1.33"
"""The preset with a model in an image volume renders from here on."""
RELEASE: Final = "r"
NAMESPACE: Final = "serving"
OPERATOR: Final = "monitoring.coreos.com/v1/ServiceMonitor"
TIMEOUT_S: Final = 120


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """helm's answer."""
    command = [str(tools.helm()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def preset_file(preset: str) -> Path:
    """The values of a preset."""
    return CHART / "presets" / f"{preset}.yaml"


def template(preset: str, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """helm's answer to `helm template`. An empty preset stands for the chart's own values."""
    values = ("--values", str(preset_file(preset))) if preset else ()
    cluster = ("--namespace", NAMESPACE, "--kube-version", f"{version}.0", "--api-versions", OPERATOR)
    return helm("template", RELEASE, str(CHART), *cluster, *values, *arguments)


@cache
def render(preset: str, version: str = NEWEST, *arguments: str) -> tuple[Manifest, ...]:
    """The manifests."""
    done = template(preset, version, *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(manifests(done.stdout))


def manifests(text: str) -> Iterator[Manifest]:
    """The manifests in a text. A key that is there twice is an error."""
    for document in yaml.load_all(text, Loader=_Strict):
        if document is not None:
            yield document


class _Strict(yaml.CSafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML as Kubernetes reads it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is there twice: {keys}"
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def versions_of(preset: str) -> tuple[str, ...]:
    """The versions that a preset is for."""
    needs_images = "image:\n        reference" in preset_file(preset).read_text() if preset else False
    return VERSIONS[VERSIONS.index(IMAGE_VOLUMES_SINCE) :] if needs_images else VERSIONS


def of_kind(found: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [manifest for manifest in found if manifest["kind"] in kinds]


def pod_templates(found: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Every pod's template, with a name for messages."""
    for manifest in found:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        match manifest["kind"]:
            case "Deployment" | "StatefulSet" | "Job":
                yield name, manifest["spec"]["template"]
            case "LeaderWorkerSet":
                inner = manifest["spec"]["leaderWorkerTemplate"]
                yield f"{name} leader", inner["leaderTemplate"]
                yield f"{name} worker", inner["workerTemplate"]


def claim_templates(found: tuple[Manifest, ...], name: str) -> list[Manifest]:
    """The claims that each replica of a workload has, by the name that `pod_templates` tells."""
    kind, _, workload = name.partition("/")
    [manifest] = [one for one in of_kind(found, kind) if one["metadata"]["name"] == workload.split()[0]]
    claims: list[Manifest] = manifest["spec"].get("volumeClaimTemplates", [])
    return claims


def containers(pod: Manifest) -> list[Manifest]:
    """All containers of a pod's template."""
    spec = pod["spec"]
    return [*spec["containers"], *spec.get("initContainers", [])]

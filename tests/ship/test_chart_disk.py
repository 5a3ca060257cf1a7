"""The disk of an engine's prefix cache: a volume that the engine can use, that holds what it may write, and
that ends with what it belongs to."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from tests.ship.rendering import PRESETS, Manifest, claim_templates, of_kind, pod_templates, render
from tests.ship.test_chart_parts import engine_configs

pytestmark = pytest.mark.network

GIB = 1 << 30
EMPTY_DIR, CLAIM = ("one-gpu", "r-penstock-qwen3-8b"), ("many-models", "r-penstock-code")


def workload(preset: str, name: str) -> Manifest:
    [found] = [one for one in of_kind(render(preset), "StatefulSet") if one["metadata"]["name"] == name]
    return found


def volume_gib(found: Manifest) -> int:
    """The size of a workload's volume for keys and values, which is of one kind or the other."""
    volumes = [one["emptyDir"]["sizeLimit"] for one in pod(found)["volumes"] if one["name"] == "kv"]
    claims = [
        one["spec"]["resources"]["requests"]["storage"]
        for one in found["spec"].get("volumeClaimTemplates", [])
    ]
    [size] = volumes + claims
    return int(size.removesuffix("Gi"))


def pod(found: Manifest) -> Manifest:
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(("preset", "name"), [EMPTY_DIR, CLAIM])
def test_an_engine_writes_less_than_its_volume_holds(preset: str, name: str, tmp_path: Path) -> None:
    """A pod whose emptyDir is over its size is evicted, and a file system needs room of its own."""
    found = workload(preset, name)
    config = engine_configs(render(preset), tmp_path)[name]
    assert 0.85 <= config.kv_disk_bytes / (volume_gib(found) * GIB) <= 0.9


@pytest.mark.parametrize(("preset", "name"), [EMPTY_DIR, CLAIM])
def test_the_directory_is_the_engines_own(preset: str, name: str, tmp_path: Path) -> None:
    """It lies within the volume, whose own directory belongs to root: the engine may not close that."""
    config = engine_configs(render(preset), tmp_path)[name]
    [mount] = [
        one for one in pod(workload(preset, name))["containers"][0]["volumeMounts"] if one["name"] == "kv"
    ]
    assert config.kv_disk_dir is not None
    assert PurePosixPath(mount["mountPath"]) in PurePosixPath(config.kv_disk_dir).parents
    assert "readOnly" not in mount
    assert pod(workload(preset, name))["securityContext"]["fsGroup"] == 10001


def test_a_node_is_asked_for_the_room() -> None:
    [container] = pod(workload(*EMPTY_DIR))["containers"]
    assert container["resources"]["requests"]["ephemeral-storage"] == "64Gi"
    given = "models[0].resources.requests.ephemeral-storage=9Gi"
    [found] = of_kind(render("one-gpu", "1.35", "--set", given), "StatefulSet")
    assert pod(found)["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "9Gi"


def test_a_claim_ends_with_its_replica() -> None:
    """What users wrote can be learned from it, and nothing else ever reads it."""
    spec = workload(*CLAIM)["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["spec"]["storageClassName"] == "local-nvme"


def test_an_upgrade_may_change_everything_but_a_claim() -> None:
    """Kubernetes refuses a StatefulSet whose claims change: nothing in them is of a release."""
    spec = workload(*CLAIM)["spec"]
    [claim] = spec["volumeClaimTemplates"]
    assert claim["metadata"]["labels"] == spec["selector"]["matchLabels"]
    more = ("--set", "commonLabels.team=a,commonAnnotations.team=a,engine.podLabels.of=a")
    after = render("many-models", "1.35", *more)
    assert claim_templates(after, "StatefulSet/r-penstock-code") == [claim]


def test_without_a_storage_class_it_is_the_clusters() -> None:
    found = render("", "1.35", "--set", "engine.kvDisk.volume=claim")
    [claim] = claim_templates(found, "StatefulSet/r-penstock-demo")
    assert "storageClassName" not in claim["spec"]


def test_nobody_has_a_disk_who_did_not_ask(tmp_path: Path) -> None:
    asked = {EMPTY_DIR[1], CLAIM[1]}
    for preset in ("", *PRESETS):
        for name, template in pod_templates(render(preset)):
            has = any(
                mount["name"] == "kv"
                for container in template["spec"]["containers"]
                for mount in container.get("volumeMounts", [])
            )
            assert has == (name.partition("/")[2] in asked)
        for name, config in engine_configs(render(preset), tmp_path).items():
            assert (config.kv_disk_dir is not None) == (name in asked)

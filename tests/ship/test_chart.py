"""The Helm chart as helm and Kubernetes see it: lint, every preset in every version, the files that are kept,
the policy, and what is refused."""

from __future__ import annotations

from copy import deepcopy

import pytest

from helm.make.values_schema import CHART
from tests.effort import drawn
from tests.ship import golden, judging, policy
from tests.ship.rendering import (
    NEWEST,
    PRESETS,
    VERSIONS,
    containers,
    helm,
    of_kind,
    pod_templates,
    preset_file,
    render,
    template,
    versions_of,
)

pytestmark = pytest.mark.network

ALL = ("", *PRESETS)


def test_there_is_a_preset_for_each_way_to_serve() -> None:
    assert PRESETS == ("laptop", "many-models", "multi-node", "one-gpu", "tensor-parallel")


@pytest.mark.parametrize("preset", ALL)
def test_lint_finds_nothing(preset: str) -> None:
    values = ("--values", str(preset_file(preset))) if preset else ()
    done = helm("lint", "--strict", str(CHART), "--kube-version", f"{NEWEST}.0", *values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS[:: drawn(3, whole=1)])
def test_every_manifest_is_one_of_kubernetes(version: str) -> None:
    for preset in ALL:
        if version in versions_of(preset):
            found = render(preset, version)
            assert [one for manifest in found for one in judging.problems(manifest, version)] == []


def test_a_wrong_manifest_is_noticed() -> None:
    [deployment] = of_kind(deepcopy(render("laptop")), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["port"] = []
    assert "'port' was unexpected" in judging.problems(deployment, NEWEST)[0]
    [monitor, _] = of_kind(deepcopy(render("laptop")), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "1s"
    assert "'intervall' was unexpected" in judging.problems(monitor, NEWEST)[0]
    [group] = of_kind(deepcopy(render("multi-node")), "LeaderWorkerSet")
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["image"] = "x"
    assert "'image' was unexpected" in judging.problems(group, NEWEST)[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_renders_as_it_is_kept(preset: str) -> None:
    kept = golden.file_of(preset).read_text()
    assert golden.rendered(preset) == kept, "python -m tests.ship.golden, and look at what has changed"


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misspelt",
    [
        "gateway.replica=3",
        "gatewai.replicas=3",
        "gateway.settings.limits.live_mx=3",
        "gateway.settings.admin.port=1",
        "engine.settings.max_num_seq=3",
        "engine.settings.port=3",
        "models[0].name=a,models[0].settings.max_num_seq=3",
        "models[0].name=a,models[0].sauce.demo=true",
        "models[0].name=a,models[0].gateway.aliasses={b}",
        "engine.tolerations[0].kee=gpu",
        "redis.existingSecre=x",
        "hop.mode=tls",
        "networkPolicy.enable=false",
        "models[0].name=Upper",
        "models[0].name=a,models[0].source.hub.repo=a/b,models[0].source.hub.revision=main",
        "models[0].name=a,models[0].source.demo=true,models[0].source.claim.name=x",
        "gateway.replicas=0",
        "engine.gpus=-1",
        "engine.kvDisk.size=64Gi",
        "engine.kvDisk.volume=hostPath",
        "engine.kvDisk.sizeGiB=0",
        "engine.settings.kv_disk_dir=/tmp/x",
        "redis.url=redis:6379",
        "gateway.settings.redis.url=redis://redis:6379",
        "gateway.settings.quotas.timeout_s=1",
    ],
)
def test_a_misspelt_or_wrong_value_is_refused(misspelt: str) -> None:
    done = template("", NEWEST, "--set", misspelt)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("gateway.pdb.maxUnavailable=0", "gateway.pdb.maxUnavailable of 0 would block every eviction"),
        ("engine.pdb.maxUnavailable=0", "models[demo]: pdb.maxUnavailable of 0 would block every eviction"),
        ("engine.nodes=2", "models[demo]: nodes of 2 need workload: LeaderWorkerSet"),
        ("models[0].name=a,models[1].name=a", 'models: "a" is there twice'),
        ("engine.autoscaling.mode=hpa,engine.autoscaling.minReplicas=9", "autoscaling.minReplicas is above"),
        ("engine.inferencePool.enabled=true", "inferencePool needs picker"),
        ("gateway.settings.tenants[0].id=a,gateway.settings.tenants[0].limits.concurrent=9", "redis.url"),
        (
            "engine.discovery=watch,hop.mode=certManager",
            "models[demo]: discovery: watch finds addresses, for which the hop's certificates are not",
        ),
        ("engine.discovery=dns,engine.workload=LeaderWorkerSet", "discovery: dns needs a StatefulSet"),
        ("hop.mode=secrets", "hop.mode secrets needs hop.gatewaySecret"),
        ("gateway.tls.mode=secret", "gateway.tls.mode secret needs gateway.tls.secret"),
        ("gateway.tls.mode=certManager", "gateway.tls.mode certManager needs gateway.tls.dnsNames"),
        ("gateway.httpRoute.enabled=true", "gateway.httpRoute needs parentRefs"),
        ("engine.kvDisk.volume=emptyDir,engine.gpus=2", "models[demo]: kvDisk needs a model on one GPU"),
        (
            "engine.kvDisk.volume=emptyDir,engine.settings.swap_memory=0MiB",
            "models[demo]: kvDisk needs the tiers above it: prefix_cache and swap_memory",
        ),
        ("engine.kvDisk.volume=claim,engine.settings.prefix_cache=false", "kvDisk needs the tiers above it"),
        ("engine.kvDisk.volume=claim,engine.workload=LeaderWorkerSet", "claim needs workload: StatefulSet"),
        (
            "models[0].name=a,models[0].kvDisk.volume=claim,models[0].source.hub.cache.size=8Gi,"
            f"models[0].source.hub.repo=a/b,models[0].source.hub.revision={'0' * 40}",
            "models[a]: kvDisk.volume: claim needs source.hub.cache.claim",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: str, says: str) -> None:
    done = template("", NEWEST, "--set", values)
    assert done.returncode != 0
    assert says in done.stderr


def test_an_image_volume_is_refused_where_kubernetes_has_none() -> None:
    done = template("many-models", "1.32")
    assert "source.image needs Kubernetes 1.33 or newer" in done.stderr


# -- policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ALL)
def test_the_policy_is_kept(preset: str) -> None:
    assert list(policy.broken(render(preset))) == []
    assert len(policy.EXCEPTIONS) <= 3


def test_a_breach_of_the_policy_is_noticed() -> None:
    found = deepcopy(render("laptop"))
    for _, pod in pod_templates(found):
        del pod["spec"]["automountServiceAccountToken"]
        for container in containers(pod):
            container["securityContext"]["readOnlyRootFilesystem"] = False
            container.pop("livenessProbe", None)
    breaches = "\n".join(policy.broken(found))
    assert "StatefulSet/r-penstock-demo: no token of the API" in breaches
    assert "StatefulSet/r-penstock-demo, engine: read-only root" in breaches
    assert "StatefulSet/r-penstock-demo, engine: probes" in breaches


@pytest.mark.parametrize("preset", ALL)
def test_no_secret_is_made_but_for_the_keys_of_a_first_try(preset: str) -> None:
    made = [secret["metadata"]["name"] for secret in of_kind(render(preset), "Secret")]
    assert made == (["r-penstock-keys"] if preset in ("", "laptop") else [])

"""Holds the chart against real API servers: `python -m tests.ship.kube DIR`, after `tests/ship/kube.sh`.

DIR/kubeconfig leads to kube-apiserver and kube-controller-manager 1.20, the newest that Debian has the
sources of; DIR/crd.kubeconfig to a server of custom resources of 1.36. 1.20 does not know
PodDisruptionBudget and HorizontalPodAutoscaler in the versions of today: those are left out here, and
are held against Kubernetes' own schemas by the tests. But for `served`, nothing runs pods:
`tests.ship.stand_in` says that they run.

    dry run    the server would take every manifest of every preset that it knows
    install    helm installs, upgrades, rolls back and removes every preset, and leaves nothing
    custom     custom resources fit their definitions, with their rules in CEL and strict fields
    watch      the gateway's account follows the endpoints of a Service, and may do nothing else
    rollout    a new version replaces engines one by one under the names they had, and never lacks a gateway
    served     by `--only served` alone, with images that `tests/ship/run.sh` built: pods run, a first token
               comes, and an upgrade and a rollback under load lose no stream
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from helm.make.values_schema import CHART
from tests.ship import tools
from tests.ship.kube_served import serve, tagged
from tests.ship.kube_watch import DEFINITION, Server, refused, watched
from tests.ship.rendering import NAMESPACE, PRESETS, Manifest, manifests, of_kind, preset_file, render
from tests.ship.stand_in import StandIn

OLDEST: Final = "1.29"
UNKNOWN: Final = ("PodDisruptionBudget", "HorizontalPodAutoscaler")
"""Kinds that 1.20 has in older versions only."""
WITHOUT: Final = "gateway.pdb.enabled=false,engine.pdb.enabled=false,gateway.autoscaling.enabled=false"
TIMEOUT_S: Final = 1200
CUSTOM_PLURALS: Final = {
    "ServiceMonitor": "servicemonitors",
    "PrometheusRule": "prometheusrules",
    "ScaledObject": "scaledobjects",
    "Issuer": "issuers",
    "Certificate": "certificates",
    "HTTPRoute": "httproutes",
    "InferencePool": "inferencepools",
    "LeaderWorkerSet": "leaderworkersets",
}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Cluster:
    """The servers at a directory."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "kubeconfig"
        self.custom_config = directory / "crd.kubeconfig"

    def kubectl(self, *arguments: str, stdin: str = "", may_fail: bool = False) -> str:
        """kubectl's output."""
        return _run([str(tools.kubectl()), f"--kubeconfig={self.config}", *arguments], stdin, may_fail)

    def helm(self, *arguments: str) -> str:
        """helm's output."""
        return _run([str(tools.helm()), f"--kubeconfig={self.config}", *arguments], "", False)

    def get(self, namespace: str, what: str) -> list[Manifest]:
        """The objects of a kind."""
        found: list[Manifest] = json.loads(self.kubectl("-n", namespace, "get", what, "-o", "json"))["items"]
        return found


def _run(command: Sequence[str], stdin: str, may_fail: bool) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0 and not may_fail:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}{done.stdout}")
    return done.stdout + (done.stderr if may_fail else "")


@contextmanager
def namespace(cluster: Cluster, name: str) -> Iterator[str]:
    """A namespace for a while."""
    cluster.kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def dry_run(cluster: Cluster) -> None:
    """The server would take every manifest that it knows, and refuses one that schemas pass."""
    with namespace(cluster, NAMESPACE):
        for preset in PRESETS:
            version = "1.33" if preset == "many-models" else OLDEST
            foreign = (*UNKNOWN, *CUSTOM_PLURALS)
            known = [_as_1_20(m) for m in render(preset, version) if m["kind"] not in foreign]
            text = yaml.safe_dump_all(known)
            cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
            say(f"dry run: {preset}, {len(known)} manifests taken by the server")
        [wrong] = of_kind(tuple(known), "Deployment")
        wrong["spec"]["selector"]["matchLabels"]["other"] = "label"
        refused = cluster.kubectl(
            "apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(wrong), may_fail=True
        )
        assert "`selector` does not match template `labels`" in refused, refused
        say("dry run: a selector that fits no pod is refused")


def _as_1_20(manifest: Manifest) -> Manifest:
    """The manifest with what came after 1.20 as it would be before: the wait is a command, and a model comes
    from an empty volume."""
    text = json.dumps(manifest)
    changed: Manifest = json.loads(text)
    template = changed["spec"].get("template", {}) if "spec" in changed else {}
    changed.get("spec", {}).pop("persistentVolumeClaimRetentionPolicy", None)
    for container in template.get("spec", {}).get("containers", []):
        if "sleep" in container.get("lifecycle", {}).get("preStop", {}):
            container["lifecycle"]["preStop"] = {"exec": {"command": ["sleep", "10"]}}
    for volume in template.get("spec", {}).get("volumes", []):
        if volume.pop("image", None) is not None:
            volume["emptyDir"] = {}
    return changed


@contextmanager
def old_chart() -> Iterator[Path]:
    """The chart without the version that it asks for."""
    with tempfile.TemporaryDirectory() as directory:
        chart = Path(directory) / "penstock"
        shutil.copytree(CHART, chart)
        lines = (chart / "Chart.yaml").read_text().splitlines()
        (chart / "Chart.yaml").write_text("\n".join(line for line in lines if "kubeVersion" not in line))
        # volumes of images are checked by the version, which is 1.20 here
        helpers = chart / "templates/_helpers.tpl"
        helpers.write_text(helpers.read_text().replace('semverCompare "<1.33-0"', 'semverCompare "<1.0-0"'))
        yield chart


def _of_1_20(preset: str) -> list[str]:
    """What to set so that a preset has only kinds that 1.20 knows. It must not be given others' definitions
    either: its Go reads them with a library that crashes."""
    off = [
        "monitoring.serviceMonitor.enabled=never",
        "monitoring.prometheusRule.enabled=never",
        "hop.mode=plain",
        "gateway.tls.mode=inFront",
        "gateway.httpRoute.enabled=false",
    ]
    models = yaml.safe_load(preset_file(preset).read_text())["models"]
    sources: list[str] = []
    for index, model in enumerate(models):
        if not model.get("urls"):
            off += [
                f"models[{index}].{one}" for one in ("autoscaling.mode=none", "inferencePool.enabled=false")
            ]
        if model.get("workload") == "LeaderWorkerSet":
            off += [f"models[{index}].workload=StatefulSet", f"models[{index}].nodes=1"]
        if model.get("kvDisk", {}).get("volume") == "claim":  # whose end 1.20 cannot be told
            off.append(f"models[{index}].kvDisk.volume=emptyDir")
        if "image" in model.get("source", {}):
            sources += ["--set-json", f'models[{index}].source={{"demo":true}}']
    return ["--set", f"{WITHOUT},{','.join(off)}", *sources]


def install(cluster: Cluster) -> None:
    """Install, upgrade, roll back and remove every preset."""
    with old_chart() as chart:
        for preset in PRESETS:
            with namespace(cluster, f"install-{preset}") as where:
                given = ["r", str(chart), "-n", where, "-f", str(preset_file(preset)), *_of_1_20(preset)]
                cluster.helm("install", *given)
                before, keys = _generations(cluster, where), _made_keys(cluster, where)
                cluster.helm("upgrade", *given, "--set", "gateway.settings.tenants[0].id=another")
                assert _generations(cluster, where) == before, "a tenant replaced pods"
                assert _made_keys(cluster, where) == keys, "an upgrade made other keys"
                cluster.helm("rollback", "r", "1", "-n", where)
                cluster.helm("uninstall", "r", "-n", where)
                kinds = "deployments,statefulsets,services,configmaps,networkpolicies,serviceaccounts"
                left = {m["metadata"]["name"] for m in cluster.get(where, kinds)}
                assert left <= {"kube-root-ca.crt", "default"}, left
            say(f"install: {preset}, upgraded, rolled back and removed")


def _made_keys(cluster: Cluster, where: str) -> list[object]:
    """The contents of the Secret that the chart makes, if it does."""
    found = cluster.get(where, "secrets")
    return [one["data"] for one in found if one["metadata"]["name"] == "r-penstock-keys"]


def _generations(cluster: Cluster, where: str) -> dict[str, int]:
    """The number of changes of each workload's template."""
    found = cluster.get(where, "deployments,statefulsets")
    return {one["metadata"]["name"]: one["metadata"]["generation"] for one in found}


def custom(cluster: Cluster, directories: Sequence[Path]) -> None:
    """Custom resources against their definitions."""
    server = yaml.safe_load(cluster.custom_config.read_text())["clusters"][0]["cluster"]["server"]
    definitions = [
        document
        for directory in directories
        for file in sorted(directory.glob("*.yaml"))
        for document in manifests(file.read_text())
        if document.get("kind") == "CustomResourceDefinition"
    ]
    known = {}
    for definition in definitions:
        spec = definition["spec"]
        if spec["names"]["kind"] not in CUSTOM_PLURALS:
            continue
        status, told = _post(server, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        assert status in (201, 409), told
        for version in spec["versions"]:
            known[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = spec["names"]["plural"]
    checked: set[str] = set()
    for preset in PRESETS:
        for manifest in render(preset):
            kind = f"{manifest['apiVersion']} {manifest['kind']}"
            if manifest["kind"] not in CUSTOM_PLURALS:
                continue
            if kind not in known:
                checked.add(f"{kind}: no definition at hand, not checked")
                continue
            path = f"/apis/{manifest['apiVersion']}/namespaces/serving/{known[kind]}"
            status, told = _until_served(server, path, manifest)
            assert status == 201, f"{preset}, {kind}: {status} {told}"
            bad = json.loads(json.dumps(manifest))
            bad["spec"]["misspelt"] = 1
            status, told = _until_served(server, path, bad)
            assert status in (400, 422), f"{kind} with a misspelt field: {status}"
            checked.add(f"{kind}: taken; with a misspelt field refused")
    for line in sorted(checked):
        say(f"custom: {line}")


def _until_served(server: str, path: str, manifest: Manifest) -> tuple[int, str]:
    """The answer to a dry run, asked again while the definition is not served yet."""
    for _ in range(100):
        status, told = _post(server, f"{path}?dryRun=All&fieldValidation=Strict", manifest)
        if status != 404:
            break
    return status, told


def _post(server: str, path: str, manifest: Manifest) -> tuple[int, str]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    head = {"authorization": "Bearer admintoken", "content-type": "application/json"}
    request = urllib.request.Request(server + path, json.dumps(manifest).encode(), head)
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()[:2000]


def rollout(cluster: Cluster) -> None:
    """A new version of everything, while a stand-in says that pods run."""
    sizes = "gateway.replicas=3,engine.replicas=3"
    with old_chart() as chart, namespace(cluster, "rolling") as where, StandIn(cluster.config, where) as pods:
        given = ["r", str(chart), "-n", where, "--set", f"{WITHOUT},{sizes}", "--wait", "--timeout", "240s"]
        cluster.helm("install", *given)
        before = pods.seen()
        say(f"rollout: {len(before)} pods run")
        pods.watch_from_now()
        cluster.helm("upgrade", *given, "--set", "gateway.image.tag=next,engine.image.tag=next")
        after = pods.seen()
        engines = {name for name in before if "-demo-" in name}
        assert engines == {name for name in after if "-demo-" in name}, "engines keep their names"
        assert all(before[name] != after[name] for name in engines), "every engine is a new pod"
        gateways_ready, engines_ready = pods.fewest_ready("gateway"), pods.fewest_ready("engine")
        assert gateways_ready >= 3, "a gateway was missing"
        assert engines_ready >= 2, "more than one engine was missing"
        worst = f"{gateways_ready} gateways of 3, {engines_ready} engines of 3"
        say(f"rollout: every pod replaced; ready at the worst moment {worst}")


def served(cluster: Cluster) -> None:
    """Pods of the images that were built: a first token, and streams through an upgrade and a rollback."""
    tagged(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])
    with old_chart() as chart, namespace(cluster, "served") as where:
        folder = Path(tempfile.mkdtemp(prefix="penstock-served-"))
        serve(cluster.helm, cluster.config, where, folder, chart, WITHOUT, say)
        shutil.rmtree(folder)


def watch(cluster: Cluster) -> None:
    """The gateway's watch of endpoints, with the rights that the chart gives."""
    server = Server.of(cluster.custom_config, cluster.config.parent)
    status, told = server.ask(
        "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", DEFINITION, "admintoken"
    )
    assert status in (201, 409), told
    rights = of_kind(render("many-models", "1.35"), "Role", "RoleBinding", "ServiceAccount")
    with namespace(cluster, NAMESPACE) as where, tempfile.TemporaryDirectory() as folder:
        cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
        token = cluster.kubectl("-n", where, "create", "token", "r-penstock-gateway").strip()
        asyncio.run(watched(server, token, Path(folder), say))
        refused(server, token, say)


def main() -> None:
    """Do everything, or the parts that are named."""
    parts: dict[str, Any] = {"dry-run": dry_run, "install": install, "watch": watch, "rollout": rollout}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--crds", type=Path, action="append", default=[], help="folder with definitions")
    parser.add_argument("--only", choices=[*parts, "custom", "served"], action="append")
    options = parser.parse_args()
    cluster = Cluster(options.directory)
    if options.only and "served" in options.only:
        served(cluster)
    for name, run in parts.items():
        if options.only is None or name in options.only:
            run(cluster)
    if options.only is None or "custom" in options.only:
        custom(cluster, options.crds)


if __name__ == "__main__":
    main()

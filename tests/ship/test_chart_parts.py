"""The parts of the chart fit each other and the services: configuration, names, drains, networks, metrics."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine.api.told.metrics import CoreReading, EngineMetrics
from engine.config import EngineConfig, from_args
from gateway.config.whole import ENV_PREFIX, GatewayConfig
from shared.process import setting_values
from tests.ship import judging
from tests.ship.gateway_memory import container_max, size
from tests.ship.rendering import (
    NAMESPACE,
    NEWEST,
    PRESETS,
    Manifest,
    claim_templates,
    containers,
    of_kind,
    pod_templates,
    render,
)

pytestmark = pytest.mark.network

ALL = ("", *PRESETS)
ADMIN_TLS = ("--set", "gateway.adminTls.secret=admin-tls")
EXISTING = {"penstock-keys", "penstock-redis", "penstock-test-key"}
"""The Secrets that the presets take for granted."""
CLAIMS = {"models", "penstock-models"}


def files(found: tuple[Manifest, ...], name: str) -> Iterator[tuple[Manifest, str]]:
    for manifest in of_kind(found, "ConfigMap"):
        if name in manifest["data"]:
            yield manifest, manifest["data"][name]


def gateway_config(found: tuple[Manifest, ...]) -> GatewayConfig:
    [(_, toml)] = files(found, "gateway.toml")
    return setting_values.load(GatewayConfig, tomllib.loads(toml), {}, ENV_PREFIX)


def engine_configs(found: tuple[Manifest, ...], directory: Path) -> dict[str, EngineConfig]:
    """The settings of each engine, by the name of its workload, as its own command line reads them."""
    configs = {}
    for manifest, toml in files(found, "engine.toml"):
        file = directory / "engine.toml"
        file.write_text(toml)
        configs[manifest["metadata"]["name"]] = from_args(["--config", str(file)], {})
    return configs


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ALL)
def test_the_services_take_their_configuration(preset: str, tmp_path: Path) -> None:
    found = render(preset)
    gateway, engines = gateway_config(found), engine_configs(found, tmp_path)
    ports = {c["name"]: c.get("ports", []) for _, pod in pod_templates(found) for c in containers(pod)}
    named = {port["name"]: port["containerPort"] for port in ports["gateway"]}
    assert named == {"http": gateway.listen.port, "probes": gateway.admin.port}
    assert gateway.listen.host == gateway.admin.host == "0.0.0.0"
    served = {model.name: model for model in gateway.models}
    for engine in engines.values():
        model = served[engine.name]
        assert model.upstream_model == engine.name
        scheme = "https" if engine.tls_cert else "http"
        if model.discovery is None:
            assert {urlsplit(url).port for url in model.replicas} == {engine.port}
            assert {urlsplit(url).scheme for url in model.replicas} == {scheme}
        else:
            assert model.discovery.scheme == scheme
        assert (engine.host, engine.probe_port) == ("0.0.0.0", 8002)


@pytest.mark.parametrize("preset", ALL)
def test_a_replica_has_a_name_that_it_keeps(preset: str) -> None:
    """The ring that prefixes are placed on is made of these names: a new pod has the old one's place."""
    found = render(preset)
    urls = {url for model in gateway_config(found).models for url in model.replicas}
    hosts = {urlsplit(url).hostname for url in urls if ".svc.cluster.local" in url}
    named = {model.name for model in gateway_config(found).models if model.discovery is None}
    expected = set()
    for workload in of_kind(found, "StatefulSet", "LeaderWorkerSet"):
        name, spec = workload["metadata"]["name"], workload["spec"]
        assert spec.get("serviceName", name) == name
        [toml] = [
            text for manifest, text in files(found, "engine.toml") if manifest["metadata"]["name"] == name
        ]
        if tomllib.loads(toml)["served_model_name"] in named:
            domain = f"{name}.{NAMESPACE}.svc.cluster.local"
            expected |= {f"{name}-{index}.{domain}" for index in range(spec["replicas"])}
    assert hosts == expected


def test_replicas_that_are_scaled_are_found_by_the_names_that_are_ready() -> None:
    found = render("tensor-parallel")
    [model] = gateway_config(found).models
    assert model.discovery is not None
    assert model.discovery.srv == f"_http._tcp.r-penstock-llama-70b.{NAMESPACE}.svc.cluster.local"
    assert model.discovery.scheme == "https"
    [service] = [s for s in of_kind(found, "Service") if s["metadata"]["name"] == "r-penstock-llama-70b"]
    assert service["spec"]["ports"][0]["name"] == "http"
    assert "publishNotReadyAddresses" not in service["spec"], "only those that are ready"


def test_gateways_may_watch_endpoints_and_nothing_more() -> None:
    found = render("many-models")
    watched = {model.discovery.kubernetes for model in gateway_config(found).models if model.discovery}
    services = {service["metadata"]["name"] for service in of_kind(found, "Service")}
    assert {one.service for one in watched if one is not None} <= services
    [role] = of_kind(found, "Role")
    [rule] = role["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    }
    [binding] = of_kind(found, "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["r-penstock-gateway"]
    assert of_kind(found, "ClusterRole", "ClusterRoleBinding") == []
    assert tokens(found) == {"Deployment/r-penstock-gateway"}


def tokens(found: tuple[Manifest, ...]) -> set[str]:
    """The pods that have a token of the API server."""
    assert not any(pod["spec"]["automountServiceAccountToken"] for _, pod in pod_templates(found))
    projected = [
        (name, source)
        for name, pod in pod_templates(found)
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    ]
    return {name for name, source in projected if "serviceAccountToken" in source}


def test_without_a_watch_nobody_has_a_right_or_a_token() -> None:
    for preset in ("", "laptop", "one-gpu", "tensor-parallel", "multi-node"):
        found = render(preset)
        assert of_kind(found, "Role", "RoleBinding") == []
        assert tokens(found) == set()


@pytest.mark.parametrize(
    "options", [(), ADMIN_TLS, ("--set", "gateway.tls.mode=secret,gateway.tls.secret=own")]
)
@pytest.mark.parametrize("preset", ALL)
def test_a_gateways_memory_is_enough_for_what_its_limits_let_in(
    preset: str, options: tuple[str, ...]
) -> None:
    found = render(preset, NEWEST, *options)
    [pod] = [pod for name, pod in pod_templates(found) if name == "Deployment/r-penstock-gateway"]
    [container] = pod["spec"]["containers"]
    config = gateway_config(found)
    assert "own" not in str(options) or config.listen.tls is not None
    assert container_max(config) <= size(container["resources"]["limits"]["memory"])


def test_every_kind_of_value_reaches_the_file() -> None:
    values = {
        "limits": {"live_max": 5_000_000 // 100, "request_memory": "1GiB"},
        "log_level": "debug",
        "timeouts": {"connect_s": 0.25},
        "admission": {"completion_estimate": 16_000_000},
        "tenants": [
            {
                "id": "a",
                "models": ["de\"mo'"],
                "limits": {"token_budget": 900_000_000_000_000},
                "timeouts": {"total_s": 7200.5},
            }
        ],
        "keys": [
            {
                "id": "k",
                "hash": f"sha256:{'a' * 64}",
                "tenant": "a",
                "expires": "2031-01-31T00:00:00Z",
                "disabled": False,
                "labels": ["übung <&>", "line\\n"],
            }
        ],
    }
    model = {"name": "m", "servedName": "de\"mo'"}
    given = (
        "--set-json",
        f"gateway.settings={json.dumps(values)}",
        "--set-json",
        f"models=[{json.dumps(model)}]",
    )
    found = render("", "1.35", *given, "--set", "gateway.replicas=1")
    loaded = gateway_config(found)
    assert (loaded.limits.live_max, loaded.limits.request_memory) == (50_000, 1 << 30)
    assert (loaded.timeouts.connect_s, loaded.log_level) == (0.25, "debug")
    assert loaded.admission.completion_estimate == 16_000_000
    assert loaded.tenants[0].models == ("de\"mo'",)
    assert loaded.tenants[0].limits.token_budget == 900_000_000_000_000
    assert loaded.keys[0].labels == ("übung <&>", "line\\n")
    assert loaded.keys[0].expires is not None
    assert loaded.timeouts.drain_s == 7201, "the longest stream of any tenant counts"


def stamp(found: tuple[Manifest, ...], name: str) -> dict[str, Any]:
    """What a pod's template is, as far as a change of it replaces pods."""
    [workload] = [
        one for one in of_kind(found, "Deployment", "StatefulSet") if one["metadata"]["name"] == name
    ]
    template: dict[str, Any] = workload["spec"]["template"]
    return template


def test_a_change_of_tenants_replaces_no_pod() -> None:
    before, after = render(""), render("", "1.35", "--set", "gateway.settings.tenants[0].id=new")
    assert stamp(before, "r-penstock-gateway") == stamp(after, "r-penstock-gateway")
    assert gateway_config(before) != gateway_config(after)
    restarted = render("", "1.35", "--set", "gateway.settings.limits.live_max=9")
    assert stamp(before, "r-penstock-gateway") != stamp(restarted, "r-penstock-gateway")


def test_a_change_of_one_model_replaces_its_engines_alone() -> None:
    more = ("--set", "models[0].name=a,models[1].name=b")
    before = render("", "1.35", *more)
    after = render("", "1.35", *more, "--set", "models[1].settings.max_num_seqs=8")
    assert stamp(before, "r-penstock-a") == stamp(after, "r-penstock-a")
    assert stamp(before, "r-penstock-b") != stamp(after, "r-penstock-b")
    assert stamp(before, "r-penstock-gateway") == stamp(after, "r-penstock-gateway")


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ALL)
def test_what_is_referred_to_exists(preset: str) -> None:
    found = render(preset)
    names = {(m["kind"], m["metadata"]["name"]) for m in found}
    secrets = EXISTING | {m["spec"]["secretName"] for m in of_kind(found, "Certificate")}
    secrets |= {m["metadata"]["name"] for m in of_kind(found, "Secret")}
    claims = CLAIMS | {m["metadata"]["name"] for m in of_kind(found, "PersistentVolumeClaim")}
    for where, pod in pod_templates(found):
        spec = pod["spec"]
        assert (
            "ServiceAccount",
            spec.get("serviceAccountName", ""),
        ) in names or "serviceAccountName" not in spec
        mounts = {mount["name"] for c in containers(pod) for mount in c.get("volumeMounts", [])}
        of_replicas = {claim["metadata"]["name"] for claim in claim_templates(found, where)}
        assert mounts == {volume["name"] for volume in spec["volumes"]} | of_replicas, where
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, where
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets, where
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for variable in (variable for c in containers(pod) for variable in c.get("env", [])):
            reference = variable.get("valueFrom", {}).get("secretKeyRef", {"name": "penstock-keys"})
            assert reference["name"] in secrets


@pytest.mark.parametrize("preset", ALL)
def test_every_selector_finds_pods_and_every_port_a_name(preset: str) -> None:
    found = render(preset)
    pods = [pod for _, pod in pod_templates(found)]
    for manifest in of_kind(found, "Service", "PodDisruptionBudget", "InferencePool", "NetworkPolicy"):
        spec = manifest["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = dict(selector.get("matchLabels", selector))
        wanted.pop("leaderworkerset.sigs.k8s.io/worker-index", None)  # its controller sets it
        matched = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        assert matched, manifest["metadata"]["name"]
        ports = {port["name"] for pod in matched for c in containers(pod) for port in c.get("ports", [])}
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
    for monitor in of_kind(found, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in of_kind(found, "Service") if wanted.items() <= s["metadata"]["labels"].items()]
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


# -- ends, networks, rights, metrics --------------------------------------------------------------


@pytest.mark.parametrize("preset", ALL)
def test_a_pod_is_killed_only_after_its_longest_stream(preset: str, tmp_path: Path) -> None:
    found = render(preset)
    gateway, engines = gateway_config(found), engine_configs(found, tmp_path)
    assert gateway.timeouts.drain_s >= gateway.timeouts.total_s
    drains = {name: engine.drain_timeout_s for name, engine in engines.items()}
    drains["r-penstock-gateway"] = gateway.timeouts.drain_s
    delays = {"r-penstock-gateway": gateway.timeouts.drain_delay_s}
    for workload in of_kind(found, "Deployment", "StatefulSet"):
        spec = workload["spec"]["template"]["spec"]
        [container] = spec["containers"]
        name = workload["metadata"]["name"]
        delay_s = delays.get(name) or container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain_s = drains[name]
        assert delay_s > 0
        assert spec["terminationGracePeriodSeconds"] >= delay_s + drain_s + 5
        assert drain_s >= gateway.timeouts.total_s


def test_the_wait_before_the_end_is_a_command_where_kubernetes_knows_no_sleep() -> None:
    for _, pod in pod_templates(render("laptop", "1.29")):
        for container in pod["spec"]["containers"]:
            if "lifecycle" in container:
                assert container["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "2"]}}


@pytest.mark.parametrize("preset", ALL)
def test_each_pod_has_a_policy_and_engines_are_reached_by_gateways_alone(preset: str) -> None:
    found = render(preset)
    policies = of_kind(found, "NetworkPolicy")
    for name, pod in pod_templates(found):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        labels = pod["metadata"]["labels"].items()
        held = [p for p in policies if p["spec"]["podSelector"]["matchLabels"].items() <= labels]
        assert len(held) == 1, name
        if component == "engine":
            [rule] = [
                r
                for r in held[0]["spec"]["ingress"]
                if r.get("ports") == [{"port": "http", "protocol": "TCP"}]
            ]
            [peer] = rule["from"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
            assert held[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_networks_are_open_only_where_they_have_to_be() -> None:
    """An engine whose model is on a claim reaches nothing but names. The ranks of a group reach each
    other."""
    [alone] = [
        p for p in of_kind(render("tensor-parallel"), "NetworkPolicy") if "llama" in p["metadata"]["name"]
    ]
    assert [sorted(rule) for rule in alone["spec"]["egress"]] == [["ports"]]
    [group] = [p for p in of_kind(render("multi-node"), "NetworkPolicy") if "big" in p["metadata"]["name"]]
    [between] = [rule for rule in group["spec"]["ingress"] if "ports" not in rule]
    assert between["from"][0]["podSelector"]["matchLabels"]["penstock.dev/model"] == "big"


def test_the_hop_is_mtls_with_probes_in_plain_text(tmp_path: Path) -> None:
    found = render("tensor-parallel")
    [engine] = engine_configs(found, tmp_path).values()
    gateway = gateway_config(found)
    assert engine.tls_client_ca is not None
    assert (gateway.hop.cert, gateway.hop.ca) == ("/etc/penstock-hop/tls.crt", "/etc/penstock-hop/ca.crt")
    [certificate] = [
        c
        for c in of_kind(found, "Certificate")
        if c["spec"].get("usages") == ["server auth"] and "hop" in c["metadata"]["name"]
    ]
    [name] = certificate["spec"]["dnsNames"]
    pod = f"r-penstock-llama-70b-0.r-penstock-llama-70b.{NAMESPACE}.svc.cluster.local"
    assert re.fullmatch(name.replace(".", r"\.").replace("*", r"[^.]+"), pod)


def test_the_admin_listener_speaks_plain_text_by_name_or_all_that_ask_it_speak_https() -> None:
    plain, found = render("one-gpu"), render("one-gpu", NEWEST, *ADMIN_TLS)
    assert gateway_config(plain).admin.plaintext
    admin, endpoints, pods = gateway_config(found).admin, [], dict(pod_templates(found))
    assert admin.tls is not None
    pod = pods["Deployment/r-penstock-gateway"]["spec"]
    [container] = pod["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}
    [volume] = [one for one in pod["volumes"] if one.get("secret", {}).get("secretName") == "admin-tls"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
    files = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert files == {admin.tls.cert, admin.tls.key}
    for monitor in of_kind(found, "ServiceMonitor"):
        endpoints += [one for one in monitor["spec"]["endpoints"] if "scheme" in one]
    [endpoint] = endpoints
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "admin-tls", "key": "ca.crt"}
    services = {f"{service['metadata']['name']}.{NAMESPACE}.svc" for service in of_kind(found, "Service")}
    assert endpoint["tlsConfig"]["serverName"] in services
    assert [one for manifest in found for one in judging.problems(manifest, NEWEST)] == []


def test_scaling_asks_for_a_metric_that_an_engine_has() -> None:
    found = render("tensor-parallel")
    [scaled] = of_kind(found, "ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    [(metric, labels)] = re.findall(r"(penstock_\w+)\{(.*?)\}", query)
    metrics = EngineMetrics(8)
    metrics.watch_core(lambda: CoreReading(None, waiting=3, live=4, is_ready=True))
    assert f"{metric} 3.0" in metrics.exposition().body.decode(), "a series without labels of its own"
    assert set(re.findall(r"(\w+)=", labels)) == {"namespace", "service"}, "labels that Prometheus sets"
    services = {service["metadata"]["name"] for service in of_kind(found, "Service")}
    assert set(re.findall(r'service="(.*?)"', labels)) <= services


def test_a_model_split_over_gpus_is_told_so(tmp_path: Path) -> None:
    [engine] = engine_configs(render("tensor-parallel"), tmp_path).values()
    assert (engine.tensor_parallel_size, engine.device) == (8, "cuda")
    [workload] = of_kind(render("tensor-parallel"), "StatefulSet")
    [container] = workload["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    [shm] = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    [group] = engine_configs(render("multi-node"), tmp_path).values()
    assert group.tensor_parallel_size == 2

"""One command from a cluster to the first token; weights, proxies and names as an operator has them."""

from __future__ import annotations

import base64
import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gateway.config.whole import load
from helm.make.boards.alerts import ALERTS
from helm.make.boards.scope import ANY_PLACE
from helm.make.values_schema import CHART, FORMER
from shared.process.setting_values import ConfigError
from shared.wire.ids import is_id
from tests.ship.rendering import NAMESPACE, NEWEST, RELEASE, Manifest, helm, of_kind, render, template

pytestmark = pytest.mark.network

HUB = f"models[0].name=a,models[0].source.hub.repo=a/b,models[0].source.hub.revision={'0' * 40}"


def made_secret(found: tuple[Manifest, ...]) -> dict[str, str]:
    """The contents of the Secret that the chart makes."""
    [secret] = of_kind(found, "Secret")
    contents: dict[str, str] = secret["stringData"]
    return contents


def toml(found: tuple[Manifest, ...]) -> dict[str, Any]:
    """gateway.toml."""
    [config] = [one for one in of_kind(found, "ConfigMap") if "gateway.toml" in one["data"]]
    return tomllib.loads(config["data"]["gateway.toml"])


def variables(found: tuple[Manifest, ...], kind: str = "Deployment") -> dict[str, Any]:
    """The variables of a workload's first container."""
    [workload] = of_kind(found, kind)
    return {one["name"]: one for one in workload["spec"]["template"]["spec"]["containers"][0].get("env", [])}


# -- the first token ------------------------------------------------------------------------------


def test_the_chart_alone_has_a_key_that_opens_its_own_model(tmp_path: Path) -> None:
    found = render("")
    secret, env = made_secret(found), variables(found)
    reference = env["PENSTOCK_GATEWAY_KEYS"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": f"{RELEASE}-penstock-keys", "key": "keys.toml"}
    file = tmp_path / "gateway.toml"
    [config] = [one for one in of_kind(found, "ConfigMap") if "gateway.toml" in one["data"]]
    file.write_text(config["data"]["gateway.toml"])
    admin = {"PENSTOCK_GATEWAY_ADMIN__KEYS": secret["admin-keys.toml"]}
    gateway = load(file, {"PENSTOCK_GATEWAY_KEYS": secret["keys.toml"], **admin})
    from gateway.identity.keys import hash_key

    assert [key.hash for key in gateway.keys] == [hash_key(secret["api-key"])]
    assert [key.hash for key in gateway.admin.keys] == [hash_key(secret["admin-key"])]
    assert re.fullmatch(r"sk_live_[a-z0-9]{12}_[A-Za-z0-9]{32}", secret["api-key"])
    assert all(is_id(key.id) for key in gateway.keys)
    assert gateway.tenants[0].models == ("*",)


def test_the_test_of_the_release_has_the_made_key() -> None:
    [job] = of_kind(render(""), "Job")
    [volume] = [one for one in job["spec"]["template"]["spec"]["volumes"] if one["name"] == "key"]
    assert volume["secret"]["secretName"] == f"{RELEASE}-penstock-keys"


def test_two_installations_have_different_keys() -> None:
    keys = {
        json.dumps(made_secret(tuple(render("", NEWEST, "--set", f"gateway.port={port}"))))
        for port in (8000, 8080)
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    "values",
    [
        "auth.create=false",
        "auth.existingSecret=mine",
        "gateway.settings.directory.store=redis,redis.url=redis://a:1",
        ",".join(
            f"gateway.settings.keys[0].{one}" for one in ("id=a", "tenant=t", f"hash=sha256:{'0' * 64}")
        ),
    ],
)
def test_no_key_is_made_where_something_else_says_who_may_call(values: str) -> None:
    found = render("", NEWEST, "--set", values)
    assert of_kind(found, "Secret") == []
    assert "default" not in [tenant["id"] for tenant in toml(found).get("tenants", [])]
    if "existingSecret" in values:
        assert variables(found)["PENSTOCK_GATEWAY_KEYS"]["valueFrom"]["secretKeyRef"]["name"] == "mine"


def test_a_tenant_that_the_values_have_is_not_made_again() -> None:
    values = "gateway.settings.tenants[0].id=default,gateway.settings.tenants[0].service_tier=flex"
    assert toml(render("", NEWEST, "--set", values))["tenants"] == [{"id": "default", "service_tier": "flex"}]


def test_an_upgrade_keeps_the_key(tmp_path: Path) -> None:
    """`helm template` asks no cluster: a chart whose lookup answers stands in for one."""
    there = {
        name: base64.b64encode(f"sk_live_{'a' * 12}_{name}".encode()).decode()
        for name in ("api-key", "admin-key")
    }
    for path in CHART.rglob("*"):
        if path.is_file() and "make" not in path.parts:
            copy = tmp_path / path.relative_to(CHART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    auth = tmp_path / "templates/auth.yaml"
    lookup = '(lookup "v1" "Secret" .Release.Namespace $name)'
    assert lookup in auth.read_text()
    data = " ".join(f'"{name}" "{value}"' for name, value in there.items())
    auth.write_text(auth.read_text().replace(lookup, f'(dict "data" (dict {data}))'))
    done = helm("template", RELEASE, str(tmp_path), "--show-only", "templates/auth.yaml")
    assert done.returncode == 0, done.stderr
    assert f"sk_live_{'a' * 12}_api-key" in done.stdout


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), json.loads(FORMER.read_text()).items())
def test_a_former_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    done = template("", NEWEST, "--set-json", f"{old}={{}}")
    assert done.returncode != 0
    assert f"{old} is {new} now" in done.stderr
    if old.startswith("engine."):
        inner = old.removeprefix("engine.")
        done = template("", NEWEST, "--set", f"models[0].name=a,models[0].{inner}=1")
        assert f"models[a].{inner} is {new} now" in done.stderr


def test_every_new_name_is_one_of_the_values() -> None:
    import yaml

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for new in json.loads(FORMER.read_text()).values():
        inside = values
        for name in new.split("."):
            inside = inside[name]


def test_a_registry_is_before_every_image_of_ours() -> None:
    found = render(
        "", NEWEST, "--set", "global.imageRegistry=r.example/team,engine.image.registry=other.example"
    )
    images = set(re.findall(r'"image": "([^"]+)"', json.dumps(found)))
    assert images == {"r.example/team/penstock-gateway:0.1.0", "other.example/penstock-engine:0.1.0"}


def test_the_package_has_its_readme_and_its_presets(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as package:
        names = set(package.getnames())
    assert {"penstock/README.md", "penstock/presets/laptop.yaml", "penstock/former.json"} <= names
    assert not [
        name for name in names if "/make/" in name or (name.endswith(".py") and "/scripts/" not in name)
    ]


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "holder",
    [
        "models[0].name=a,models[0].gateway.limits.concurrent=1",
        *(
            f"gateway.settings.{kind}[0].{name}"
            for kind in ("tenants", "keys", "grants", "certificates")
            for name in ("limits.concurrent=1", "model_limits[0].model=a")
        ),
    ],
)
def test_a_limit_that_each_gateway_would_grant_is_refused(holder: str) -> None:
    def says(*more: str) -> str:
        return template("", NEWEST, "--skip-schema-validation", "--set", ",".join((holder, *more))).stderr

    assert "would each allow all of it" in says()
    assert "would each allow all of it" not in says("gateway.replicas=1")
    assert "would each allow all of it" not in says("redis.url=redis://a:6379")
    assert "would each allow all of it" in says("gateway.replicas=1", "gateway.autoscaling.enabled=true")
    in_memory = ("redis.url=redis://a:6379", "gateway.settings.quotas.store=memory")
    assert "would each allow all of it" in says(*in_memory)


def test_gateways_know_how_many_they_are_and_refuse_a_limit_from_a_secret() -> None:
    def of(*values: str) -> dict[str, Any]:
        return toml(render("", NEWEST, *values))

    hash_ = f"sha256:{0:064}"
    keys = {"PENSTOCK_GATEWAY_KEYS": f'[{{ id = "k", hash = "{hash_}", tenant = "default"%s }}]'}
    secret = {name: text % ", limits = { concurrent = 1 }" for name, text in keys.items()}
    with pytest.raises(ConfigError, match=r"keys\.k\.limits: 2 gateways cannot count it together"):
        load(of(), secret)
    load(of(), {name: text % "" for name, text in keys.items()})
    load(of("--set", "gateway.replicas=1"), secret)
    load(of("--set", "redis.url=redis://a:6379"), secret)


# -- weights --------------------------------------------------------------------------------------


def test_a_claim_for_weights_is_made_and_mounted() -> None:
    values = f"{HUB},models[0].source.hub.cache.create=true,models[0].source.hub.cache.size=20Gi"
    found = render("", NEWEST, "--set", values)
    [claim] = of_kind(found, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    [engine] = of_kind(found, "StatefulSet")
    volumes = {one["name"]: one for one in engine["spec"]["template"]["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    shared = render("", NEWEST, "--set", f"{values},models[0].replicas=2")
    assert of_kind(shared, "PersistentVolumeClaim")[0]["spec"]["accessModes"] == ["ReadWriteMany"]
    once = template(
        "",
        NEWEST,
        "--set",
        f"{values},models[0].replicas=2,models[0].source.hub.cache.accessMode=ReadWriteOnce",
    )
    assert "has to be ReadWriteMany" in once.stderr


def test_a_download_goes_by_a_proxy_and_trusts_an_authority() -> None:
    values = (
        f"{HUB},models[0].source.hub.cache.size=20Gi,engine.download.proxy=http://proxy:3128,"
        "engine.download.caSecret.name=ca,engine.extraEnv[0].name=NO_PROXY,engine.extraEnv[0].value=hub"
    )
    found = render("", NEWEST, "--set", values)
    [engine] = of_kind(found, "StatefulSet")
    [download] = engine["spec"]["template"]["spec"]["initContainers"]
    env = {one["name"]: one.get("value") for one in download["env"]}
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("http://proxy:3128", "hub")
    [mount] = [one for one in download["volumeMounts"] if one["name"] == "ca"]
    assert env["SSL_CERT_FILE"].startswith(mount["mountPath"])
    [policy] = [one for one in of_kind(found, "NetworkPolicy") if one["metadata"]["name"].endswith("-a")]
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
    assert 3128 in ports
    assert 443 not in ports


# -- what is watched ------------------------------------------------------------------------------


def test_alerts_are_of_this_release_alone() -> None:
    found = render("", NEWEST, "--set", "monitoring.prometheusRule.disabled={PenstockPreempting}")
    [rule] = of_kind(found, "PrometheusRule")
    alerts = {one["alert"]: one["expr"] for group in rule["spec"]["groups"] for one in group["rules"]}
    assert alerts.keys() == {alert.name for alert in ALERTS} - {"PenstockPreempting"}
    for expr in alerts.values():
        assert ANY_PLACE not in expr
        series = re.findall(r"\bpenstock_\w+(\{[^}]*)?", expr)
        assert series
        assert all(f'namespace="{NAMESPACE}"' in one and f'instance="{RELEASE}"' in one for one in series)


def test_dashboards_of_two_releases_are_two() -> None:
    def uids(namespace: str) -> set[str]:
        done = template("", NEWEST, "--namespace", namespace, "--show-only", "templates/monitoring.yaml")
        return set(re.findall(r'^ +"uid": "(penstock-[^"]+)"', done.stdout, re.MULTILINE))

    assert len(uids("one")) == len(uids("two")) == 4
    assert uids("one").isdisjoint(uids("two"))


def test_every_series_of_a_dashboard_is_chosen_by_its_place() -> None:
    for path in (CHART / "dashboards").glob("*.json"):
        document = json.loads(path.read_text())
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                assert all(
                    'namespace=~"$namespace"' in one
                    for one in re.findall(r"\bpenstock_\w+(\{[^}]*)?", target["expr"])
                )

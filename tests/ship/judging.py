"""Judges manifests: by Kubernetes' own schemas, closed against unknown fields, and custom resources by the
fields that their definitions have.

Those of custom resources are written down here, as far as the chart uses them: the definitions themselves are
large and in no registry. `tests/ship/kube.py` holds the chart against the real ones where they are at hand.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import jsonschema_rs

from helm.make.schema_parts import Schema, list_of, map_of, table, text
from tests.ship import tools
from tests.ship.rendering import Manifest

_K8S: Final = "https://kubernetes.io/api/_definitions.json"
_WHOLE: Final[Schema] = {"type": "integer"}
_TRUTH: Final[Schema] = {"type": "boolean"}
_COUNT: Final[Schema] = {"type": ["integer", "string"]}
_LABELS: Final = map_of(text(), "")
_SELECTOR: Final = table("", ("matchLabels",), matchLabels=_LABELS)


def _texts(*names: str) -> dict[str, Schema]:
    return {name: text() for name in names}


def _ref(definition: str) -> Schema:
    return {"$ref": f"{_K8S}#/$defs/{definition}"}


_POD: Final = _ref("io.k8s.api.core.v1.PodTemplateSpec")
_ISSUER_REF: Final = table("", ("name",), **_texts("name", "kind", "group"))
_KEY: Final = table(
    algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]}, size=_WHOLE, rotationPolicy={"enum": ["Never", "Always"]}
)
_RULE: Final = table(
    "",
    ("expr",),
    **_texts("alert", "record", "expr", "for", "keep_firing_for"),
    labels=_LABELS,
    annotations=_LABELS,
)
_TRIGGER: Final = table(
    "",
    ("type", "metadata"),
    type=text(),
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    metadata=table(**_texts("serverAddress", "query", "threshold", "ignoreNullValues")),
)
_BEHAVIOR: Final = _ref("io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior")

CUSTOM: Final[dict[str, Schema]] = {
    "monitoring.coreos.com/v1 ServiceMonitor": table(
        "",
        ("selector", "endpoints"),
        selector=_SELECTOR,
        targetLabels=list_of(text(), ""),
        endpoints=list_of(
            table(
                **_texts("port", "path", "interval"),
                scheme={"enum": ["http", "https"]},
                tlsConfig=table(
                    ca=table(secret=table("", ("name", "key"), **_texts("name", "key"))),
                    serverName=text(),
                ),
            ),
            "",
        ),
    ),
    "monitoring.coreos.com/v1 PrometheusRule": table(
        groups=list_of(
            table("", ("name",), **_texts("name", "interval"), rules=list_of(_RULE, "")),
            "",
        )
    ),
    "keda.sh/v1alpha1 ScaledObject": table(
        "",
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=table("", ("name",), **_texts("apiVersion", "kind", "name")),
        minReplicaCount=_WHOLE,
        maxReplicaCount=_WHOLE,
        pollingInterval=_WHOLE,
        fallback=table("", ("failureThreshold", "replicas"), failureThreshold=_WHOLE, replicas=_WHOLE),
        advanced=table(horizontalPodAutoscalerConfig=table(behavior=_BEHAVIOR)),
        triggers=list_of(_TRIGGER, ""),
    ),
    "cert-manager.io/v1 Issuer": table(selfSigned=table(), ca=table("", ("secretName",), secretName=text())),
    "cert-manager.io/v1 Certificate": table(
        "",
        ("secretName", "issuerRef"),
        **_texts("commonName", "secretName", "duration", "renewBefore"),
        isCA=_TRUTH,
        dnsNames=list_of(text(), ""),
        usages=list_of({"enum": ["server auth", "client auth"]}, ""),
        privateKey=_KEY,
        issuerRef=_ISSUER_REF,
    ),
    "gateway.networking.k8s.io/v1 HTTPRoute": table(
        parentRefs=list_of(
            table("", ("name",), **_texts("name", "namespace", "sectionName", "kind", "group"), port=_WHOLE),
            "",
        ),
        hostnames=list_of(text(), ""),
        rules=list_of(
            table(
                matches=list_of(table(path=table(**_texts("type", "value"))), ""),
                backendRefs=list_of(table("", ("name",), name=text(), port=_WHOLE), ""),
                timeouts=table(
                    request=text(pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"),
                    backendRequest=text(pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"),
                ),
            ),
            "",
        ),
    ),
    "inference.networking.k8s.io/v1 InferencePool": table(
        "",
        ("selector", "targetPorts"),
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        selector=_SELECTOR,
        targetPorts=list_of(table("", ("number",), number=_WHOLE), "", minItems=1, maxItems=8),
        endpointPickerRef=table(
            "",
            ("name",),
            name=text(minLength=1),
            port=table(number=_WHOLE),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": table(
        "",
        ("leaderWorkerTemplate",),
        replicas=_WHOLE,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=table(
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=table(maxUnavailable=_COUNT, maxSurge=_COUNT, partition=_WHOLE),
        ),
        leaderWorkerTemplate=table(
            "",
            ("workerTemplate",),
            size=_WHOLE,
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=_POD,
            workerTemplate=_POD,
        ),
    ),
}
"""The `spec` of each custom resource."""


@cache
def _definitions(version: str) -> tuple[Any, dict[str, str]]:
    """The registry of a version's schemas, and the name of each kind's."""
    loaded = json.loads(tools.schemas(version).read_text())
    names = {}
    for name, definition in loaded["$defs"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", []):
            group = f"{kind['group']}/" if kind["group"] else ""
            names[f"{group}{kind['version']} {kind['kind']}"] = name
    return jsonschema_rs.Registry([(_K8S, loaded)]), names


@cache
def _validator(kind: str, version: str) -> Any:
    registry, names = _definitions(version)
    if kind in names:
        return jsonschema_rs.validator_for(_ref(names[kind]), registry=registry)
    assert kind in CUSTOM, f"Kubernetes {version} has no {kind}"
    metadata = _ref("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    required = ("apiVersion", "kind", "metadata", "spec")
    whole = table("", required, apiVersion=text(), kind=text(), metadata=metadata, spec=CUSTOM[kind])
    return jsonschema_rs.validator_for(whole, registry=registry)


def problems(manifest: Manifest, version: str) -> list[str]:
    """What a cluster of this version would refuse."""
    kind = f"{manifest['apiVersion']} {manifest['kind']}"
    found = _validator(kind, version).iter_errors(manifest)
    name = manifest["metadata"]["name"]
    return [f"{kind} {name}, {'.'.join(map(str, one.instance_path))}: {one.message}" for one in found]

"""The description of the chart's values: helm/values.schema.json and the table of helm/README.md are made of
it.

`python -m helm.make.values_schema` writes both. Every object is closed, so helm refuses a name that is not
here. The settings of the services are taken from their own declarations (`shared.process.settings`), without
those that the chart sets itself: a new setting can be given in values as soon as this has run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml

from helm.make.schema_parts import (
    EGRESS,
    LABELS,
    NAME,
    OPEN,
    PEER,
    PERCENT_OR_COUNT,
    PORT_MAX,
    PULL,
    RESOURCES,
    Schema,
    choice,
    image,
    issuer,
    list_of,
    map_of,
    pdb,
    placement,
    port,
    secret,
    table,
    text,
    truth,
    whole,
)
from shared.cli.settings import text_of

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm"
SCHEMA: Final = CHART / "values.schema.json"
README: Final = CHART / "README.md"
FORMER: Final = CHART / "former.json"
"""The names of values by those that they had before."""
BEGIN, END = "<!-- values -->\n", "<!-- /values -->\n"
DIALECT: Final = "http://json-schema.org/draft-07/schema#"

GATEWAY_OWNED: Final = ("models", "admin", "hop")
"""Sections of gateway.toml that the chart writes."""
LISTEN_GIVEN: Final = ("client_certificates", "client_ca", "crl")
"""What of [listen.tls] is not the chart's."""
REDIS_OWNED: Final = ("url", "password")
QUOTAS_OWNED: Final = ("store", "gateways")
MODEL_OWNED: Final = ("name", "replicas", "discovery", "upstream_model")
ENGINE_OWNED: Final = (
    *("model", "revision", "host", "port", "probe_port", "served_model_name"),
    *("tls_cert", "tls_key", "tls_client_ca", "tensor_parallel_size", "startup_timeout_s"),
    *("kv_disk_dir", "kv_disk_bytes"),
)
"""Settings of engine.toml that the chart writes."""


# -- the services' own settings --------------------------------------------------------------------


def settings_of(service: str) -> Schema:
    """The schema of a service's file, without what has no meaning in values."""
    schema: Schema = json.loads(text_of(service, "json-schema"))
    del schema["$schema"]
    return schema


def without(schema: Schema, *names: str) -> Schema:
    """An object's schema without some of its properties, and with none required."""
    kept = {name: inner for name, inner in schema["properties"].items() if name not in names}
    loose = {key: value for key, value in schema.items() if key != "required"}
    return loose | {"properties": kept}


def section(schema: Schema) -> Schema:
    """The schema of a section that may be missing."""
    found: Schema = schema["anyOf"][0] if "anyOf" in schema else schema
    return found


def gateway_settings() -> Schema:
    """What may be set in gateway.toml."""
    whole_file = settings_of("gateway")
    tls = section(section(whole_file["properties"]["listen"])["properties"]["tls"])
    schema = without(whole_file, *GATEWAY_OWNED)
    properties = schema["properties"]
    given = {name: tls["properties"][name] for name in LISTEN_GIVEN}
    properties["listen"] = table("What of [listen] is not the chart's.", tls=table("TLS.", **given))
    properties["timeouts"] = without(section(properties["timeouts"]), "drain_delay_s")
    properties["redis"] = without(section(properties["redis"]), *REDIS_OWNED)
    properties["quotas"] = without(section(properties["quotas"]), *QUOTAS_OWNED)
    return schema | {"description": "Settings of gateway.toml, as gateway/README.md lists them."}


def model_settings() -> Schema:
    """What may be set in an entry of [[models]]."""
    schema = without(settings_of("gateway")["properties"]["models"]["items"], *MODEL_OWNED)
    return schema | {"description": "Settings of its entry in [[models]] of gateway.toml."}


def engine_settings() -> Schema:
    """What may be set in engine.toml."""
    schema = without(settings_of("engine"), *ENGINE_OWNED)
    return schema | {"description": "Settings of engine.toml, as engine/README.md lists them."}


# -- the components --------------------------------------------------------------------------------


def public_tls() -> Schema:
    """TLS of the public listener."""
    return table(
        "TLS of the public listener.",
        mode=choice(
            "inFront: TLS ends before the gateway, which speaks plain text. secret: an existing one. "
            "certManager: one that cert-manager makes.",
            *("inFront", "secret", "certManager"),
        ),
        secret=text("Existing Secret with tls.crt and tls.key."),
        issuer=issuer(),
        dnsNames=list_of(text(), "The certificate's names."),
    )


def public_service() -> Schema:
    """The Service of the public listener."""
    return table(
        "Service of the public listener.",
        type=choice("Its type.", "ClusterIP", "NodePort", "LoadBalancer"),
        port=port("Its port."),
        annotations=map_of(text(), "Its annotations."),
        loadBalancerClass=text("Class of the load balancer."),
        loadBalancerSourceRanges=list_of(text(), "Networks that it lets in."),
    )


def ingress() -> Schema:
    """An Ingress."""
    return table(
        "Ingress.",
        enabled=truth("Have one."),
        className=text("Its class."),
        annotations=map_of(text(), "Its annotations, such as those that turn buffering off."),
        hosts=list_of(text(minLength=1), "Host names. Empty: any."),
        tls=list_of(
            table("", ("secretName",), secretName=text(), hosts=list_of(text(), "")),
            "Existing Secrets with certificates, and the host names that they are for.",
        ),
    )


def exposure() -> dict[str, Schema]:
    """The ways to the gateway's listeners."""
    route = table(
        "HTTPRoute of the Gateway API.",
        enabled=truth("Have one."),
        annotations=map_of(text(), "Its annotations."),
        hostnames=list_of(text(), "Its host names."),
        parentRefs=list_of(
            table(
                "",
                ("name",),
                **{n: text() for n in ("name", "namespace", "sectionName", "kind", "group")},
                port=port(""),
            ),
            "The Gateways that it belongs to.",
        ),
    )
    return {
        "tls": public_tls(),
        "adminTls": table(
            "TLS of the admin listener.",
            secret=text(
                "Existing Secret with tls.crt, tls.key and, for Prometheus, ca.crt. Empty: plain text."
            ),
        ),
        "service": public_service(),
        "ingress": ingress(),
        "httpRoute": route,
    }


def gateway() -> Schema:
    """The gateway's values."""
    return table(
        "The gateways.",
        replicas=whole(1, "Gateways, where autoscaling does not say."),
        image=image("Image of the gateway."),
        port=whole(1024, "Port of its listener.", PORT_MAX),
        adminPort=whole(1024, "Port of metrics, probes, and changes by operators.", PORT_MAX),
        adminNames=list_of(
            text(), "Names by which that port may be called, beside addresses and its Service's up to .svc."
        ),
        settings=gateway_settings(),
        **exposure(),
        autoscaling=table(
            "Autoscaling by CPU.",
            enabled=truth("Have it."),
            minReplicas=whole(1, "Fewest gateways."),
            maxReplicas=whole(1, "Most gateways."),
            targetCPUUtilizationPercentage=whole(1, "Use of the requested CPU that is aimed at.", 100),
        ),
        pdb=pdb(),
        resources=RESOURCES,
        probes=probes(),
        spool=table(
            "Volume at /var/lib/penstock, for `accounting.file`.",
            enabled=truth("Have it."),
            size=text("Its size."),
        ),
        **placement(),
    )


def probes() -> Schema:
    """The probes of a component."""
    return table(
        "Probes.",
        startupS=whole(1, "The time that a start may take."),
        readyPeriodS=whole(1, "Between two readiness probes."),
        livePeriodS=whole(1, "Between two liveness probes."),
        liveFailures=whole(1, "Liveness probes that fail before a restart."),
    )


def source() -> Schema:
    """The places that a model may come from."""
    cache = table(
        "Where it is kept.",
        claim=text("Existing claim, which all replicas share.", minLength=1),
        create=truth("Make a claim of `size`, which all replicas share and which outlives the release."),
        size=text(
            "Size of the claim; without `create`, of a volume of each pod's own that each start fills.",
            minLength=1,
        ),
        storageClass=text("Storage class of the claim. Empty: the cluster's default."),
        accessMode=choice("Unset: ReadWriteMany for several replicas.", "ReadWriteOnce", "ReadWriteMany"),
    )
    hub = table(
        "Downloaded before the engine starts, which itself reaches no network.",
        ("repo", "revision", "cache"),
        repo=text("Such as Qwen/Qwen3-8B.", pattern=r"^[\w-][\w.-]*/[\w.-]+$"),
        revision=text("Commit, which pins what is downloaded.", pattern="^[0-9a-f]{40}$"),
        cache=cache | {"oneOf": [{"required": ["claim"], "maxProperties": 1}, {"required": ["size"]}]},
        endpoint=text("A mirror of the hub."),
        tokenSecret=secret("Existing Secret with a token of the hub."),
    )
    schema = table(
        "The model: exactly one of these.",
        demo={"const": True, "description": "The built-in demo model."},
        claim=table(
            "An existing claim, mounted read-only.",
            ("name",),
            name=text("The claim.", minLength=1),
            path=text("The model's directory within it."),
        ),
        image=table(
            "An OCI image that is mounted as a volume (Kubernetes 1.33 or newer).",
            ("reference",),
            reference=text("The image, best with a digest.", minLength=1),
            path=text("The model's directory within it."),
            pullPolicy=PULL,
        ),
        hub=hub,
    )
    return schema | {"minProperties": 1, "maxProperties": 1}


def engine_properties() -> dict[str, Schema]:
    """What all engines have in common, and what each model may set for itself."""
    return {
        "image": image("Image of the engine."),
        "workload": choice("The kind of workload.", "StatefulSet", "LeaderWorkerSet"),
        "replicas": whole(0, "Replicas, where autoscaling does not say."),
        "nodes": whole(1, "Pods of one replica, with LeaderWorkerSet."),
        "gpus": whole(0, "GPUs of each pod. The model is split between all of a replica's."),
        "gpuResource": text("Name of the GPUs' resource.", minLength=1),
        "discovery": choice(
            "How gateways find replicas: each by its name, those that are ready by SRV records, or by "
            "watching EndpointSlices. auto: names, or dns where replicas are scaled.",
            *("auto", "names", "dns", "watch"),
        ),
        "topologyKey": text("With LeaderWorkerSet: a replica has one such domain for itself."),
        "port": whole(1024, "Port of the hop.", PORT_MAX),
        "probePort": whole(1024, "Port of probes and metrics, always plain text.", PORT_MAX),
        "rendezvousPort": whole(1024, "Port at which a group's ranks meet.", PORT_MAX),
        "settings": engine_settings(),
        "source": source(),
        "download": table(
            "The download of source.hub.",
            proxy=text("URL of a proxy.", pattern="^(https?://.+)?$"),
            caSecret=secret("Existing Secret with the authorities that are trusted, PEM."),
            resources=RESOURCES,
        ),
        "sharedMemory": text("Size of /dev/shm where a pod has several GPUs."),
        "kvDisk": kv_disk(),
        "autoscaling": autoscaling(),
        "pdb": pdb(),
        "rollout": table(
            "Replacement of replicas.",
            maxUnavailable=PERCENT_OR_COUNT | {"description": "Replicas that are replaced at a time."},
        ),
        "resources": RESOURCES,
        "probes": probes(),
        "inferencePool": table(
            "InferencePool of the Gateway API's inference extension.",
            enabled=truth("Have one."),
            picker=text("Service of an endpoint picker."),
            pickerPort=port("Its port."),
            failureMode=choice("What happens without it.", "FailOpen", "FailClose"),
        ),
        "runtimeClassName": text("Runtime class."),
        **placement(),
    }


def kv_disk() -> Schema:
    """The disk tier of an engine's prefix cache."""
    return table(
        "Disk for prefixes that the engine's memory has no room for.",
        volume=choice(
            "emptyDir: the node's, until the pod is replaced. claim: one of each replica's own, which is "
            "kept with its name, and deleted with it.",
            *("none", "emptyDir", "claim"),
        ),
        sizeGiB=whole(1, "Its size. Nine tenths of it are used.", 1 << 20),
        storageClass=text("Storage class of the claims. Empty: the cluster's default."),
    )


def autoscaling() -> Schema:
    """Autoscaling by the queue."""
    return table(
        "Autoscaling by the depth of the queue.",
        mode=choice("Who scales. hpa needs an adapter for metrics of pods.", "none", "keda", "hpa"),
        minReplicas=whole(0, "Fewest replicas."),
        maxReplicas=whole(1, "Most replicas."),
        queueDepth=whole(1, "Sequences that wait, per replica, that are aimed at."),
        stabilizationS=whole(0, "Time for which fewer were enough before one is taken away.", 3600),
        prometheus=text("URL of Prometheus, for keda."),
        fallbackReplicas=whole(0, "Replicas while Prometheus does not answer, for keda."),
    )


def model() -> Schema:
    """An entry of `models`."""
    return table(
        "A model, with its engines, or with the URLs of engines elsewhere.",
        ("name",),
        name=text("Part of its objects' names.", pattern="^[a-z]([-a-z0-9]{0,20}[a-z0-9])?$"),
        servedName=text("The name that clients use. Unset: `name`.", minLength=1, maxLength=256),
        gateway=model_settings(),
        urls=list_of(text(minLength=1), "Base URLs of engines that this chart does not run."),
        **engine_properties(),
    )


def hop() -> Schema:
    """The hop."""
    return table(
        "The hop between gateways and engines.",
        mode=choice(
            "mTLS: none, by existing Secrets, or by cert-manager.", "plain", "secrets", "certManager"
        ),
        gatewaySecret=text("Existing Secret of the gateways, with tls.crt, tls.key and ca.crt."),
        engineSecret=text("The same of the engines."),
        issuer=issuer() | {"description": "Empty name: an authority of the hop's own."},
        duration=text("Life of its certificates."),
        renewBefore=text("They are renewed this long before their end."),
    )


def redis() -> Schema:
    """Redis."""
    return table(
        "Redis, for quotas and keys of all gateways together.",
        url=text(
            "redis://host:6379 or rediss://host:6379. Empty: each gateway counts for itself.",
            pattern="^(rediss?://.+)?$",
        ),
        existingSecret=text("Existing Secret with its password."),
        existingSecretPasswordKey=text("The key within it."),
        dev=table("One without persistence.", enabled=truth("Have it."), image=text("Its image.")),
    )


def network_policy() -> Schema:
    """Network policies."""
    return table(
        "Network policies.",
        enabled=truth("Have them."),
        gatewayFrom=list_of(PEER, "Peers that may reach the gateways. Empty: all."),
        monitoringFrom=list_of(PEER, "Peers that may read metrics."),
        apiServerPorts=list_of(port(""), "Ports of the API server."),
        gatewayEgress=list_of(EGRESS, "Further egress of the gateways."),
        engineEgress=list_of(EGRESS, "Further egress of the engines."),
    )


def monitoring() -> Schema:
    """Monitoring."""
    return table(
        "Monitoring.",
        serviceMonitor=table(
            "What Prometheus scrapes.",
            enabled=wanted(),
            labels=LABELS | {"description": "Their labels."},
            interval=text("Time between two scrapes."),
        ),
        prometheusRule=table(
            "Alerts, of this release alone.",
            enabled=wanted(),
            labels=LABELS | {"description": "Its labels."},
            disabled=list_of(text(), "Names of alerts to leave out."),
        ),
        dashboards=table(
            "Dashboards, as ConfigMaps.",
            enabled=truth("Have them."),
            labels=LABELS | {"description": "Labels by which Grafana finds them."},
        ),
    )


def wanted() -> Schema:
    """Whether objects of the Prometheus operator are made."""
    return choice("auto: where the cluster has the Prometheus operator.", "auto", "always", "never")


def auth() -> Schema:
    """Who may call."""
    return table(
        "Who may call.",
        create=truth("Make a key and an operator's key, where nothing else says who may call."),
        tenant=text("Whose the made key is.", minLength=1),
        existingSecret=text("Existing Secret with `keys` as TOML."),
        existingSecretKey=text("The key within it."),
        existingOperatorSecret=text("Existing Secret with `keys` of [admin] as TOML."),
        existingOperatorSecretKey=text("The key within it."),
    )


def values() -> Schema:
    """All values."""
    return table(
        nameOverride=NAME | {"description": "In place of the chart's name."},
        fullnameOverride=NAME | {"description": "In place of the release's and the chart's names."},
        clusterDomain=text("The cluster's DNS domain.", minLength=1),
        bindAddress=text("Address of all listeners; :: where pods have IPv6 alone.", minLength=1),
        imagePullSecrets=list_of(table(name=text()), "Secrets for the registries."),
        commonLabels=LABELS | {"description": "Labels of all objects."},
        commonAnnotations=map_of(text(), "Annotations of all objects."),
        drain=table(
            "How pods end.",
            longestStreamS=whole(1, "The longest answer, and timeouts.total_s of the gateway.", 86_400),
            endpointDelayS=whole(1, "Time in which all others learn that a pod is going.", 600),
            marginS=whole(1, "Between the end of the drain and the kill.", 600),
        ),
        auth=auth(),
        gateway=gateway(),
        engine=table("What all engines have in common.", **engine_properties()),
        models=list_of(
            model(), "The models. Each may set for itself what `engine` sets for all.", minItems=1
        ),
        hop=hop(),
        redis=redis(),
        networkPolicy=network_policy(),
        monitoring=monitoring(),
        serviceAccount=table("Service accounts.", annotations=map_of(text(), "Their annotations.")),
        podSecurityContext=OPEN | {"description": "Of all pods."},
        containerSecurityContext=OPEN | {"description": "Of all containers."},
        helmTest=table(
            "`helm test`.",
            keySecret=secret("Existing Secret with an API key."),
            model=text("The model that is asked. Empty: the first."),
            timeoutS=whole(1, "Its patience."),
        ),
        extraObjects=list_of(OPEN, "Further objects, as templates."),
    )


def schema_text() -> str:
    """The contents of values.schema.json."""
    schema = {"$schema": DIALECT, **values(), "required": ["models"]}
    schema["properties"]["global"] = {
        "type": "object",
        "description": "Also for charts beside it.",
        "properties": {"imageRegistry": text("Before the repository of every image.")},
    }
    for old in json.loads(FORMER.read_text()):
        _allow(schema, old.split("."))
    return json.dumps(schema, indent=1) + "\n"


def _allow(schema: Schema, names: list[str]) -> None:
    """Let a name pass that a value had before: a template refuses it, and says the new one."""
    *outer, last = names
    for holder in (schema, *([schema["properties"]["models"]["items"]] if outer[:1] == ["engine"] else [])):
        inside = holder
        for name in outer if holder is schema else outer[1:]:
            inside = inside["properties"][name]
        inside["properties"][last] = {}


# -- the table of README ---------------------------------------------------------------------------


def rows(schema: Schema, defaults: object, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, default and meaning of each value. The services' settings are in their own READMEs."""
    for name, inner in schema["properties"].items():
        here = f"{path}.{name}" if path else name
        default = defaults.get(name) if isinstance(defaults, Mapping) else None
        says = inner.get("description", "")
        if "enum" in inner:
            says += " One of " + ", ".join(f"`{one}`" for one in inner["enum"]) + "."
        if "properties" in inner and name not in (
            "settings",
            "resources",
            "affinity",
            "source",
            "podSecurityContext",
        ):
            yield from rows(inner, default, here)
        elif name != "global":
            yield here, json.dumps(default) if default not in (None, "", [], {}) else "", says


def table_text() -> str:
    """The values as a table in Markdown."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    top = values()
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for path, default, says in rows(top, defaults):
        lines.append(f"| `{path}` | {f'`{default}`' if default else ''} | {says} |".replace("|  |", "| |"))
    own = {
        key: top["properties"]["models"]["items"]["properties"][key] for key in ("name", "servedName", "urls")
    }
    lines += [f"| `models[].{name}` | | {inner['description']} |" for name, inner in own.items()]
    lines.append("| `models[].gateway` | | " + model_settings()["description"] + " |")
    return "\n".join(lines) + "\n"


def readme_text() -> str:
    """README with the table of this moment."""
    before, rest = README.read_text().split(BEGIN)
    return before + BEGIN + table_text() + END + rest.split(END)[1]


def main() -> None:
    """Write both."""
    SCHEMA.write_text(schema_text())
    README.write_text(readme_text())


if __name__ == "__main__":
    main()

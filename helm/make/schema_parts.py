"""The words in which the chart's values are described: JSON schemas of texts, numbers, lists and closed
objects, and of the things of Kubernetes' that values pass on."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def table(says: str = "", required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema |= {"required": list(required)} if required else {}
    return schema | ({"description": says} if says else {})


def text(says: str = "", **bounds: object) -> Schema:
    """A text."""
    return {"type": "string", **bounds} | ({"description": says} if says else {})


def choice(says: str, *choices: str) -> Schema:
    """One of these texts."""
    return {"enum": list(choices), "description": says}


def whole(least: int, says: str, most: int = 2**31 - 1) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most, "description": says}


def truth(says: str) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": says}


def list_of(items: Schema, says: str, **bounds: object) -> Schema:
    """A list."""
    return {"type": "array", "items": items, "description": says, **bounds}


def map_of(values: Schema, says: str) -> Schema:
    """A map with keys of the user's."""
    return {"type": "object", "additionalProperties": values, "description": says}


NAME: Final = text(maxLength=63, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
OPEN: Final[Schema] = {"type": "object"}
"""An object that Kubernetes' API server checks."""
QUANTITY: Final[Schema] = {"anyOf": [{"type": "integer", "minimum": 0}, text(pattern=r"^[0-9.]+[A-Za-z]*$")]}
LABELS: Final = map_of(text(), "Labels.")
PORT_MAX: Final = 65535
PULL: Final = choice("When the image is pulled.", "Always", "IfNotPresent", "Never")
PERCENT_OR_COUNT: Final[Schema] = {
    "anyOf": [{"type": "integer", "minimum": 0}, text(pattern="^[0-9]{1,3}%$")],
    "description": "A number or a percentage of the replicas.",
}


def port(says: str) -> Schema:
    """A port that a pod without privileges may listen on, or that a Service has."""
    return whole(1, says, PORT_MAX)


def secret(says: str) -> Schema:
    """A reference to a key of an existing Secret."""
    return table(says, name=text("The Secret. Empty: none."), key=text("The key within it."))


def image(says: str) -> Schema:
    """A container's image."""
    return table(
        says,
        registry=text("In place of global.imageRegistry."),
        repository=text("Repository within the registry.", minLength=1),
        tag=text("Empty: the chart's appVersion."),
        digest=text("Wins over the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=PULL,
    )


def issuer() -> Schema:
    """A reference to an issuer of cert-manager."""
    kinds = choice("Its kind.", "Issuer", "ClusterIssuer")
    return table(
        "The issuer of cert-manager.", name=text("Its name."), kind=kinds, group=text("Its API group.")
    )


RESOURCES: Final = table(
    "Requests and limits, as Kubernetes has them.",
    requests=map_of(QUANTITY, "What is set aside."),
    limits=map_of(QUANTITY, "What is never passed."),
    claims=list_of(table(name=text(), request=text()), "Resource claims."),
)
TOLERATION: Final = table(
    key=text(),
    operator={"enum": ["Exists", "Equal"]},
    value=text(),
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
    tolerationSeconds={"type": "integer"},
)
PEER: Final = table(podSelector=OPEN, namespaceSelector=OPEN, ipBlock=OPEN)
EGRESS: Final = table(to={"type": "array", "items": PEER}, ports={"type": "array", "items": OPEN})
ENV: Final = table("", ("name",), name=text(minLength=1), value=text(), valueFrom=OPEN)
MOUNT: Final = table(
    "",
    ("name", "mountPath"),
    name=text(),
    mountPath=text(),
    subPath=text(),
    subPathExpr=text(),
    readOnly={"type": "boolean"},
    mountPropagation=text(),
    recursiveReadOnly=text(),
)


def placement() -> dict[str, Schema]:
    """The properties of where a component's pods run, and of what is added to them."""
    return {
        "nodeSelector": map_of(text(), "Labels of the nodes."),
        "tolerations": list_of(TOLERATION, "Tolerations."),
        "affinity": table("Affinity.", nodeAffinity=OPEN, podAffinity=OPEN, podAntiAffinity=OPEN),
        "priorityClassName": text("Priority class."),
        "topologySpreadConstraints": list_of(
            OPEN, "How they are spread; without labelSelector, among themselves."
        ),
        "podLabels": LABELS | {"description": "Further labels of its pods."},
        "podAnnotations": map_of(text(), "Further annotations of its pods."),
        "extraEnv": list_of(ENV, "Further variables."),
        "extraVolumes": list_of(OPEN, "Further volumes."),
        "extraVolumeMounts": list_of(MOUNT, "Their mounts."),
    }


def pdb() -> Schema:
    """A disruption budget."""
    says = "Evictions at a time. 0 would block every one, and is refused."
    return table(
        "Disruption budget.",
        enabled=truth("Have one."),
        maxUnavailable=PERCENT_OR_COUNT | {"description": says},
    )

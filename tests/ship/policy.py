"""The policy that every manifest of the chart has to follow: what scanners such as checkov ask of a workload.

Each rule looks at one container, or at one pod, and names what it misses. The exceptions are few, and each
has its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from tests.ship.rendering import Manifest, containers, pod_templates

ContainerRule = Callable[[Manifest], bool]
PodRule = Callable[[Manifest], bool]


def _security(container: Manifest) -> Manifest:
    found: Manifest = container.get("securityContext", {})
    return found


def _resources(container: Manifest, which: str) -> Manifest:
    found: Manifest = container.get("resources", {}).get(which, {})
    return found


CONTAINER_RULES: Final[dict[str, ContainerRule]] = {
    "no privilege escalation": lambda c: _security(c).get("allowPrivilegeEscalation") is False,
    "not privileged": lambda c: not _security(c).get("privileged"),
    "read-only root": lambda c: _security(c).get("readOnlyRootFilesystem") is True,
    "not as root": lambda c: _security(c).get("runAsNonRoot") is True,
    "no capabilities": lambda c: _security(c).get("capabilities") == {"drop": ["ALL"]},
    "seccomp": lambda c: _security(c).get("seccompProfile") == {"type": "RuntimeDefault"},
    "requests of CPU": lambda c: "cpu" in _resources(c, "requests"),
    "requests of memory": lambda c: "memory" in _resources(c, "requests"),
    "limit of memory": lambda c: "memory" in _resources(c, "limits"),
    "no host port": lambda c: all("hostPort" not in port for port in c.get("ports", [])),
    "a pinned image": lambda c: not c["image"].endswith(":latest") and (":" in c["image"].rpartition("/")[2]),
    "no secret in a variable": lambda c: (
        not any(
            "value" in e
            and not e["name"].endswith("_FILE")
            and any(word in e["name"] for word in ("KEY", "TOKEN", "PASSWORD", "SECRET"))
            for e in c.get("env", [])
        )
    ),
}
POD_RULES: Final[dict[str, PodRule]] = {
    "no token of the API": lambda p: p["spec"].get("automountServiceAccountToken") is False,
    "no links of Services": lambda p: p["spec"].get("enableServiceLinks") is False,
    "no host namespaces": lambda p: not any(p["spec"].get(n) for n in ("hostNetwork", "hostPID", "hostIPC")),
    "no host paths": lambda p: not any("hostPath" in volume for volume in p["spec"].get("volumes", [])),
    "a high user": lambda p: p["spec"].get("securityContext", {}).get("runAsUser", 0) >= 10_000,
    "volumes with a bound": lambda p: all(
        "sizeLimit" in volume["emptyDir"] for volume in p["spec"].get("volumes", []) if "emptyDir" in volume
    ),
}
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")

EXCEPTIONS: Final[dict[str, str]] = {
    "limits of CPU (CKV_K8S_11)": "they slow a process that holds streams although its node is idle",
    "digests, and pulling always (CKV_K8S_43, CKV_K8S_15)": (
        "the registry is the user's, who may give a digest; a pod must start though the registry is down"
    ),
    "secrets as files alone (CKV_K8S_35)": "the keys of a Secret are one setting, a variable, and hashes",
}
"""What checkov asks for, and the chart does not do, with the reason. At most three."""


def broken(found: tuple[Manifest, ...]) -> Iterator[str]:
    """The rules that manifests break."""
    for name, pod in pod_templates(found):
        for rule, holds in POD_RULES.items():
            if not holds(pod):
                yield f"{name}: {rule}"
        for container in containers(pod):
            for container_rule, container_holds in CONTAINER_RULES.items():
                if not container_holds(container):
                    yield f"{name}, {container['name']}: {container_rule}"
        for container in pod["spec"]["containers"]:
            is_service = pod["spec"].get("restartPolicy") != "Never" and not name.endswith(" worker")
            if is_service and not all(probe in container for probe in PROBES):
                yield f"{name}, {container['name']}: probes"

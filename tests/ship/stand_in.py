"""A stand-in for scheduler and kubelet: it binds every pod of a namespace to a node, says that it runs and is
ready, and ends it when it is deleted. It notes how many pods of each component were ready at the worst
moment. `tests.ship.kubelet` runs pods in earnest."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from tests.ship.rendering import Manifest

PERIOD_S: Final = 0.2
NODE: Final = "stand-in"
READY: Final = ("Ready", "ContainersReady")


class Api:
    """An API server, as a node asks it."""

    def __init__(self, kubeconfig: Path) -> None:
        self._server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def items(self, namespace: str, kind: str) -> list[Manifest]:
        """All objects of a kind, by its plural."""
        found: list[Manifest] = self.get(namespace, kind).get("items", [])
        return found

    def get(self, namespace: str, kind: str, name: str = "") -> Manifest:
        """One object, or the list of a kind."""
        return self._ask("GET", f"/api/v1/namespaces/{namespace}/{kind}/{name}".rstrip("/"), None)

    def beat(self) -> None:
        """Say that the node is there and well. Without a node the controllers collect its pods as garbage
        within a minute, and of one that is silent for 40 s they call all pods not ready."""
        self._ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now}
        self._ask("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}})

    def bind(self, namespace: str, pod: Manifest) -> None:
        """Bind a pod to the node, if it is not bound yet."""
        if pod["spec"].get("nodeName"):
            return
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self._ask("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/binding", binding)

    def report(self, namespace: str, pod: Manifest, address: str, *, is_ready: bool) -> None:
        """Say that a pod runs, and whether it is ready."""
        readiness = str(is_ready)
        states = [
            {
                "name": c["name"],
                "ready": is_ready,
                "restartCount": 0,
                "image": c["image"],
                "imageID": "",
                "started": True,
            }
            for c in pod["spec"]["containers"]
        ]
        conditions = [{"type": kind, "status": readiness} for kind in READY]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [*conditions, {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": states,
        }
        self.patch_status(namespace, pod, status)

    def patch_status(self, namespace: str, pod: Manifest, status: Manifest) -> None:
        name = pod["metadata"]["name"]
        self._ask("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}/status", {"status": status})

    def end(self, namespace: str, pod: Manifest) -> None:
        """Say that a pod that was deleted has ended."""
        head = pod["metadata"]
        gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": head["uid"]}}
        self._ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{head['name']}", gone)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The server's answer; empty where it refuses a change, as of a pod that is gone meanwhile. Raises
        OSError where nothing can be read: an empty list would say that all pods are gone."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        head = {"authorization": "Bearer admintoken", "content-type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, head, method=method)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError:
            if method == "GET":
                raise
            return {}


class StandIn:
    """`with StandIn(kubeconfig, namespace) as pods:` runs it."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._api = Api(kubeconfig)
        self._namespace = namespace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stand-in")
        self._worst: dict[str, int] = {}

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def seen(self) -> dict[str, str]:
        """The pods that are there now: name to uid."""
        pods = self._api.items(self._namespace, "pods")
        heads = [pod["metadata"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return {head["name"]: head["uid"] for head in heads}

    def watch_from_now(self) -> None:
        """Forget the worst moment until now."""
        self._worst = {}

    def fewest_ready(self, component: str) -> int:
        """The pods of a component that were ready at the worst moment."""
        return self._worst.get(component, 0)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            with suppress(OSError):  # a busy server is asked again
                self._look()

    def _look(self) -> None:
        ready: dict[str, int] = {}
        for pod in self._api.items(self._namespace, "pods"):
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            is_leaving = "deletionTimestamp" in pod["metadata"]
            is_ready = pod["status"].get("phase") == "Running" and not is_leaving
            ready[component] = ready.get(component, 0) + is_ready
            if is_leaving:
                self._api.end(self._namespace, pod)
            elif not is_ready:
                self._api.bind(self._namespace, pod)
                self._api.report(self._namespace, pod, "10.1.0.1", is_ready=True)
        for component, count in ready.items():
            self._worst[component] = min(count, self._worst.get(component, count))

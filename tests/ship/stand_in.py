"""A stand-in for scheduler and kubelet: it binds every pod of a namespace to a node, says that it runs and is
ready, and ends it when it is deleted. It notes how many pods of each component were ready at the worst
moment."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import yaml

from tests.ship.rendering import Manifest

PERIOD_S: Final = 0.2
NODE: Final = "stand-in"


class StandIn:
    """`with StandIn(kubeconfig, namespace) as pods:` runs it."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._server = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
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
        heads = [pod["metadata"] for pod in self._list() if "deletionTimestamp" not in pod["metadata"]]
        return {head["name"]: head["uid"] for head in heads}

    def watch_from_now(self) -> None:
        """Forget the worst moment until now."""
        self._worst = {}

    def fewest_ready(self, component: str) -> int:
        """The pods of a component that were ready at the worst moment."""
        return self._worst.get(component, 0)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            pods = self._list()
            ready: dict[str, int] = {}
            for pod in pods:
                component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
                is_leaving = "deletionTimestamp" in pod["metadata"]
                is_ready = pod["status"].get("phase") == "Running" and not is_leaving
                ready[component] = ready.get(component, 0) + is_ready
                if is_leaving:
                    gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
                    self._ask("DELETE", f"{self._pods}/{pod['metadata']['name']}", gone)
                elif not is_ready:
                    self._start(pod)
            for component, count in ready.items():
                self._worst[component] = min(count, self._worst.get(component, count))

    def _start(self, pod: Manifest) -> None:
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self._ask("POST", f"{self._pods}/{name}/binding", binding)
        conditions = [
            {"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "PodScheduled")
        ]
        states = [
            {
                "name": c["name"],
                "ready": True,
                "restartCount": 0,
                "image": c["image"],
                "imageID": "",
                "started": True,
            }
            for c in pod["spec"]["containers"]
        ]
        status = {
            "phase": "Running",
            "podIP": "10.1.0.1",
            "conditions": conditions,
            "containerStatuses": states,
        }
        self._ask("PATCH", f"{self._pods}/{name}/status", {"status": status})

    def _list(self) -> list[Manifest]:
        found: list[Manifest] = self._ask("GET", self._pods, None).get("items", [])
        return found

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The server's answer; empty where it refuses, as for a pod that is gone meanwhile."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        head = {"authorization": "Bearer admintoken", "content-type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, head, method=method)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError:
            return {}

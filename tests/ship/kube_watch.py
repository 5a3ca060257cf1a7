"""The gateway's watch of endpoints, at a real API server and with the rights that the chart gives.

kube-apiserver 1.20 has EndpointSlices in no version of today, so they are a custom resource of the same
name at the server of 1.36: its lists, watches and versions are those of every API server. It asks 1.20
who a token belongs to and what it may do, so the gateway's own account is held to the chart's Role.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.config.discovery import DiscoveryConfig, KubernetesConfig
from gateway.discovery.kubernetes import KubernetesSource
from gateway.discovery.source import SourceProgress
from gateway.routing.members import Listed, Standing
from shared.process.clock import SYSTEM_CLOCK
from tests.ship.rendering import NAMESPACE, Manifest

GROUP: Final = "/apis/discovery.k8s.io/v1"
SERVICE: Final = "r-penstock-chat"
PATIENCE_S: Final = 60
DEFINITION: Final[Manifest] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "endpointslices.discovery.k8s.io",
        "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes/enhancements/issues/752"
        },
    },
    "spec": {
        "group": "discovery.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "EndpointSlice", "listKind": "EndpointSliceList", "plural": "endpointslices"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}


@dataclass(frozen=True, slots=True)
class Server:
    """The server of custom resources."""

    url: str
    ca: Path

    @staticmethod
    def of(kubeconfig: Path, state: Path) -> Server:
        """The one that a kubeconfig names, with its certificate in the state's folder."""
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        return Server(cluster["server"], state / "crd-certs/apiserver.crt")

    def ask(self, method: str, path: str, body: Manifest | None, token: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        context = ssl.create_default_context(cafile=str(self.ca))
        head = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, head, method=method)
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


def slice_of(*endpoints: tuple[str, bool, bool]) -> Manifest:
    """An EndpointSlice with endpoints of address, readiness, and whether they are ending."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{SERVICE}-1", "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8001, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": ready, "terminating": ending}}
            for address, ready, ending in endpoints
        ],
    }


async def watched(server: Server, token: str, folder: Path, say: Callable[[str], None]) -> None:
    """Follow a Service through its life with the gateway's own source."""
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes(server.ca.read_bytes())
    config = DiscoveryConfig(
        kubernetes=KubernetesConfig(
            service=SERVICE,
            namespace=NAMESPACE,
            port="http",
            api_url=server.url,
        )
    )
    seen: asyncio.Queue[list[Listed]] = asyncio.Queue()
    progress = SourceProgress("chat", lambda members: seen.put_nowait(_sorted(members)), SYSTEM_CLOCK)
    task = asyncio.create_task(KubernetesSource(config, {}, account=str(folder)).watch(progress))
    try:
        path = f"{GROUP}/namespaces/{NAMESPACE}/endpointslices"
        first, second = "http://10.1.0.1:8001", "http://10.1.0.2:8001"

        async def change(method: str, suffix: str, body: Manifest | None) -> Any:
            status, told = await asyncio.to_thread(server.ask, method, path + suffix, body, "admintoken")
            assert status in (200, 201), told
            return told

        await _until(seen, [])
        made = await change("POST", "", slice_of(("10.1.0.1", True, False), ("10.1.0.2", False, False)))
        await _until(seen, [Listed(first), Listed(second, Standing.WAITING)])
        ending = slice_of(("10.1.0.1", True, True), ("10.1.0.2", True, False))
        ending["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        await change("PUT", f"/{SERVICE}-1", ending)
        await _until(seen, [Listed(first, Standing.ENDING), Listed(second)])
        await change("DELETE", f"/{SERVICE}-1", None)
        await _until(seen, [])
        say("watch: replicas that come, get ready, end and go were seen by the gateway's account")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(seen: asyncio.Queue[list[Listed]], expected: list[Listed]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (members := await seen.get()) != expected:
            assert members != expected


def _sorted(members: Sequence[Listed]) -> list[Listed]:
    return sorted(members, key=lambda member: member.url)


def refused(server: Server, token: str, say: Callable[[str], None]) -> None:
    """What the account may not do."""
    mine = f"{GROUP}/namespaces/{NAMESPACE}/endpointslices"
    asked = [
        ("GET", f"{GROUP}/namespaces/kube-system/endpointslices", None),
        ("GET", f"{GROUP}/endpointslices", None),
        ("POST", mine, slice_of()),
        ("DELETE", f"{mine}/{SERVICE}-1", None),
        ("GET", f"{mine}/{SERVICE}-1", None),
        ("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", None),
    ]
    for method, path, body in asked:
        status, _ = server.ask(method, path, body, token)
        assert status == 403, f"{method} {path}: {status}"
    say(f"watch: {len(asked)} other requests of that account were refused")

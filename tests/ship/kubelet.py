"""A node that runs pods: what a scheduler, a kubelet, a cluster's DNS and its proxy do for one namespace.

The API server and its controllers are real, the containers are podman's, of images that `tests/ship/run.sh`
builds. Each pod is bound and run as its manifest says: command, variables, files of ConfigMaps and Secrets,
empty volumes, user, read-only root, bound of memory. Its probes decide when it is ready; when it is deleted,
its `preStop` runs, then it gets SIGTERM, and is killed at the end of its grace.

Names and the Service follow the Endpoints that the controllers make of that: names of StatefulSets' pods are
in a file of hosts that all containers have, and a Service is a listener that chooses a pod for each
connection. The listener learns of changes `LAG_S` late, as proxies of a cluster do. Open connections stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.ship.rendering import Manifest
from tests.ship.stand_in import Api

NETWORK: Final = "penstock-kube"
SUBNET: Final = "10.89.77.0/24"
ROUTER: Final = "10.89.77.1"
"""This machine's address among the pods; the Service listens there."""
SERVICE_PORT: Final = 80
TARGET_PORT: Final = 8000
PERIOD_S: Final = 0.2
LAG_S: Final = 2.0
END_PERIOD_S: Final = 1.0
BEAT_S: Final = 5.0
COMMAND_S: Final = 120.0


def podman(*words: str, check: bool = True) -> str:
    """podman's answer."""
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=COMMAND_S)
    assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


class Pod:
    """One pod, from its binding to its end, in a thread of its own."""

    def __init__(self, node: Kubelet, manifest: Manifest) -> None:
        head = manifest["metadata"]
        self.name: str = head["name"]
        self.uid: str = head["uid"]
        self.component: str = head["labels"]["app.kubernetes.io/component"]
        self.container: Final = f"{node.namespace}-{self.name}-{self.uid[:8]}"
        self.was_killed = False
        """True if it did not end within its grace."""
        self.is_leaving: Final = threading.Event()
        self._node = node
        self._manifest = manifest
        self._spec: Manifest = manifest["spec"]
        [self._main] = self._spec["containers"]
        self._address = ""
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    # -- its life ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._node.api.bind(self._node.namespace, self._manifest)
            podman(
                "run", "-d", "--name", self.container, *self._options(), self._main["image"], *self._words()
            )
            self._address = podman(
                "inspect",
                "--format",
                "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}",
                self.container,
            )
            self._report(is_ready=False)
            if self._spec.get("restartPolicy") == "Never":
                self._finish()
            else:
                self._serve()
        except Exception as error:
            self._node.failures.append(f"{self.name}: {error}")
            self.is_leaving.wait()
        finally:
            self._node.keep_log(self)
            podman("rm", "-f", "-t", "0", self.container, check=False)
            if self.is_leaving.is_set():
                self._node.api.end(self._node.namespace, self._manifest)

    def _serve(self) -> None:
        probe = self._main["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self.is_leaving.is_set() or self._probes(probe):
                break
            time.sleep(probe["periodSeconds"])
        else:
            raise AssertionError("it has not started within the time of its startup probe")
        was_ready, misses = False, 0
        while not self.is_leaving.is_set():
            probe = self._main["readinessProbe"]
            misses = 0 if self._probes(probe) else misses + 1
            is_ready = misses < probe["failureThreshold"] and (was_ready or misses == 0)
            if is_ready != was_ready:
                self._report(is_ready=is_ready)
            was_ready = is_ready
            assert self._state("Running") == "true", f"it ended with {self._state('ExitCode')}"
            self.is_leaving.wait(probe["periodSeconds"])
        self._end()

    def _end(self) -> None:
        """The wait before the end, SIGTERM, and the kill once the grace has passed."""
        deadline_s = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        hook = self._main.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook is not None:
            podman("exec", self.container, *hook["command"], check=False)
        podman("kill", "--signal", "TERM", self.container, check=False)
        while self._state("Running") == "true":
            if time.monotonic() > deadline_s:
                self.was_killed = True
                return
            time.sleep(END_PERIOD_S)

    def _finish(self) -> None:
        """Wait for the end of what ends by itself, as a Job's does."""
        while self._state("Running") == "true" and not self.is_leaving.is_set():
            time.sleep(END_PERIOD_S)
        code = int(self._state("ExitCode"))
        ended = {"phase": "Failed" if code else "Succeeded"}
        self._node.api.patch_status(self._node.namespace, self._manifest, ended)
        self.is_leaving.wait()

    def _state(self, field: str) -> str:
        return podman("inspect", "--format", f"{{{{.State.{field}}}}}", self.container)

    def _probes(self, probe: Manifest) -> bool:
        ports = {one["name"]: one["containerPort"] for one in self._main["ports"]}
        get = probe["httpGet"]
        url = f"http://{self._address}:{ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]):
                return True
        except OSError:
            return False

    def _report(self, *, is_ready: bool) -> None:
        self._node.api.report(self._node.namespace, self._manifest, self._address, is_ready=is_ready)

    # -- how it is run ----------------------------------------------------------------------------

    def _words(self) -> list[str]:
        return [*self._main.get("command", [])[1:], *self._main.get("args", [])]

    def _options(self) -> Iterator[str]:
        pod, own = self._spec["securityContext"], self._main["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        yield from ("--network", NETWORK, "--no-hosts", "--hostname", self._spec.get("hostname", self.name))
        yield from ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
        yield from ("--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--no-healthcheck")
        yield from ("--memory", str(self._bytes(self._main["resources"]["limits"]["memory"])))
        yield from ("--volume", f"{self._node.hosts}:/etc/hosts:ro")
        if command := self._main.get("command"):
            yield from ("--entrypoint", json.dumps(command[:1]))
        for variable in self._main.get("env", []):
            yield from ("--env", f"{variable['name']}={self._value(variable)}")
        volumes = {one["name"]: one for one in self._spec.get("volumes", [])}
        for mount in self._main.get("volumeMounts", []):
            yield from self._mounted(volumes[mount["name"]], mount["mountPath"])

    @staticmethod
    def _bytes(quantity: str) -> int:
        return int(quantity[:-2]) << {"Ki": 10, "Mi": 20, "Gi": 30}[quantity[-2:]]

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        wanted = variable["valueFrom"]["secretKeyRef"]
        return self._node.secret(wanted["name"])[wanted["key"]]

    def _mounted(self, volume: Manifest, path: str) -> Iterator[str]:
        if "emptyDir" in volume:
            size = self._bytes(volume["emptyDir"].get("sizeLimit", "64Mi"))
            yield from ("--tmpfs", f"{path}:size={size},mode=1777")
            return
        if "configMap" in volume:
            files = self._node.config_map(volume["configMap"]["name"])
        else:
            files = self._node.secret(volume["secret"]["secretName"])
            if items := volume["secret"].get("items"):
                files = {one["path"]: files[one["key"]] for one in items}
        folder = self._node.folder / self.container / volume["name"]
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o444)
        for one in (folder, folder.parent):
            one.chmod(0o755)
        yield from ("--volume", f"{folder}:{path}:ro")


class Kubelet:
    """`with Kubelet(kubeconfig, namespace, folder, service) as node:` runs its pods."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path, service: str) -> None:
        self.api: Final = Api(kubeconfig)
        self.namespace: Final = namespace
        self.folder: Final = folder
        self.hosts: Final = folder / "hosts"
        self.logs: Final = folder / "logs"
        self.failures: Final[list[str]] = []
        self.ended: Final[list[Pod]] = []
        self._service = service
        self._pods: dict[str, Pod] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet")
        self._proxy = ServiceProxy(self._ready_addresses)

    def __enter__(self) -> Kubelet:
        self.logs.mkdir()
        self.folder.chmod(0o755)
        self._write_hosts([])
        podman("network", "rm", "-f", NETWORK, check=False)
        podman("network", "create", "--disable-dns", "--subnet", SUBNET, "--gateway", ROUTER, NETWORK)
        self._thread.start()
        return self

    def serve(self) -> str:
        """Listen for the Service, once a pod has brought the network up. Returns its URL."""
        self._proxy.start()
        return f"http://{ROUTER}:{SERVICE_PORT}"

    def __exit__(self, *_: object) -> None:
        sys.stderr.write("".join(f"{failure}\n" for failure in self.failures))
        self._stop.set()
        self._thread.join()
        self._proxy.stop()
        for pod in self._pods.values():
            pod.is_leaving.set()
            podman("kill", pod.container, check=False)
        for pod in self._pods.values():
            pod.join()
        podman("network", "rm", "-f", NETWORK, check=False)

    def secret(self, name: str) -> dict[str, str]:
        """The texts of a Secret."""
        found = self.api.get(self.namespace, "secrets", name)
        return {key: b64decode(text).decode() for key, text in found["data"].items()}

    def config_map(self, name: str) -> dict[str, str]:
        """The texts of a ConfigMap."""
        found: dict[str, str] = self.api.get(self.namespace, "configmaps", name)["data"]
        return found

    def keep_log(self, pod: Pod) -> None:
        """Keep what a container said."""
        done = subprocess.run(
            ["podman", "logs", pod.container], capture_output=True, text=True, timeout=COMMAND_S
        )
        (self.logs / f"{pod.container}.log").write_text(done.stdout + done.stderr)

    def uids(self) -> dict[str, str]:
        """The pods that stay: name to uid."""
        return {pod.name: uid for uid, pod in self._pods.items() if not pod.is_leaving.is_set()}

    def _run(self) -> None:
        beaten_s = -BEAT_S
        while not self._stop.wait(PERIOD_S):
            with contextlib.suppress(OSError):  # a busy server is asked again
                if time.monotonic() > beaten_s + BEAT_S:
                    self.api.beat()
                    beaten_s = time.monotonic()
                self._look()

    def _look(self) -> None:
        there = {one["metadata"]["uid"]: one for one in self.api.items(self.namespace, "pods")}
        for uid, manifest in there.items():
            if uid not in self._pods:
                self._pods[uid] = Pod(self, manifest)
            if "deletionTimestamp" in manifest["metadata"]:
                self._pods[uid].is_leaving.set()
        for uid in self._pods.keys() - there.keys():
            pod = self._pods.pop(uid)
            pod.is_leaving.set()
            self.ended.append(pod)
        self._write_hosts(self._named())

    def _endpoints(self) -> Iterator[tuple[str, Manifest]]:
        """Addresses that are ready, with the Services that they are of."""
        for one in self.api.items(self.namespace, "endpoints"):
            for subset in one.get("subsets") or ():
                for address in subset.get("addresses") or ():
                    yield one["metadata"]["name"], address

    def _named(self) -> list[tuple[str, str]]:
        """Names of pods in their Services, with addresses."""
        domain = f"{self.namespace}.svc.cluster.local"
        return [
            (address["ip"], f"{address['hostname']}.{service}.{domain}")
            for service, address in self._endpoints()
            if "hostname" in address
        ]

    def _write_hosts(self, named: list[tuple[str, str]]) -> None:
        """In place: containers have this very file."""
        lines = [("127.0.0.1", "localhost"), (ROUTER, self._service), *sorted(named)]
        text = "".join(f"{address} {name}\n" for address, name in lines)
        if not self.hosts.exists() or self.hosts.read_text() != text:
            self.hosts.write_text(text)

    def _ready_addresses(self) -> list[str]:
        return [address["ip"] for service, address in self._endpoints() if service == self._service]


class ServiceProxy:
    """Listens at the router's address for a Service, and hands each connection to a pod that is ready."""

    def __init__(self, addresses: Callable[[], list[str]]) -> None:
        self._addresses = addresses
        self._known: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, once the network is there."""
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)), name="service")
        self._thread.start()
        assert is_up.wait(COMMAND_S)

    def stop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    async def _serve(self, is_up: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, ROUTER, SERVICE_PORT)
        learning = asyncio.create_task(self._learn())
        is_up.set()
        await self._end.wait()
        learning.cancel()
        server.close()

    async def _learn(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._known = await asyncio.to_thread(self._addresses)
            await asyncio.sleep(LAG_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            address = random.choice(self._known)
            there, back = await asyncio.open_connection(address, TARGET_PORT)
        except (OSError, IndexError):
            writer.close()
            return
        await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()

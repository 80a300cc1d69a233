"""Plays the one node of a cluster: its kubelet, and the addresses of its services.

Each pod that the API server has is bound to this node, and its container is started as a
process of this machine under an address of its own; the pod's status says so, and whether its
readiness probe passes. A pod that is deleted is ended as Kubernetes does it, and then gone.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.deploy import here
from tests.deploy.installed.api_client import ApiClient
from tests.deploy.installed.api_server import kubeconfig
from tests.deploy.installed.newer_api import told
from tests.deploy.kubelet import Kubelet, RunningPod
from tests.unit.deploy.chart import Manifest, Pod

NAME = "here"
ZONE = "zone-of-this-machine"
_LOOK_S = 0.5
_PROBE_S = 2.0  # a kubelet's is the probe's own, which would be long to wait for here
_TEST_S = 150.0


class Node:
    """Runs the pods of one namespace. Owns their processes: ``run`` leaves none of them."""

    def __init__(self, api: ApiClient, url: str, namespace: str, kubelet: Kubelet) -> None:
        """``api`` is the server itself; ``url`` where pods find the one that the chart is for.

        They are told by the file that KUBECONFIG of ``kubelet.variables`` names.
        """
        self.running: dict[str, RunningPod] = {}  # that serve, by name
        self.ended: dict[str, here.Done] = {}  # that ran to their end, by name
        self._api = api
        self._url = url
        self._namespace = namespace
        self._kubelet = kubelet
        self._config = Path(kubelet.variables["KUBECONFIG"])
        self._deleted: dict[str, asyncio.Event] = {}  # of each pod that is seen to, by uid

    @property
    def pods_path(self) -> str:
        """Where the API server has the namespace's pods."""
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def run(self) -> None:
        """See to all pods, until cancelled."""
        await self._register()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for pod in await self._api.items(self.pods_path):
                    uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
                    if uid not in self._deleted:
                        self._deleted[uid] = asyncio.Event()
                        tasks.create_task(self._live(pod, self._deleted[uid]), name=name)
                    if "deletionTimestamp" in pod["metadata"]:
                        self._deleted[uid].set()
                await asyncio.sleep(_LOOK_S)

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": NAME, "topology.kubernetes.io/zone": ZONE}
        node = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": NAME, "labels": labels}}
        await self._api.post("/api/v1/nodes", node)

    async def _live(self, kept: Manifest, deleted: asyncio.Event) -> None:
        found = told(kept)
        name = found["metadata"]["name"]
        if not found["spec"].get("nodeName"):
            target = {"kind": "Node", "name": NAME}
            binding = {"metadata": {"name": name}, "target": target}
            await self._api.post(f"{self.pods_path}/{name}/binding", binding)
        pod = Pod(f"here: Pod {name}", found, found["metadata"]["labels"], found["spec"])
        if pod.spec["restartPolicy"] == "Never":
            await self._run_once(pod, deleted)
        else:
            await self._serve(pod, deleted)
        gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": found["metadata"]["uid"]}}
        await self._api.delete(f"{self.pods_path}/{name}", gone)

    async def _serve(self, pod: Pod, deleted: asyncio.Event) -> None:
        """Until it is deleted. Raises AssertionError: it ended before, or badly."""
        name = pod.manifest["metadata"]["name"]
        if pod.spec.get("automountServiceAccountToken"):
            await self._give_token(pod.spec["serviceAccountName"])
        running = await self._kubelet.start(name, pod, await self._settings(pod))
        self.running[name] = running
        try:
            told, was_ready = None, False
            while not deleted.is_set():
                assert running.process.returncode is None, f"{name}: {running.last_lines}"
                is_ready = await running.passes("readinessProbe")
                if is_ready != told:
                    told, was_ready = is_ready, was_ready or is_ready
                    await self._tell(pod, _status(pod, "Running", running.ip, is_ready=is_ready))
                await _wait(deleted, _PROBE_S)
            code = await self._kubelet.stop(running)
            may_end = (0,) if was_ready else (0, -signal.SIGTERM)  # one that starts has no handler
            assert code in may_end, f"{name} ended with {code}: {running.last_lines}"
        finally:
            await self._kubelet.kill(running)
            del self.running[name]

    async def _run_once(self, pod: Pod, deleted: asyncio.Event) -> None:
        """What a test's pod is asked to do, in this machine's names."""
        await self._tell(pod, _status(pod, "Running", self._kubelet.ip(1), is_ready=True))
        metadata, args = pod.manifest["metadata"], []
        for arg in pod.container["args"]:
            known = str(arg).replace("$(POD_UID)", metadata["uid"])
            args.append(await self._with_addresses(known))
        done = await asyncio.to_thread(here.run, args, _TEST_S)
        self.ended[metadata["name"]] = done
        phase = "Failed" if done.returncode else "Succeeded"
        await self._tell(pod, _status(pod, phase, self._kubelet.ip(1), is_ready=False))
        await deleted.wait()

    async def _with_addresses(self, arg: str) -> str:
        """A flag with the addresses that DNS would have of the services in it."""
        flag, equals, value = arg.partition("=")
        if not equals or not flag.startswith("--"):
            return arg
        found: list[str] = []
        for each in value.split(","):
            service, _, port = each.partition(":")
            hosts = await self._addresses(service) if port.isdigit() else ()
            found += [f"{host}:{port}" for host in hosts] or [each]
        return f"{flag}={','.join(found)}"

    async def _addresses(self, service: str) -> Sequence[str]:
        """A service's own, or those of its pods where it has none; empty: there is no such."""
        try:
            spec = await self._api.get(f"/api/v1/namespaces/{self._namespace}/services/{service}")
        except httpx.HTTPStatusError:
            return ()
        address = str(spec["spec"]["clusterIP"])
        return await self.ready_hosts(service) if address == "None" else (address,)

    async def ready_hosts(self, service: str) -> Sequence[str]:
        """The pods that the service's endpoints name."""
        path = f"/api/v1/namespaces/{self._namespace}/endpoints/{service}"
        subsets = (await self._api.get(path)).get("subsets", [])
        return [each["ip"] for subset in subsets for each in subset.get("addresses", [])]

    async def _settings(self, pod: Pod) -> Mapping[str, object]:
        (volume,) = [each for each in pod.spec["volumes"] if each["name"] == "settings"]
        name = volume["configMap"]["name"]
        found = await self._api.get(f"/api/v1/namespaces/{self._namespace}/configmaps/{name}")
        return dict(json.loads(found["data"]["settings.yaml"]))

    async def _give_token(self, account: str) -> None:
        """The file by which its pods speak to the API as this account, with no other rights."""
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = (await self._api.post(path, asked))["status"]["token"]
        config = json.dumps(kubeconfig(self._url, token, self._namespace))
        await asyncio.to_thread(self._config.write_text, config)

    async def _tell(self, pod: Pod, status: Mapping[str, object]) -> None:
        """What became of a pod; nothing, if that is gone."""
        path = f"{self.pods_path}/{pod.manifest['metadata']['name']}/status"
        await self._api.patch(path, {"status": status})


async def _wait(event: asyncio.Event, patience_s: float) -> None:
    """Until it is set, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await event.wait()


def _status(pod: Pod, phase: str, ip: str, *, is_ready: bool) -> dict[str, object]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state: dict[str, object] = {"running": {"startedAt": now}}
    if phase in ("Succeeded", "Failed"):
        code = 0 if phase == "Succeeded" else 1
        state = {"terminated": {"exitCode": code, "finishedAt": now, "startedAt": now}}
    ready = "True" if is_ready else "False"
    values = {"Initialized": "True", "PodScheduled": "True", "Ready": ready}
    conditions = [
        {"type": kind, "status": value, "lastTransitionTime": now}
        for kind, value in {**values, "ContainersReady": ready}.items()
    ]
    container = {
        "name": pod.container["name"],
        "image": pod.container["image"],
        "imageID": "",
        "ready": is_ready,
        "restartCount": 0,
        "started": True,
        "state": state,
    }
    return {
        "phase": phase,
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "hostIP": ip,
        "startTime": now,
        "conditions": conditions,
        "containerStatuses": [container],
    }

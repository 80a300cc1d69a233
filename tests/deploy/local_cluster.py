"""All pods of a rendering on this machine, and what a cluster's controllers do with them.

Pods come, go and are replaced as StatefulSets and Deployments do it; endpoints are told
by an API server, as a Service says which count; the routers' Service has one address.
"""

import asyncio
import json
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import here
from tests.deploy.kubelet import Kubelet, RunningPod
from tests.deploy.service_address import ServiceAddress, service_address
from tests.integration.kube_api import KubeApi, kube_api
from tests.unit.deploy.chart import Manifest, Pod, named, pods_of

SERVICE_HOST = 1  # of the routers' Service, in the kubelet's network
_READY_S = 600.0
_LOOK_S = 0.2
# Many pods share few cores here: who is slow is not taken for lost, which would end it.
PATIENCE = {f"DIPTYCH_{role}_TIMERS__LOST_PEER_S": "60" for role in ("ROUTER", "PREFILL", "DECODE")}


class Group(NamedTuple):
    """The pods of one Deployment or StatefulSet."""

    pod: Pod
    settings: dict[str, object]

    @property
    def name(self) -> str:
        return str(self.pod.manifest["metadata"]["name"])

    @property
    def is_router(self) -> bool:
        return self.pod.command == "router"

    @property
    def headless(self) -> str:
        """The service whose name has the address of each pod."""
        return f"{self.name}-headless" if self.is_router else self.name


class LocalCluster:
    """The pods of one rendering; owns them until ``close``."""

    def __init__(
        self,
        manifests: Sequence[Manifest],
        kubelet: Kubelet,
        api: KubeApi,
        routers: ServiceAddress,
        address: str,
    ) -> None:
        self.address = address  # of the routers' Service
        self.running: dict[str, list[RunningPod]] = defaultdict(list)  # by group
        self._manifests = manifests
        self._kubelet = kubelet
        self._api = api
        self._routers = routers
        self._test, self.groups = _groups(manifests)

    async def start(self) -> None:
        """As many of each as its manifest says, all at once."""
        for group in self.groups.values():
            for _ in range(group.pod.manifest["spec"]["replicas"]):
                await self._add(group)
        for group in self.groups.values():
            await self._all_ready(group)

    async def scale(self, name: str, replicas: int) -> None:
        """As many pods of that group; of a StatefulSet the last go first."""
        group = self.groups[name]
        while len(self.running[name]) < replicas:
            await self._add(group)
        await self._all_ready(group)
        while len(self.running[name]) > replicas:
            await self._remove(group, max(self.running[name], key=lambda pod: pod.name))

    async def roll_out(self, name: str) -> None:
        """Replace each pod as the group's strategy says: a router is added before one goes."""
        group = self.groups[name]
        for old in reversed(self.running[name].copy()):
            if group.is_router:
                await self._add(group)
                await self._all_ready(group)
                await self._remove(group, old)
            else:
                await self._remove(group, old)
                await self._add(group, old.name)
                await self._all_ready(group)

    async def test(self) -> here.Done:
        """Run what `helm test` runs, as a new pod."""
        uid, service = str(uuid.uuid4()), f"{self.router.name}:{self.address.rpartition(':')[2]}"
        folder = self._kubelet.folder / f"test-{uid}"
        args = [
            self._named_here(arg).replace("$(POD_UID)", uid).replace(service, self.address)
            for arg in here.with_secrets(self._test, folder, self._kubelet.secrets)
        ]
        return await asyncio.to_thread(here.run, args, 100)

    @property
    def router(self) -> Group:
        """The routers' Deployment."""
        (found,) = [group for group in self.groups.values() if group.is_router]
        return found

    def group(self, role: str) -> Group:
        """The one pool of that role."""
        (found,) = [group for group in self.groups.values() if group.pod.command == role]
        return found

    async def close(self) -> None:
        """Leave nothing running."""
        for running in [pod for group in self.running.values() for pod in group]:
            await self._kubelet.kill(running)

    async def end(self) -> dict[str, int]:
        """End all pods at once; their exit codes by name. Raises TimeoutError, see Kubelet.stop."""
        everything = [pod for group in self.running.values() for pod in group]
        async with asyncio.TaskGroup() as tasks:
            stops = {pod.name: tasks.create_task(self._kubelet.stop(pod)) for pod in everything}
        return {name: stop.result() for name, stop in stops.items()}

    def _named_here(self, arg: str) -> str:
        """A flag with the addresses that DNS would have for the headless services in it."""
        flag, _, names = arg.partition("=")
        if flag != "--expect-trace":
            return arg
        known = {group.headless: group.name for group in self.groups.values()}
        found = []
        for name in names.split(","):
            host, _, port = name.partition(":")
            found += [f"{pod.ip}:{port}" for pod in self.running[known[host]]]
        return f"{flag}={','.join(found)}"

    async def _add(self, group: Group, name: str | None = None) -> None:
        number = len(self.running[group.name])
        pod_name = name or f"{group.name}-{uuid.uuid4().hex[:5] if group.is_router else number}"
        pod = await self._kubelet.start(pod_name, group.pod, group.settings)
        self.running[group.name].append(pod)
        await self._tell(group)

    async def _remove(self, group: Group, pod: RunningPod) -> None:
        """Balancers look away at once; a worker keeps its name until it is gone."""
        if group.is_router:
            self._routers.pods.remove(pod.address)
        code = await self._kubelet.stop(pod)
        assert code == 0, f"{pod.name} ended with {code}: {pod.last_lines}"
        self.running[group.name].remove(pod)
        await self._tell(group)

    async def _tell(self, group: Group) -> None:
        """What the controller of EndpointSlices says of a headless service."""
        if group.is_router:
            return
        service = str(group.pod.manifest["spec"]["serviceName"])
        spec = named(self._manifests, "Service", service)["spec"]
        assert spec["publishNotReadyAddresses"], "or slices would say who is ready"
        ips = [pod.ip for pod in self.running[group.name]]
        await self._api.put(f"{service}-x1", service, spec["ports"][0]["port"], *ips)

    async def _all_ready(self, group: Group) -> None:
        """Wait for all pods of a group; a router that is ready is given connections."""
        for pod in self.running[group.name]:
            await self._ready(pod)
            if group.is_router and pod.address not in self._routers.pods:
                self._routers.pods.append(pod.address)

    async def _ready(self, pod: RunningPod) -> None:
        try:
            async with asyncio.timeout(_READY_S):
                while not await pod.passes("readinessProbe"):
                    assert pod.process.returncode is None, f"{pod.name}: {pod.last_lines}"
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise AssertionError(f"{pod.name} is not ready: {pod.last_lines}") from None


async def metric(pod: RunningPod, name: str, **labels: str) -> float:
    """A gauge or counter of a pod, by its metrics port; the sum of all that have these labels."""
    url = f"http://{pod.ip}:{pod.port('metrics')}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


def _groups(manifests: Sequence[Manifest]) -> tuple[Pod, dict[str, Group]]:
    """The pod of `helm test`, and all others by the name of what makes them."""
    groups = {}
    for pod in pods_of(manifests, "here"):
        if pod.command == "generate":
            test = pod
            continue
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "settings"]
        found = named(manifests, "ConfigMap", volume["configMap"]["name"])
        group = Group(pod, json.loads(found["data"]["settings.yaml"]))
        groups[group.name] = group
    return test, groups


@asynccontextmanager
async def local_cluster(
    manifests: Sequence[Manifest], folder: Path, secrets: here.Secrets | None = None
) -> AsyncIterator[LocalCluster]:
    """All pods ready; nothing is left of them at the end."""
    async with kube_api(folder) as (api, kubeconfig):
        variables = {"KUBECONFIG": str(kubeconfig), **PATIENCE}
        kubelet = Kubelet(folder, variables, secrets=secrets or {})
        router = next(p for p in pods_of(manifests, "here") if p.command == "router")
        service = named(manifests, "Service", router.manifest["metadata"]["name"])
        host, port = kubelet.ip(SERVICE_HOST), service["spec"]["ports"][0]["port"]
        async with service_address(host, port) as routers:
            cluster = LocalCluster(manifests, kubelet, api, routers, f"{host}:{port}")
            try:
                await cluster.start()
                yield cluster
            finally:
                await cluster.close()

"""Plays kube-proxy: each service that has an address of its own leads to its ready pods.

As a process of its own (``kube_proxy``), for clients' connections go through it: whatever else a
test does, they are not kept waiting.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.deploy.installed.api_client import ApiClient
from tests.deploy.service_address import ServiceAddress, service_address
from tests.unit.deploy.chart import ROOT, Manifest

_LOOK_S = 0.5
_TOKEN = "API_TOKEN"


class _Served:
    """One service: where each of its ports leads, by name, until it is gone."""

    def __init__(self, service: Manifest) -> None:
        self.name = str(service["metadata"]["name"])
        self.host = str(service["spec"]["clusterIP"])
        self.ports = {str(port["name"]): int(port["port"]) for port in service["spec"]["ports"]}
        self.addresses: dict[str, ServiceAddress] = {}
        self.is_gone = asyncio.Event()

    async def serve(self, name: str) -> None:
        """One port of it."""
        async with service_address(self.host, self.ports[name]) as address:
            self.addresses[name] = address
            await self.is_gone.wait()

    def leads_to(self, subsets: Sequence[Manifest]) -> None:
        """Connections that come now go to these."""
        for name, address in self.addresses.items():
            address.pods[:] = [
                f"{host['ip']}:{port['port']}"
                for subset in subsets
                for port in subset["ports"]
                if port["name"] == name
                for host in subset.get("addresses") or ()
            ]


class Services:
    """The services of one namespace. Knows of pods what the endpoints say."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}"
        self._served: dict[str, _Served] = {}  # by uid

    async def run(self) -> None:
        """Serve all that there are, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = await self._api.items(f"{self._path}/services")
                named = {each["metadata"]["uid"]: each for each in found}
                for uid, service in named.items():
                    if service["spec"]["clusterIP"] != "None" and uid not in self._served:
                        served = self._served[uid] = _Served(service)
                        for port in served.ports:
                            tasks.create_task(served.serve(port))
                for uid in self._served.keys() - named.keys():
                    self._served.pop(uid).is_gone.set()
                listed = await self._api.items(f"{self._path}/endpoints")
                subsets = {each["metadata"]["name"]: each.get("subsets") or () for each in listed}
                for served in self._served.values():
                    served.leads_to(subsets.get(served.name, ()))
                await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def kube_proxy(url: str, token: str, namespace: str) -> AsyncIterator[None]:
    """The services of a namespace of the server at ``url``; gone at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.deploy.installed.services", url, namespace),
        cwd=ROOT,
        env={**os.environ, _TOKEN: token},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve(url: str, token: str, namespace: str) -> None:
    async with ApiClient(url, token) as api:
        await Services(api, namespace).run()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], os.environ[_TOKEN], sys.argv[2]))

"""helm 4 installs values-cpu into a real API server; it is scaled, upgraded and taken away again.

Pods are processes of this machine, in a network that the run has for itself: `make chart-long`.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from diptych.client import DiptychClient
from tests.deploy.helm import HELM_4, run_helm
from tests.deploy.installed.api_client import ApiClient
from tests.deploy.installed.api_server import NETWORK, api_server, kubeconfig
from tests.deploy.installed.build import BINARIES
from tests.deploy.installed.newer_api import newer_api
from tests.deploy.installed.node import Node
from tests.deploy.installed.services import kube_proxy
from tests.deploy.kubelet import Kubelet, RunningPod
from tests.deploy.load import Answer, ask, decoded_on, eventually, load, prefilled_on, routers_know
from tests.deploy.local_cluster import PATIENCE
from tests.unit.deploy.chart import CHART, NAMESPACE, RELEASE, VALUES


def _is_alone() -> bool:
    """Whether this network has the addresses that `make chart-long` gives to its own."""
    with socket.socket() as at, suppress(OSError):
        at.bind(("10.98.0.1", 0))
        return True
    return False


pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not _is_alone(), reason="needs a network of its own: make chart-long"),
]

_HELM_S = 1200
_WAIT = ("--wait", f"--timeout={_HELM_S}s")
# The server's schemas are older than what is sent: `make chart` holds it to those of its time.
_CHART = (
    *(RELEASE, str(CHART), "--disable-openapi-validation"),
    *(f"--values={path}" for path in VALUES["cpu"]),
)
_CORE, _APPS = f"/api/v1/namespaces/{NAMESPACE}", f"/apis/apps/v1/namespaces/{NAMESPACE}"
# What a release may leave nothing of; but what Kubernetes puts into every namespace.
_KINDS = (
    *(f"{_CORE}/{kind}" for kind in ("pods", "services", "endpoints", "persistentvolumeclaims")),
    *(f"{_CORE}/{kind}" for kind in ("configmaps", "secrets", "serviceaccounts")),
    *(f"{_APPS}/{kind}" for kind in ("deployments", "replicasets", "statefulsets")),
    f"{_APPS}/controllerrevisions",
    f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets",
    f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices",
    f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
    f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
    f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
)


class Installation(NamedTuple):
    """An API server, what plays its node, and who installs into it."""

    api: ApiClient
    node: Node
    config: Path

    async def helm(self, *args: str) -> str:
        """What it said. Raises AssertionError: it failed."""
        flags = (f"--kubeconfig={self.config}", f"--namespace={NAMESPACE}")
        done = await asyncio.to_thread(run_helm, HELM_4, *args, *flags, timeout_s=_HELM_S)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def pods(self, role: str) -> list[RunningPod]:
        """Those of a role that run."""
        return [pod for pod in self.node.running.values() if pod.pod.command == role]

    async def address(self) -> str:
        """Of the routers' service."""
        service = await self.api.get(f"{_CORE}/services/{RELEASE}-diptych-router")
        return f"{service['spec']['clusterIP']}:50051"

    async def left(self) -> list[str]:
        """Whatever there is in the namespace, but what is in every one."""
        found = []
        for path in _KINDS:
            names = [each["metadata"]["name"] for each in await self.api.items(path)]
            own = (f"{RELEASE}-", "sh.helm.release.")
            found += [f"{path}/{name}" for name in names if name.startswith(own)]
        return found


@asynccontextmanager
async def _installation(folder: Path) -> AsyncIterator[Installation]:
    pods_config, config = folder / "pods.json", folder / "installer.json"
    async with (
        api_server(BINARIES, folder) as server,
        newer_api(server.url, folder) as url,
        ApiClient(url, server.token) as api,
        ApiClient(server.url, server.token) as itself,
        kube_proxy(server.url, server.token, NAMESPACE),
    ):
        await api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        config.write_text(json.dumps(kubeconfig(url, server.token, NAMESPACE)))
        variables = {"KUBECONFIG": str(pods_config), **PATIENCE}
        node = Node(itself, url, NAMESPACE, Kubelet(folder, variables, f"{NETWORK}.1"))
        async with asyncio.TaskGroup() as tasks:
            played = tasks.create_task(node.run())
            try:
                yield Installation(api, node, config)
            finally:
                played.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Installation]:
    async with _installation(tmp_path_factory.mktemp("installed")) as installation:
        await installation.helm("install", *_CHART, *_WAIT)
        yield installation


async def test_all_that_is_installed_gets_ready_and_routers_find_the_workers(
    installed: Installation,
) -> None:
    for role in ("router", "prefill", "decode"):
        assert len(installed.pods(role)) == 2
    for role in ("prefill", "decode"):
        await routers_know(installed.pods("router"), role, 2)


async def test_helm_test_passes(installed: Installation) -> None:
    await installed.helm("test", RELEASE, "--timeout=180s")
    (done,) = installed.node.ended.values()
    assert "KV pulled" in done.stderr


async def test_more_and_fewer_workers_are_followed(installed: Installation) -> None:
    path = f"{_APPS}/statefulsets/{RELEASE}-diptych-decode-main/scale"
    async with load(await installed.address(), num_clients=4) as answers:
        await installed.api.patch(path, {"spec": {"replicas": 3}})
        await routers_know(installed.pods("router"), "decode", 3)
        new = installed.node.running[f"{RELEASE}-diptych-decode-main-2"]

        async def is_used() -> bool:
            return new.address in decoded_on(answers)

        await eventually(is_used, "the new worker decodes")
        await installed.api.patch(path, {"spec": {"replicas": 2}})
        await routers_know(installed.pods("router"), "decode", 2)
        num_before = len(answers)
    assert new.address not in decoded_on(answers[num_before + 4 :]), "four were under way"


def _addresses(pods: Sequence[RunningPod]) -> set[str]:
    return {pod.address for pod in pods}


async def _replaces_all(installed: Installation, *helm: str) -> None:
    """Run it under load: every pod is another one afterwards, and no request was dropped."""
    roles = ("router", "prefill", "decode")
    before = {role: _addresses(installed.pods(role)) for role in roles}
    async with load(await installed.address()) as answers:
        await installed.helm(*helm, *_WAIT)

        async def are_replaced() -> bool:
            now = {role: _addresses(installed.pods(role)) for role in roles}
            return all(len(now[role]) == 2 and not now[role] & before[role] for role in roles)

        await eventually(are_replaced, "every pod was replaced")
    _used_before_and_after(answers, before, installed)
    async with DiptychClient(await installed.address(), retries=0) as client:
        for answer in (answers[0], answers[-1]):
            assert (await ask(client, answer.prompt)).text == answer.text


def _used_before_and_after(
    answers: list[Answer], before: dict[str, set[str]], installed: Installation
) -> None:
    for role, used in (("prefill", prefilled_on(answers)), ("decode", decoded_on(answers))):
        assert used & before[role], f"no {role} worker of before"
        assert used & _addresses(installed.pods(role)), f"no {role} worker of after"


async def test_an_upgrade_drops_no_request(installed: Installation) -> None:
    """A setting of every group is another one, so all pods are replaced, a group's one by one."""
    changed = [f"{role}.settings.log_level=warning" for role in ("router", "prefill", "decode")]
    await _replaces_all(installed, "upgrade", *_CHART, f"--set={','.join(changed)}")
    named = await installed.api.get(f"{_CORE}/configmaps/{RELEASE}-diptych-router")
    assert json.loads(named["data"]["settings.yaml"])["log_level"] == "warning"


async def test_a_rollback_drops_no_request(installed: Installation) -> None:
    await _replaces_all(installed, "rollback", RELEASE, "1")
    named = await installed.api.get(f"{_CORE}/configmaps/{RELEASE}-diptych-router")
    assert "log_level" not in json.loads(named["data"]["settings.yaml"])
    await installed.helm("test", RELEASE, "--timeout=180s")


async def test_nothing_is_left_of_what_is_uninstalled(installed: Installation) -> None:
    """The last: nothing runs after it. The test's own pod stays, as helm has it with hooks."""
    await installed.helm("uninstall", RELEASE, *_WAIT)
    test_pod = f"{_CORE}/pods/{RELEASE}-diptych-test-handoff"

    async def is_gone() -> bool:
        return await installed.left() in ([], [test_pod])

    await eventually(is_gone, "nothing is left")
    assert not installed.node.running

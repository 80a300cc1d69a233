"""The chart with every lock: its commands run, get ready and answer who has a key, and nobody else.

Certificates between the roles and for clients, clients' keys, health by a port of its own.
With the demo model, which is fetched if it is not in the user's cache.
"""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from diptych.api_keys import digest, make_key
from diptych.client import DiptychClient
from diptych.errors import InvalidApiKeyError
from tests.authority import Authority
from tests.deploy.helm import HELM_4, template
from tests.deploy.kubelet import own_network
from tests.deploy.load import ask
from tests.deploy.local_cluster import SERVICE_HOST, LocalCluster, local_cluster
from tests.unit.deploy.chart import RELEASE, parsed

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

VALUES = {
    "router.discovery": "kubernetes",
    "tls.enabled": "true",
    "router.publicTls.secretName": "public",
    "router.apiKeys.secretName": "clients",
    "tests.apiKey.secretName": "own-key",
}
_FILES = {"tls.crt": "certificate.pem", "tls.key": "key.pem", "ca.crt": "ca.pem"}


class Locked(NamedTuple):
    """A cluster, and what a client of it needs."""

    cluster: LocalCluster
    key: str
    ca: Path


def secret(issued: Path) -> Mapping[str, bytes]:
    """As cert-manager makes one of a certificate."""
    return {key: (issued / name).read_bytes() for key, name in _FILES.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Locked]:
    authority, key = Authority(tmp_path_factory.mktemp("authority")), make_key()
    public = authority.issue_name(f"{own_network()}.{SERVICE_HOST}", "public")
    roles = {
        f"{RELEASE}-diptych-{role}-tls": secret(authority.issue(role))
        for role in ("router", "prefill", "decode")
    }
    clients = {"keys": f"alice {digest(key)}\n".encode()}
    secrets = {
        **roles,
        "public": secret(public),
        "clients": clients,
        "own-key": {"key": key.encode()},
    }
    values = ",".join(f"{name}={value}" for name, value in VALUES.items())
    manifests = parsed(template(HELM_4, [], f"--set={values}"))
    folder = tmp_path_factory.mktemp("locked")
    async with local_cluster(manifests, folder, secrets) as cluster:
        yield Locked(cluster, key, public / "ca.pem")


async def test_all_probes_pass_without_certificate_or_key(locked: Locked) -> None:
    for (pod,) in locked.cluster.running.values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert await pod.passes(probe), f"{pod.name}: {probe}"


async def test_who_has_a_key_is_answered_and_nobody_else(locked: Locked) -> None:
    address = locked.cluster.address
    async with DiptychClient(address, api_key=locked.key, tls=locked.ca) as client:
        assert (await ask(client)).text
    async with DiptychClient(address, tls=locked.ca, retries=0) as client:
        with pytest.raises(InvalidApiKeyError):
            await ask(client)


async def test_helm_test_passes(locked: Locked) -> None:
    done = await locked.cluster.test()
    assert done.returncode == 0, done.stderr
    assert "KV pulled" in done.stderr


async def test_everything_ends_within_its_grace_period(locked: Locked) -> None:
    """The last: nothing runs after it."""
    assert set((await locked.cluster.end()).values()) == {0}

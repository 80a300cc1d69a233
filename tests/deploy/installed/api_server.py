"""A real API server, with the controllers that make pods and tell endpoints, and its etcd.

No scheduler and no kubelet: who uses it plays the node. All listen in the network that the test
run has for itself, so their ports are fixed.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.deploy.installed.api_client import ApiClient

NETWORK = "10.99"
"""Of pods; the machine's own address there ends with .0.1."""

_SERVICES = "10.98.0.0/16"
_ETCD, _URL = "http://127.0.0.1:2379", "https://127.0.0.1:6443"
_READY_S = 120.0
_END_S = 20.0
# A node that nobody plays would be declared lost, and its pods with it.
_CONTROLLERS = "*,-nodelifecycle,-nodeipam,-route,-service,-cloud-node-lifecycle"


class ApiServer(NamedTuple):
    """Where it is, and the token of one who may do everything."""

    url: str
    token: str


@asynccontextmanager
async def api_server(binaries: Path, folder: Path) -> AsyncIterator[ApiServer]:
    """All three running; at the end they are gone, and what they kept lies in ``folder``."""
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    _write_signing_key(folder / "signing.pem")
    config = folder / "controllers.json"
    config.write_text(json.dumps(kubeconfig(_URL, token, "default")))
    async with AsyncExitStack() as stack:
        for name, args in _commands(folder, config).items():
            if name == "kube-controller-manager":  # it waits for the server, but not for long
                await _ready(token)
            await stack.enter_async_context(_running(binaries / name, args, folder))
        yield ApiServer(_URL, token)


def kubeconfig(server: str, token: str, namespace: str) -> dict[str, object]:
    """One context, of whoever has the token."""
    cluster = {"server": server, "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [
            {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
    }


def _commands(folder: Path, config: Path) -> dict[str, Sequence[str]]:
    key = folder / "signing.pem"
    return {
        "etcd": (
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
        ),
        "kube-apiserver": (
            f"--etcd-servers={_ETCD}",
            "--bind-address=127.0.0.1",
            f"--advertise-address={NETWORK}.0.1",
            "--endpoint-reconciler-type=none",
            "--secure-port=6443",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={_SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        ),
        "kube-controller-manager": (
            f"--kubeconfig={config}",
            f"--service-account-private-key-file={key}",
            f"--controllers={_CONTROLLERS}",
            "--leader-elect=false",
            f"--cert-dir={folder / 'certificates'}",
        ),
    }


async def _ready(token: str) -> None:
    async with ApiClient(_URL, token) as api, asyncio.timeout(_READY_S):
        while not await api.is_ready():
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _running(program: Path, args: Sequence[str], folder: Path) -> AsyncIterator[None]:
    with (folder / f"{program.name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *args, stdout=log, stderr=log, cwd=folder
        )
    try:
        yield
        assert process.returncode is None, f"{program.name} had ended: see its log in {folder}"
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _write_signing_key(path: Path) -> None:
    """What signs tokens of service accounts."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )

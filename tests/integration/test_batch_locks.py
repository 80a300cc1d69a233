"""A batch server's two ports under certificates and keys."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych.api_keys import digest
from diptych.client import BatchClient
from diptych.errors import DiptychError, InvalidApiKeyError
from tests.authority import Authority, replaced
from tests.cluster import Process, as_args


def ask(url: str, *flags: str) -> tuple[int, str]:
    """What ``diptych batch status`` ends with, of a batch that there is not."""
    line = [sys.executable, "-m", "diptych.cli", "batch", "status", "none", "--url", url, *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


async def test_its_grpc_port_is_as_locked_as_its_http(tmp_path: Path) -> None:
    """Certificate, keys; who has one sees health and what is served."""
    folder = Authority(tmp_path).issue_name("127.0.0.1", "batch")
    keys, ca = tmp_path / "keys", folder / "ca.pem"
    keys.write_text(f"alice {digest('one')}\n")
    (tmp_path / "key").write_text("one\n")
    flags = {
        "database": f"sqlite:///{tmp_path / 'batch.sqlite'}",
        "router": "http://127.0.0.1:1",
        "api-keys": str(keys),
        "public-tls.certificate": str(folder / "certificate.pem"),
        "public-tls.key": str(folder / "key.pem"),
    }
    process = Process("batch_server", "locked", tmp_path, as_args(flags))
    process.start()
    process.wait_listening()
    try:
        async with BatchClient(process.address, api_key="one", tls=ca) as client:
            assert await client.batches() == []
        async with BatchClient(process.address, api_key="two", tls=ca) as client:
            with pytest.raises(InvalidApiKeyError):
                await client.batches()
        async with BatchClient(process.address, api_key="one", retries=0) as client:
            with pytest.raises(DiptychError) as caught:
                await client.batches()
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        trust = grpc.ssl_channel_credentials(ca.read_bytes())
        known = (("authorization", "Bearer one"),)
        service = "diptych.v1.Batches"
        async with grpc.aio.secure_channel(process.address, trust) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=service)
            status = (await health.Check(asked, metadata=known)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError):
                await health.Check(asked)
            reflected = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflected.ServerReflectionInfo(iter([listing]), metadata=known)
            found = [each async for each in call]
            names = {each.name for each in found[0].list_services_response.service}
            assert service in names
        lock = ["--ca", str(ca), "--api-key-file", str(tmp_path / "key")]
        answer = (1, "diptych batch: no batch 'none' here\n")
        urls = (f"grpcs://{process.address}", f"https://{process.http_address}")
        for url in urls:
            assert await asyncio.to_thread(ask, url, *lock) == answer
        other = Authority(tmp_path / "other").issue_name("batch.example", "batch")
        with replaced(folder, other):  # reached by another name, as through a forwarded port
            for url in urls:
                name = ("--server-name", "batch.example")
                assert await asyncio.to_thread(ask, url, *lock, *name) == answer
                code, told = await asyncio.to_thread(ask, url, *lock)
                assert code == 1
                assert told.startswith(f"diptych batch: no batch server at {url} ")
    finally:
        assert process.stop() == 0, process.log_tail()

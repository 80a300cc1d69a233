"""``diptych health`` against a real health service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from diptych.cli.health import run
from diptych.rpc.identity import Identity
from tests.authority import Authority, flags


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A process that lives and does not take requests yet."""
    statuses = health_pb2.HealthCheckResponse
    servicer = health.HealthServicer()  # which says SERVING of the process
    servicer.set("diptych.v1.Decode", statuses.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("service", "code", "said"),
    [
        ("", 0, "SERVING"),
        ("diptych.v1.Decode", 1, "NOT_SERVING"),
        ("diptych.v1.Prefill", 1, "NOT_FOUND"),
    ],
)
def test_it_tells_the_process_from_what_it_serves(
    address: str, service: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--address", address, "--service", service]) == code
    captured = capsys.readouterr()
    assert (captured.err if code else captured.out).strip() == said


def test_nobody_there_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.strip() == "UNAVAILABLE"


def test_a_locked_process_is_asked_with_its_own_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Authority(tmp_path).issue("decode")
    identity = Identity(
        folder / "certificate.pem", folder / "key.pem", folder / "ca.pem", "diptych"
    )
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", identity.of_server())
    server.start()
    args = ["--address", f"127.0.0.1:{port}"]
    files = [part for name, value in flags(folder).items() for part in (f"--{name}", value)]
    assert run([*args, "--role", "decode", *files]) == 0
    assert run([*args, "--role", "prefill", *files]) == 1
    assert run(args) == 1
    assert capsys.readouterr().out.split() == ["SERVING"]
    server.stop(None).wait()

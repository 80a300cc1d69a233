"""``diptych health``: whether a process, or what it serves, says that it is well."""

import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import BaseModel, ConfigDict, Field

from diptych import settings
from diptych.address import Address
from diptych.process import EXIT_FAILED
from diptych.rpc.identity import Identity, PeerRole, TlsFiles

_DIRECTLY: Final[list[tuple[str, Any]]] = [("grpc.enable_http_proxy", 0)]


class HealthConfig(BaseModel):
    """Ask a router or worker for its health: 0 if it serves, 1 if not, or if it does not answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: Address = Field("127.0.0.1:50051", description="host:port of the process.")
    service: str = Field(
        "",
        description="A service's full name, such as diptych.v1.Inference: whether it takes "
        "requests. Unset: whether the process lives.",
    )
    timeout_s: float = Field(2.0, gt=0, description="Give up after this, s.")
    role: PeerRole = Field(
        "prefill", description="With --tls: what the process's certificate has to say that it is."
    )
    tls: TlsFiles = TlsFiles()


def run(args: list[str]) -> int:
    """Ask once; the exit code."""
    config = settings.load(HealthConfig, args, prog="diptych health", env_prefix="DIPTYCH_HEALTH_")
    said = _ask(config)
    print(said, file=sys.stdout if said == "SERVING" else sys.stderr)
    return 0 if said == "SERVING" else EXIT_FAILED


def _ask(config: HealthConfig) -> str:
    """What the process says of itself; why it could not be asked, if so."""
    request = health_pb2.HealthCheckRequest(service=config.service)
    with _open(config) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=config.timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _open(config: HealthConfig) -> grpc.Channel:
    identity = Identity.of(config.tls)
    if identity is None:
        return grpc.insecure_channel(config.address, _DIRECTLY)
    options = [*_DIRECTLY, ("grpc.ssl_target_name_override", identity.name(config.role))]
    return grpc.secure_channel(config.address, identity.to_peer(), options)

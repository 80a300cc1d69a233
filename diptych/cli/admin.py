"""``diptych admin``: what an operator changes in a worker that runs."""

import asyncio
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import grpc
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.address import check_address
from diptych.cli.shown_line import shown
from diptych.errors import ConfigurationError
from diptych.process import EXIT_FAILED
from diptych.rpc.identity import Identity, TlsFiles
from diptych.rpc.peer_channel import Dialer
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc

RoleName = Literal["prefill", "decode"]
_ROLES: Final[Mapping[RoleName, worker_pb2.WorkerRole]] = {
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}
_USAGE = """usage: diptych admin roles ADDRESS --roles prefill,decode

roles    say what new work the worker at ADDRESS takes from now on: prefill, decode, or both"""


class RolesConfig(BaseModel):
    """Change what new work a worker takes that was started as `diptych worker`. What runs goes on.

    Prints the roles that it had and has, and how much of those that it lost goes on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: Annotated[CliPositionalArg[str], AfterValidator(check_address)] = Field(
        description="host:port of the worker."
    )
    roles: tuple[RoleName, ...] = Field(
        min_length=1, description="What it takes from now on: prefill, decode, or both."
    )
    timeout_s: float = Field(5.0, gt=0, description="Give up after this, s.")
    role: RoleName = Field(
        "prefill", description="With --tls: what the worker's certificate has to say that it is."
    )
    tls: TlsFiles = TlsFiles()

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, value: tuple[RoleName, ...]) -> tuple[RoleName, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"names one twice (got {','.join(value)})")
        return value


def run(args: list[str]) -> int:
    """Run one command; the exit code. Raises ConfigurationError."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_USAGE)  # noqa: T201
        return 0
    if args[0] != "roles":
        raise ConfigurationError(f"no command {args[0]!r}; there is roles")
    config = settings.load(
        RolesConfig, args[1:], prog="diptych admin roles", env_prefix="DIPTYCH_ADMIN_"
    )
    try:
        answer = asyncio.run(_set_roles(config))
    except grpc.aio.AioRpcError as error:
        known = from_rpc_error(error)
        line = shown(f"diptych admin: {known.reason}: {known.message}")
        print(line, file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    line = f"{_names(answer.before)} -> {_names(answer.roles)}"
    if answer.num_unfinished:
        line += f"; {answer.num_unfinished} of what it takes no more go on to their end"
    print(line)  # noqa: T201
    return 0


async def _set_roles(config: RolesConfig) -> worker_pb2.SetRolesResponse:
    """Raises AioRpcError; ConfigurationError: a certificate cannot be used."""
    request = worker_pb2.SetRolesRequest(roles=[_ROLES[name] for name in config.roles])
    dialer = Dialer(Timers(), Identity.of(config.tls))
    async with dialer.open(config.address, config.role) as channel:
        stub: worker_pb2_grpc.WorkerAdminAsyncStub = worker_pb2_grpc.WorkerAdminStub(channel)
        return await stub.SetRoles(request, timeout=config.timeout_s)


def _names(numbers: Iterable[int]) -> str:
    names: Mapping[int, str] = {number: name for name, number in _ROLES.items()}
    return ",".join(names[each] if each in names else str(each) for each in numbers)

"""The worker of both roles: each is what it is alone, and the process is put together once."""

import asyncio

from decode_worker.app import DecodeRole
from diptych.process import Ready
from diptych.service_host import ServiceHost
from diptych.v1 import worker_pb2
from diptych.wire_names import ROLE_NAMES
from diptych.worker.roles import MakeRole, serve_roles
from diptych.worker.status import WorkerStatus
from prefill_worker.app import PrefillRole
from soft_worker.config import SoftWorkerConfig


async def serve(config: SoftWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""

    def prefill(host: ServiceHost, status: WorkerStatus) -> PrefillRole:
        return PrefillRole(config, host, status)

    def decode(host: ServiceHost, status: WorkerStatus) -> DecodeRole:
        return DecodeRole(config, host, status)

    makers: dict[worker_pb2.WorkerRole, MakeRole] = {
        worker_pb2.WORKER_ROLE_PREFILL: prefill,
        worker_pb2.WORKER_ROLE_DECODE: decode,
    }
    held = [role for role in makers if ROLE_NAMES[role] in config.roles]
    await serve_roles(config, config.transfer, makers, stop, ready, held=held)

"""The worker of both roles: each is what it is alone, and the process is put together once."""

import asyncio
from functools import partial

from decode_worker.app import DecodeRole
from diptych.process import Ready
from diptych.v1 import worker_pb2
from diptych.wire_names import ROLE_NAMES
from diptych.worker.roles import MakeRole, serve_roles
from prefill_worker.app import PrefillRole
from soft_worker.config import SoftWorkerConfig


async def serve(config: SoftWorkerConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until ``stop`` is set, then drain for ``timers.drain_s`` at the most."""
    makers: dict[worker_pb2.WorkerRole, MakeRole] = {
        worker_pb2.WORKER_ROLE_PREFILL: partial(PrefillRole, config),
        worker_pb2.WORKER_ROLE_DECODE: partial(DecodeRole, config),
    }
    held = [role for role in makers if ROLE_NAMES[role] in config.roles]
    await serve_roles(config, makers, stop, ready, held=held)

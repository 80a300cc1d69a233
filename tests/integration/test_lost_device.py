"""A worker whose device is lost says so and ends, whichever thread meets the loss."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from diptych.engine.backends.cpu.backend import CpuBackend
from diptych.errors import DeviceLostError
from diptych.timers import Timers
from diptych.v1 import worker_pb2
from diptych.worker.worker import EngineDiedError
from kvtransfer.memory import HostMemory
from tests.integration.worker_rig import INLINE, Lease, prefill_worker
from tests.prompts import prompt


def lose_in_a_step(patch: pytest.MonkeyPatch) -> None:
    def synchronise(backend: CpuBackend) -> NoReturn:
        raise DeviceLostError("broken")

    patch.setattr(CpuBackend, "synchronise", synchronise)


def lose_in_a_digest(patch: pytest.MonkeyPatch) -> None:
    def digests(memory: HostMemory, *args: object) -> NoReturn:
        memory.lost = DeviceLostError("broken")
        raise memory.lost

    patch.setattr(HostMemory, "digests", digests)


@pytest.mark.parametrize(
    ("lose", "why"), [(lose_in_a_step, EngineDiedError), (lose_in_a_digest, DeviceLostError)]
)
async def test_the_worker_has_failed_and_ends(
    tiny_llama: Path,
    tmp_path: Path,
    lose: Callable[[pytest.MonkeyPatch], None],
    why: type[Exception],
) -> None:
    settings = {
        "num_blocks": 32,
        "max_model_len": 256,
        "transfer": INLINE,
        "timers": Timers(heartbeat_s=0.1),
    }

    async def serve_and_lose(patch: pytest.MonkeyPatch) -> None:
        async with prefill_worker(tiny_llama, tmp_path, settings) as worker:
            lose(patch)
            await Lease(worker).start(prompt(20))
            await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_FAILED)
            await asyncio.wait([worker.serving], timeout=5)
            assert worker.serving.done()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExceptionGroup) as caught:
        await serve_and_lose(patch)
    assert caught.group_contains(why)

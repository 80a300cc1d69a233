"""What ends several tasks of one job, and that nothing of it stays in memory."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtransfer.first_done import first_to_end


class Call:
    """Stands for gRPC's call."""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("how", ["fails", "returns", "cancelled"])
async def test_a_job_that_is_over_keeps_nothing(how: str) -> None:
    async def run() -> weakref.ref[Call]:
        call = Call()

        async def first() -> None:
            await use(call, 60 if how == "cancelled" else 0)
            if how == "fails":
                raise ValueError("first")

        async def second() -> None:
            try:
                await use(call, 60)
            finally:
                if how == "cancelled":
                    raise ValueError("while it was cancelled")

        if how == "fails":
            with pytest.raises(ValueError, match="first"):
                await first_to_end(first=first, second=second)
        elif how == "returns":
            await first_to_end(first=first, second=second)
        else:
            async with asyncio.TaskGroup() as tasks:
                job = tasks.create_task(first_to_end(first=first, second=second))
                await asyncio.sleep(0.01)
                job.cancel()
            assert job.cancelled()
        return weakref.ref(call)

    call = await run()
    await asyncio.sleep(0)
    assert call() is None


async def use(call: Call, seconds: float) -> None:
    """Hold the call for so long."""
    await asyncio.sleep(seconds)

"""A role that only serves what every role serves; run as a process by test_process.py."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from pydantic import Field

from diptych.errors import ConfigurationError
from diptych.process import ProcessConfig, Ready, StuckThreadError, UnfinishedStartError, main
from diptych.service_host import ServiceHost


class ExampleConfig(ProcessConfig):
    """An example."""

    role: ClassVar[str] = "example"

    fail: str = Field(
        "", description="How to fail: bug, configuration, hang, stuck, unfinished, off-loop."
    )


def read_what_never_comes() -> None:
    """Hang, as a disk does."""
    threading.Event().wait()


async def serve(config: ExampleConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve nothing of its own."""
    never = ThreadPoolExecutor(1)
    if config.fail in ("stuck", "unfinished", "unfinished-bug"):
        never.submit(threading.Event().wait)
    async with ServiceHost(config) as host:
        await host.start(["diptych.v1.Inference"])
        ready(host.port)
        host.set_serving(True)
        async with asyncio.TaskGroup() as tasks:
            if config.fail.startswith("off-loop"):
                reading = tasks.create_task(asyncio.to_thread(read_what_never_comes))
                await stop.wait()
                reading.cancel()
            if config.fail == "bug":
                raise ValueError("a bug")
            if config.fail.endswith("configuration"):
                raise ConfigurationError("--fail: asked for")
        if config.fail == "stuck":
            raise StuckThreadError("a thread is stuck")
        await stop.wait()
        if config.fail.startswith("unfinished"):
            errors: list[Exception] = [UnfinishedStartError("a thread goes on")]
            if config.fail.endswith("bug"):
                errors.append(ValueError("a bug"))
            raise ExceptionGroup("as a task group raises it", errors)
        host.set_serving(False)
        if config.fail == "hang":
            await asyncio.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(ExampleConfig, serve))

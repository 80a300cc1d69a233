"""The one address of a Service: each connection goes to one of its pods, as kube-proxy has it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 65536


class ServiceAddress:
    """Passes connections on to ``pods`` (host:port), in turn; knows nothing of what they say.

    A connection stays with its pod, also when that is taken off the list.
    """

    def __init__(self) -> None:
        self.pods: list[str] = []
        self.address = ""
        self._num_accepted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until either side ends it."""
        try:
            if self.pods:
                self._num_accepted += 1
                host, _, port = self.pods[self._num_accepted % len(self.pods)].rpartition(":")
                with contextlib.suppress(OSError):
                    await _join(reader, writer, *await asyncio.open_connection(host, int(port)))
        finally:
            writer.close()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pod_reader: asyncio.StreamReader,
    pod_writer: asyncio.StreamWriter,
) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, pod_writer))
            tasks.create_task(_copy(pod_reader, writer))
    finally:
        pod_writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            target.write(data)
            await target.drain()
    target.close()


@asynccontextmanager
async def service_address(host: str, port: int) -> AsyncIterator[ServiceAddress]:
    """One that listens there (0: on a free port); all its connections end with it."""
    service = ServiceAddress()
    async with asyncio.TaskGroup() as tasks:
        connections: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(tasks.create_task(service.serve(reader, writer)))

        server = await asyncio.start_server(accept, host, port)
        service.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        try:
            yield service
        finally:
            server.close()
            for connection in connections:
                connection.cancel()

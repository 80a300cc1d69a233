"""A Kubernetes API server that knows EndpointSlices alone, and fails as the test says.

Lists and watches by HTTP/1.1, as the real one: a watch is a stream of lines, begins after a
version, and answers 410 where that is older than what it remembers.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

_PATH = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"

Json = dict[str, object]


class _Event(NamedTuple):
    version: int
    line: bytes


class KubeApi:
    """One namespace. Watches hear every event that is not ``mute``."""

    def __init__(self) -> None:
        self.num_lists = 0
        self.num_watches = 0
        self.num_gone = 0  # watches that were answered 410
        self.num_refused = 0  # what was answered 503
        self.is_down = False  # 503
        self.is_mute = False  # watches are not told of what happens
        self.ends_watches = False  # each at once, as if all were well
        self.selectors: set[str] = set()
        self._version = 10
        self._oldest = 10
        self._slices: dict[str, Json] = {}
        self._events: list[_Event] = []
        self._happened = asyncio.Condition()
        self._watches: set[asyncio.StreamWriter] = set()

    async def put(
        self, name: str, service: str, port: int, *hosts: str, ready: bool = True
    ) -> None:
        """A slice is made or replaced."""
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._version += 1
        self._slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": "serving",
                "resourceVersion": str(self._version),
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "ports": [{"name": "metrics", "port": 1}, {"name": "grpc", "port": port}],
            "endpoints": [
                {"addresses": [host], "conditions": {"ready": ready}, "zone": f"zone of {host}"}
                for host in hosts
            ],
        }
        await self._tell(kind, self._slices[name])

    async def delete(self, name: str) -> None:
        """A slice goes."""
        self._version += 1
        await self._tell("DELETED", self._slices.pop(name))

    def forget(self) -> None:
        """What happened is compacted away: older versions are gone."""
        self._events.clear()
        self._version += 1
        self._oldest = self._version

    def end(self, rest: bytes = b"") -> None:
        """Every watch ends, as a server does from time to time."""
        for writer in self._watches:
            if not writer.is_closing():
                writer.write(rest)
                writer.close()

    def cut(self) -> None:
        """Every watch breaks off in the middle of a line."""
        self.end(b'{"type": "MODI')

    async def _tell(self, kind: str, slice_: Json) -> None:
        if self.is_mute:
            return
        line = json.dumps({"type": kind, "object": slice_}).encode() + b"\n"
        self._events.append(_Event(self._version, line))
        async with self._happened:
            self._happened.notify_all()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await self._respond(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            writer.close()

    async def _respond(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(request.decode().split(" ", 2)[1])
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        assert url.path == _PATH, url.path
        self.selectors.add(query["labelSelector"])
        if self.is_down:
            self.num_refused += 1
            _write(writer, 503, _status(503))
        elif query.get("watch"):
            await self._watch(writer, int(query["resourceVersion"]))
        else:
            self.num_lists += 1
            version = {"resourceVersion": str(self._version)}
            _write(writer, 200, {"metadata": version, "items": list(self._slices.values())})
        await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter, version: int) -> None:
        self.num_watches += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        if version < self._oldest:
            self.num_gone += 1
            gone = json.dumps({"type": "ERROR", "object": _status(410)}).encode() + b"\n"
            writer.write(gone)
            raise ConnectionError("the server ends such a watch")
        if self.ends_watches:
            raise ConnectionError("the server ends such a watch")
        self._watches.add(writer)
        try:
            while not writer.is_closing():
                for event in self._events:
                    if event.version > version:
                        writer.write(event.line)
                version = self._version
                await writer.drain()
                async with self._happened:
                    await self._happened.wait()
        finally:
            self._watches.discard(writer)


def _status(code: int) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": f"{code}",
    }


def _write(writer: asyncio.StreamWriter, code: int, content: Json) -> None:
    body = json.dumps(content).encode()
    writer.write(
        f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


@asynccontextmanager
async def kube_api(folder: Path) -> AsyncIterator[tuple[KubeApi, Path]]:
    """A server, and a kubeconfig that leads to it."""
    api = KubeApi()
    async with asyncio.TaskGroup() as tasks:
        answers: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers.append(tasks.create_task(api.answer(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = folder / "kubeconfig"
        config.write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{port}")))
        try:
            yield api, config
        finally:
            server.close()
            for answer in answers:
                answer.cancel()


def _kubeconfig(server: str) -> Json:
    context = {"cluster": "c", "user": "u", "namespace": "serving"}
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }

"""One life of a ucxx agent, and the reads it makes: tagged messages, on request.

ucxx has no one-sided read in Python, so the source's agent takes part: a reader posts
receives straight into its blocks, one for each run of them, and asks; the source
sends those runs. Both sides are in a process of their own (``agent_main``), which UCX
wakes: nothing is polled.

The library listens on the devices named for it alone. Who can reach it there may ask
for any block of the pool, and for nothing else of the process.

A receive can be neither recalled nor waited out: a read is over when all of its
receives are, and these end, if not well, with the connection or with the process.
"""

import contextlib
import ctypes
import importlib
import os
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import AgentSettings, Region
from kvtransfer.transport import SourceLostError, TransportError

_ASK = 1 << 63  # the tag of requests; the reader draws those of data from 1 on
_ASK_HEADER = struct.Struct("<QH")  # tag of the first run, bytes of the reader's address


class _Library(NamedTuple):
    """What is used of ucxx: its synchronous layer."""

    api: Any
    array: Any  # a buffer, as the library takes it


def _load() -> _Library:
    """Import ucxx. Raises ImportError.

    It and UCX read these from the environment alone, and ucxx sets what suits GPUs.
    """
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCXPY_LOG_LEVEL", "CRITICAL")
    os.environ.update(UCX_RNDV_FRAG_MEM_TYPE="host", UCX_WARN_UNUSED_ENV_VARS="n")
    api = importlib.import_module("ucxx._lib.libucxx")
    return _Library(api, importlib.import_module("ucxx._lib.arr").Array)


class UcxxAgent:
    """Owns the library's worker. Answers whoever asks for blocks."""

    def __init__(self, settings: AgentSettings, region: Region) -> None:
        """Raises TransportError: ucxx is missing or cannot start."""
        try:
            self._library = _load()
        except ImportError as error:
            raise TransportError(f"the ucxx transport needs ucxx: {error}") from error
        api = self._library.api
        options = {
            "TLS": settings.ucx_tls,
            "NET_DEVICES": settings.ucx_net_devices,
            # a cut link is otherwise never noticed
            "TCP_KEEPIDLE": "2s",
            "TCP_KEEPINTVL": "1s",
            "TCP_KEEPCNT": "3",
        }
        try:
            context = api.UCXContext(options, (api.Feature.TAG, api.Feature.WAKEUP))
            self._worker = api.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            self.metadata = bytes(self._worker.address)
        except Exception as error:
            raise TransportError(f"ucxx cannot start: {_describe(error)}") from error
        self.files: tuple[int, ...] = (int(self._worker.epoll_file_descriptor),)
        self._region = region
        num_bytes = region.num_blocks * region.block_bytes
        self._pool = memoryview((ctypes.c_char * num_bytes).from_address(region.base_address))
        self._next_tag = 1
        self._readers: dict[bytes, Any] = {}  # endpoints, by the reader's address
        self._asked: list[tuple[Any, bytearray]] = []  # requests on their way here
        self._sent: list[Any] = []  # sends on their way; no one waits for them

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        return None if self._worker.arm() else 0.0  # it does not arm while something is to be done

    def serve(self) -> None:
        """Progress everything; answer what was asked."""
        self._worker.progress()
        while (found := self._worker.tag_probe(self._tag(_ASK), remove=True)).matched:
            request = bytearray(found.length)
            receive = self._worker.tag_recv_with_handle(self._library.array(request), found)
            self._asked.append((receive, request))
        arrived = [ask for ask in self._asked if ask[0].completed]
        if arrived:
            self._asked = [ask for ask in self._asked if not ask[0].completed]
        self._sent = [send for send in self._sent if not send.completed]
        for receive, request in arrived:
            if not _failed(receive):
                with contextlib.suppress(TransportError):  # of one reader: the others go on
                    self._answer(request)

    def endpoint(self, address: bytes) -> Any:
        """A connection to the agent of that address. Raises TransportError."""
        api = self._library.api
        try:
            known = api.UCXAddress.create_from_buffer(address)
            return api.UCXEndpoint.create_from_worker_address(self._worker, known, True)
        except Exception as error:
            raise TransportError(f"ucxx cannot connect: {_describe(error)}") from error

    def ask(self, endpoint: Any, runs: NDArray[np.int32]) -> list[Any]:
        """Receive ``runs`` of blocks, [n, 3] of source's first, our first, number.

        Returns the library's requests; the read is over once all of them are. Raises
        TransportError: nothing was begun.
        """
        if not endpoint.alive:
            raise SourceLostError("ucxx lost the source")
        first_tag = self._next_tag
        self._next_tag += len(runs)
        requests = [
            endpoint.tag_recv(self._blocks(local, num), self._tag(first_tag + index))
            for index, (_, local, num) in enumerate(runs.tolist())
        ]
        header = _ASK_HEADER.pack(first_tag, len(self.metadata))
        wanted = np.ascontiguousarray(runs[:, [0, 2]], dtype="<i4").tobytes()
        message = self._library.array(header + self.metadata + wanted)
        requests.append(endpoint.tag_send(message, self._tag(_ASK)))
        return requests

    def _answer(self, request: bytearray) -> None:
        """Send the runs that a reader asked for; nothing where that is not sound.

        Raises TransportError: the reader cannot be reached.
        """
        try:
            first_tag, num_bytes = _ASK_HEADER.unpack_from(request)
            begin = _ASK_HEADER.size + num_bytes
            address = bytes(request[_ASK_HEADER.size : begin])
            runs = np.frombuffer(request, dtype="<i4", offset=begin).reshape(-1, 2).astype(np.int64)
        except (struct.error, ValueError):
            return
        first, num = runs[:, 0], runs[:, 1]
        if not ((first >= 0) & (num > 0) & (first + num <= self._region.num_blocks)).all():
            return
        endpoint = self._reader(address)
        for index, (block_id, num_blocks) in enumerate(runs.tolist()):
            blocks = self._blocks(block_id, num_blocks)
            self._sent.append(endpoint.tag_send(blocks, self._tag(first_tag + index)))

    def _reader(self, address: bytes) -> Any:
        endpoint = self._readers.get(address)
        if endpoint is None or not endpoint.alive:
            self._readers = {each: known for each, known in self._readers.items() if known.alive}
            endpoint = self._readers[address] = self.endpoint(address)
        return endpoint

    def _blocks(self, block_id: int, num_blocks: int) -> Any:
        size = self._region.block_bytes
        return self._library.array(self._pool[block_id * size : (block_id + num_blocks) * size])

    def _tag(self, value: int) -> Any:
        return self._library.api.UCXXTag(value)


class UcxxPeer:
    """One source's pool, as its agent sends it."""

    def __init__(self, agent: UcxxAgent, metadata: bytes, region: Region) -> None:
        """Begin to connect. Raises TransportError."""
        self._agent = agent
        self._num_blocks = region.num_blocks
        self._endpoint = agent.endpoint(metadata)
        self._num_live_copies = 0
        self._closing = False

    def read(
        self, source_block_ids: NDArray[np.int32], local_block_ids: NDArray[np.int32]
    ) -> "UcxxCopy":
        return UcxxCopy(self, runs_of(source_block_ids, local_block_ids))

    def begin(self, runs: NDArray[np.int32]) -> list[Any]:
        """Post a read; ``ended`` once all of what this returns is over. Raises TransportError."""
        if self._closing:
            raise TransportError("the connection to the source was closed")
        if runs[-1, 0] + runs[-1, 2] > self._num_blocks:
            raise TransportError("the source has no such block")
        requests = self._agent.ask(self._endpoint, runs)
        self._num_live_copies += 1
        return requests

    def ended(self, error: Exception | None) -> None:
        """A read is over. Raises TransportError, if not well."""
        alive = self._endpoint.alive
        self._num_live_copies -= 1
        self._close_if_idle()
        if error is not None:
            kind = TransportError if alive else SourceLostError
            raise kind(f"ucxx: {_describe(error)}")

    def close(self) -> None:
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Once closing, end the connection with the last copy: those under way need it."""
        if self._closing and not self._num_live_copies:
            self._endpoint.close()


class UcxxCopy:
    """One read: receives into local blocks, and the request for what lands there."""

    def __init__(self, peer: UcxxPeer, runs: NDArray[np.int32]) -> None:
        self._peer = peer
        self._runs = runs
        self._requests: list[Any] = []  # not seen to have ended
        self._error: Exception | None = None  # the first

    def post(self) -> bool:
        self._requests = self._peer.begin(self._runs)
        return False

    def poll(self) -> bool:
        while self._requests and self._requests[-1].completed:
            self._error = self._error or _failed(self._requests.pop())
        if self._requests:
            return False
        self._peer.ended(self._error)
        return True


def runs_of(
    source_block_ids: NDArray[np.int32], local_block_ids: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Blocks that are neighbours on both sides: [n, 3] of source's first, local first, number."""
    order = np.argsort(source_block_ids, kind="stable")
    source, local = source_block_ids[order], local_block_ids[order]
    begins = np.flatnonzero((np.diff(source, prepend=-2) != 1) | (np.diff(local, prepend=-2) != 1))
    num = np.diff(begins, append=len(source))
    return np.stack((source[begins], local[begins], num), axis=1).astype(np.int32)


def _failed(request: Any) -> Exception | None:
    """How a request ended, if not well."""
    try:
        request.check_error()
    except Exception as error:  # noqa: BLE001 - the library raises a class per status
        return error
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

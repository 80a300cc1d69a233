"""One life of a ucxx agent, and the reads it makes: tagged messages, on request.

ucxx has no one-sided read in Python, so the source's agent takes part: a reader posts
receives straight into its blocks, one for each run of them, and asks; the source
sends those runs. Tagged messages, because active ones land in memory of the library
and have to be copied. Both sides are in a process of their own (``agents.main``), which
UCX wakes: nothing is polled.

The library listens on the devices named for it alone. Who can reach it there may ask
for any block of the pool, and for nothing else of the process.

A receive can be neither recalled nor waited out: a read is over when all of its
receives are and none met an error; else with the process.
"""

import contextlib
import ctypes
import importlib
import os
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import BrokenReadError, SourceLostError, TransportError

_ASK = 1 << 63  # the tag of requests; the reader draws those of data from 1 on
# Tag of the first run, bytes of each block, bytes of the reader's address.
_ASK_HEADER = struct.Struct("<QQH")


class _Library(NamedTuple):
    """What is used of ucxx: its synchronous layer."""

    api: Any
    array: Any  # a buffer, as the library takes it


class _Pending(NamedTuple):
    """A request of the library, and the buffer that has to live as long: it keeps none."""

    request: Any
    buffer: Any


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
    """Owns the library's context, and the worker that answers whoever asks for blocks."""

    def __init__(self, settings: AgentSettings, region: Region) -> None:
        """Raises TransportError: ucxx is missing or cannot start."""
        try:
            self.library = _load()
        except ImportError as error:
            raise TransportError(f"the ucxx transport needs ucxx: {error}") from error
        api = self.library.api
        options = {
            "TLS": settings.ucx_tls,
            "NET_DEVICES": settings.ucx_net_devices,
            # a link that is cut while nothing moves; under a read the pull notices it
            "TCP_KEEPIDLE": "2s",
            "TCP_KEEPINTVL": "1s",
            "TCP_KEEPCNT": "3",
        }
        try:
            self._context = api.UCXContext(options, (api.Feature.TAG, api.Feature.WAKEUP))
            self._worker = self.new_worker()
            self.metadata = bytes(self._worker.address)
        except Exception as error:
            raise TransportError(f"ucxx cannot start: {_describe(error)}") from error
        self.peers: set[UcxxPeer] = set()  # with a connection
        self._region = region
        num_bytes = region.num_blocks * region.block_bytes
        self._pool = memoryview((ctypes.c_char * num_bytes).from_address(region.base_address))
        self._readers: dict[bytes, Any] = {}  # endpoints, by the address of the reader's worker
        self._asked: list[_Pending] = []  # what readers ask for, on its way here
        self._sent: list[Any] = []  # sends of our pool; no one waits for them

    @property
    def files(self) -> list[int]:
        return [worker.epoll_file_descriptor for worker in self._workers()]

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        """A worker does not arm while it has something to do."""
        return None if all(worker.arm() for worker in self._workers()) else 0.0

    def serve(self) -> None:
        """Progress everything; answer what was asked."""
        for worker in self._workers():
            worker.progress()
        while (found := self._worker.tag_probe(self.tag(_ASK), remove=True)).matched:
            ask = bytearray(found.length)
            receive = self._worker.tag_recv_with_handle(self.library.array(ask), found)
            self._asked.append(_Pending(receive, ask))
        asked, self._asked = self._asked, []
        for receive, ask in asked:
            if not receive.completed:
                self._asked.append(_Pending(receive, ask))
            elif not _failed(receive):
                with contextlib.suppress(TransportError):  # of one reader: the others go on
                    self._answer(ask)
        self._sent = [send for send in self._sent if not send.completed]

    def new_worker(self) -> Any:
        """One that wakes us, by a file."""
        worker = self.library.api.UCXWorker(self._context)
        worker.init_blocking_progress_mode()
        return worker

    def connect(self, worker: Any, address: bytes) -> Any:
        """An endpoint of ``worker`` to the worker at ``address``. Raises TransportError."""
        api = self.library.api
        try:
            known = api.UCXAddress.create_from_buffer(address)
            return api.UCXEndpoint.create_from_worker_address(worker, known, True)
        except Exception as error:
            raise TransportError(f"ucxx cannot connect: {_describe(error)}") from error

    def blocks(self, block_id: int, num_blocks: int, num_bytes: int) -> Any:
        """A run of our own pool; of its last block no others than the first so many bytes."""
        size = self._region.block_bytes
        begin = block_id * size
        return self.library.array(self._pool[begin : begin + (num_blocks - 1) * size + num_bytes])

    def is_whole(self, num_bytes: int) -> bool:
        """Whether so many bytes are a block."""
        return num_bytes == self._region.block_bytes

    def tag(self, value: int) -> Any:
        return self.library.api.UCXXTag(value)

    def _workers(self) -> list[Any]:
        return [self._worker, *(peer.worker for peer in self.peers)]

    def _answer(self, ask: bytearray) -> None:
        """Send the runs that a reader asked for; nothing where that is not sound.

        Raises TransportError: the reader cannot be reached.
        """
        try:
            first_tag, num_bytes, address_bytes = _ASK_HEADER.unpack_from(ask)
            begin = _ASK_HEADER.size + address_bytes
            address = bytes(ask[_ASK_HEADER.size : begin])
            runs = np.frombuffer(ask, dtype="<i4", offset=begin).reshape(-1, 2).astype(np.int64)
        except (struct.error, ValueError):
            return
        first, num = runs[:, 0], runs[:, 1]
        if not ((first >= 0) & (num > 0) & (first + num <= self._region.num_blocks)).all():
            return
        is_part = 0 < num_bytes < self._region.block_bytes and (num == 1).all()
        if not (is_part or self.is_whole(num_bytes)):
            return
        endpoint = self._readers.get(address)
        if endpoint is None:
            self._readers = {each: known for each, known in self._readers.items() if known.alive}
            endpoint = self._readers[address] = self.connect(self._worker, address)
        if endpoint.alive:
            self._sent += [
                endpoint.tag_send(self.blocks(block_id, num_blocks, num_bytes), self.tag(tag))
                for tag, (block_id, num_blocks) in enumerate(runs.tolist(), first_tag)
            ]


class UcxxPeer:
    """One source's pool, as its agent sends it.

    Each has a worker of its own, which the source sees as a new one: UCX pairs the
    endpoints of two workers by counting them on either side, and the counts differ for
    good once one side has given up a connection that the other has not.
    """

    def __init__(
        self, agent: UcxxAgent, metadata: bytes, region: Region, pieces: Pieces | None = None
    ) -> None:
        """Begin to connect. Raises TransportError."""
        if pieces is not None:
            raise TransportError("ucxx reads no pieces of blocks: both workers need as many ranks")
        self._agent = agent
        self._num_source_blocks = region.num_blocks
        self.worker = agent.new_worker()
        self._address = bytes(self.worker.address)
        self._endpoint = agent.connect(self.worker, metadata)
        self._next_tag = 1
        self._num_live_copies = 0
        self._closing = False
        agent.peers.add(self)

    def read(
        self,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_bytes: int,
    ) -> "UcxxCopy":
        merge = self._agent.is_whole(num_bytes)  # else there is something between neighbours
        return UcxxCopy(self, runs_of(source_block_ids, local_block_ids, merge=merge), num_bytes)

    def begin(self, runs: NDArray[np.int32], num_bytes: int) -> list[_Pending]:
        """Ask for ``runs``, [n, 3] of source's first block, our first, number.

        num_bytes: of each block; runs are of one block where that is not all of it. All that
        this returns has to complete: then ``ended``. Raises TransportError: nothing was begun.
        """
        if self._closing:
            raise TransportError("the connection to the source was closed")
        if not self._endpoint.alive:
            raise SourceLostError("ucxx lost the source")
        if runs[-1, 0] + runs[-1, 2] > self._num_source_blocks:
            raise TransportError("the source has no such block")
        agent, first_tag = self._agent, self._next_tag
        self._next_tag += len(runs)
        pending = []
        for tag, (_, local, num) in enumerate(runs.tolist(), first_tag):
            blocks = agent.blocks(local, num, num_bytes)
            pending.append(_Pending(self._endpoint.tag_recv(blocks, agent.tag(tag)), blocks))
        header = _ASK_HEADER.pack(first_tag, num_bytes, len(self._address))
        wanted = np.ascontiguousarray(runs[:, [0, 2]], dtype="<i4").tobytes()
        ask = agent.library.array(header + self._address + wanted)
        pending.append(_Pending(self._endpoint.tag_send(ask, agent.tag(_ASK)), ask))
        self._num_live_copies += 1
        return pending

    def ended(self, error: Exception | None) -> None:
        """All requests of a read are over. Raises BrokenReadError, if not well.

        The connection stays then, for as long as the agent does.
        """
        if error is not None:
            kind = TransportError if self._endpoint.alive else SourceLostError
            raise BrokenReadError(kind(f"ucxx: {_describe(error)}"))
        self._num_live_copies -= 1
        self._close_if_idle()

    def close(self) -> None:
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Once closing, end the connection with the last copy: those under way need it."""
        if self._closing and not self._num_live_copies:
            self._agent.peers.discard(self)
            self._endpoint.close_blocking()


class UcxxCopy:
    """One read: receives into local blocks, and the request for what lands there."""

    def __init__(self, peer: UcxxPeer, runs: NDArray[np.int32], num_bytes: int) -> None:
        self._peer = peer
        self._runs = runs
        self._num_bytes = num_bytes  # of each block
        self._pending: list[_Pending] = []  # not seen to have ended
        self._error: Exception | None = None  # the first

    def post(self) -> bool:
        self._pending = self._peer.begin(self._runs, self._num_bytes)
        return False

    def poll(self) -> bool:
        while self._pending and self._pending[-1].request.completed:
            error = _failed(self._pending.pop().request)
            self._error = self._error or error
        if self._pending:
            return False
        self._peer.ended(self._error)
        return True


def runs_of(
    source_block_ids: NDArray[np.int32], local_block_ids: NDArray[np.int32], *, merge: bool = True
) -> NDArray[np.int32]:
    """Blocks that are neighbours on both sides: [n, 3] of source's first, local first, number.

    Without ``merge`` each block is a run of its own.
    """
    order = np.argsort(source_block_ids, kind="stable")
    source, local = source_block_ids[order], local_block_ids[order]
    if not merge:
        return np.stack((source, local, np.ones_like(source)), axis=1).astype(np.int32)
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

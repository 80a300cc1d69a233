"""One life of a nixl agent: the library loaded, an agent made, the pool registered.

Everything here runs on the one thread that touches the agent: the main thread of its
own process (``agents.main``), or the transfer thread where it lives inside the worker.
(No lock, no progress thread: that one busy-polls.) nixl is imported when an agent is
first made; torch, pydantic and gRPC are not, so that a process for it starts at once.
"""

import gc
import importlib
import logging
import os
import weakref
from collections import Counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agents.base import AgentSettings, Region
from kvtransfer.block_shares import Pieces
from kvtransfer.errors import SourceLostError, TransportError, UndeadAgentError

# Where no GPU is involved either build will do; ``nixl`` itself imports torch to choose one.
_HOST_MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
_WITH_CUDA = {"cuda", "cuda_copy", "all"}  # of UCX_TLS


class _Library(NamedTuple):
    """What is used of nixl."""

    agent_class: Any
    agent_config_class: Any
    disconnect_error: type[Exception]


def tell_ucx(settings: AgentSettings) -> None:
    """Its settings, which it reads when an agent is created, and takes from nowhere else.

    The one place outside configuration that writes ``os.environ``.
    """
    os.environ.update(
        UCX_TLS=settings.ucx_tls,
        UCX_NET_DEVICES=settings.ucx_net_devices,
        # a cut link is otherwise never noticed
        UCX_TCP_USER_TIMEOUT="5s",
        UCX_TCP_KEEPIDLE="2s",
        UCX_TCP_KEEPINTVL="1s",
        UCX_TCP_KEEPCNT="3",
    )
    # We only read, which UCX leaves to TCP where cards are not joined by NVLink: it takes PCIe, or
    # one card's own memory, for slow. A pair's rate says whether it is.
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def _load(settings: AgentSettings, memory_kind: str) -> _Library:
    """Import nixl under these settings. Raises ImportError."""
    tell_ucx(settings)
    raise_exceptions = logging.raiseExceptions
    package = _package(_HOST_MODULES if memory_kind == "DRAM" else ("nixl",))
    bindings = importlib.import_module(f"{package}._bindings")
    api = importlib.import_module(f"{package}._api")
    # Importing it configures logging for the whole process, onto stdout.
    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return _Library(api.nixl_agent, api.nixl_agent_config, bindings.nixlRemoteDisconnectError)


def _package(names: tuple[str, ...]) -> str:
    """The first of these packages that is installed. Raises ImportError."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name).__name__
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    return importlib.import_module(names[-1]).__name__


class Dependent(Protocol):
    """Holds handles of the agent, which keep it alive."""

    def drop_handles(self) -> None: ...


class NixlAgent:
    """Owns the library's agent; nobody else keeps a reference to it.

    ``close`` destroys it, which alone stops reads that never end (as the end of its
    process does, where it has one of its own).
    """

    def __init__(self, settings: AgentSettings, region: Region) -> None:
        """Raises TransportError: nixl is missing or cannot start."""
        try:
            self._library = _load(settings, region.memory_kind)
        except ImportError as error:
            raise TransportError(f"the nixl transport needs nixl: {error}") from error
        self.raw: Any = None  # None once closed
        self._region = region
        self._local_blocks: dict[int, Any] = {}  # prepared descriptors of our own, by their bytes
        self.dependents: set[Dependent] = set()  # connected peers, unfinished copies
        self.num_reads = 0  # begun, neither ended nor broken
        self.is_gone = False  # destroyed, and its reads with it
        self._num_peers = Counter[Any]()  # by the name under which the library knows them
        try:
            self._open(settings.name, region)
        except Exception as error:  # the library raises a class of its own per status
            raise TransportError(_cannot_start(error, settings)) from error

    def _open(self, name: str, region: Region) -> None:
        config = self._library.agent_config_class(enable_prog_thread=False, backends=[])
        raw = self._library.agent_class(name, config)
        raw.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        pool = (region.base_address, region.num_blocks * region.block_bytes, region.device_id, "")
        raw.register_memory([pool], region.memory_kind)
        self.metadata: bytes = raw.get_agent_metadata()  # after registering, not before
        self.raw = raw
        self.local_blocks(region.block_bytes)

    @property
    def files(self) -> list[int]:
        return []

    def serve(self) -> None:
        """Progress the passive side; arriving notifications are not used."""
        if self.raw is None:
            return
        try:
            self.raw.get_new_notifs(["UCX"])
        except Exception as error:
            raise self.translated(error) from error

    def sleep_s(self, active: bool, pause_s: float) -> float | None:
        return pause_s if active else None

    def local_blocks(self, num_bytes: int) -> Any:
        """Our blocks' first bytes, prepared once for each number. Raises what the library does."""
        prepared = self._local_blocks.get(num_bytes)
        if prepared is None:
            prepared = self._local_blocks[num_bytes] = self.prepared(
                "NIXL_INIT_AGENT", self._region, num_bytes
            )
        return prepared

    def piece_read(
        self,
        name: Any,
        source: Region,
        pieces: Pieces,
        source_block_ids: NDArray[np.int32],
        local_block_ids: NDArray[np.int32],
        num_pieces: int,
    ) -> Any:
        """A read of so many pieces of each block, not begun. Raises what the library does."""
        places, size = range(num_pieces), pieces.num_bytes
        theirs = [pieces.source_begin + place * pieces.source_stride for place in places]
        ours = [pieces.local_begin + place * pieces.local_stride for place in places]
        local = self._region.piece_rows(local_block_ids, size, ours)
        remote = source.piece_rows(source_block_ids, size, theirs)
        return self.raw.initialize_xfer(
            "READ",
            self.raw.get_xfer_descs(local, self._region.memory_kind),
            self.raw.get_xfer_descs(remote, source.memory_kind),
            name,
        )

    def prepared(self, name: Any, region: Region, num_bytes: int) -> Any:
        """The first bytes of each block of an agent's pool. Raises what the library does."""
        return self.raw.prep_xfer_dlist(name, region.rows(num_bytes), region.memory_kind)

    def add_peer(self, metadata: bytes) -> Any:
        """Hand a source's metadata to the library; the name that it has there.

        Two peers may be one agent of a source, so one name: the library forgets that with
        the last of them. Raises what the library does.
        """
        name = self.raw.add_remote_agent(metadata)
        self._num_peers[name] += 1
        return name

    def remove_peer(self, name: Any) -> None:
        """Undo ``add_peer``. Raises what the library does."""
        self._num_peers[name] -= 1
        if not self._num_peers[name]:
            del self._num_peers[name]
            self.raw.remove_remote_agent(name)

    def close(self) -> None:
        """Destroy the agent; copies that were unfinished report TransportError next.

        Raises UndeadAgentError: it lives on, and they stay unfinished.
        """
        for dependent in list(self.dependents):
            dependent.drop_handles()
        self._local_blocks.clear()
        raw, self.raw = self.raw, None
        if raw is None:
            return
        destroyed = weakref.ref(raw)
        del raw
        if destroyed() is not None:  # its reads would go on: something garbage still names it
            gc.collect()
        if destroyed() is not None:
            raise UndeadAgentError("a nixl agent outlives its teardown: its reads may still write")
        self.is_gone = True

    def translated(self, error: Exception) -> TransportError:
        """Our error for one of the library's, which loses its traceback.

        The frames in it name the agent, and whoever keeps the error would keep that alive.
        """
        error.__traceback__ = None
        if isinstance(error, self._library.disconnect_error):
            return SourceLostError(f"nixl lost the source: {describe(error)}")
        return TransportError(f"nixl: {describe(error)}")


def _cannot_start(error: Exception, settings: AgentSettings) -> str:
    """In one line: nixl says why in its own log alone, which ``tell_ucx`` keeps silent."""
    hint = ""
    if not _WITH_CUDA & set(settings.ucx_tls.split(",")):
        hint = "with an NVIDIA GPU in the machine it needs cuda_copy in ucx_tls; "
    return (
        f"nixl cannot start: {describe(error)} (UCX_TLS={settings.ucx_tls}, "
        f"UCX_NET_DEVICES={settings.ucx_net_devices}; {hint}NIXL_LOG_LEVEL=ERROR has it say why)"
    )


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

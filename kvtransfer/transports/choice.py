"""From the names in the setting ``transports`` to transports. The one table of them."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

from diptych.errors import ConfigurationError
from kvtransfer.config import TransferConfig, TransportName
from kvtransfer.memory import DeviceCopies, HostMemory, PoolMemory
from kvtransfer.rank_pools import RankPools
from kvtransfer.transports.base import Transport
from kvtransfer.transports.inline import InlineTransport
from kvtransfer.transports.lanes import LanesOf, nixl_lanes, ucxx_lanes
from kvtransfer.transports.rank_transports import RankTransport, RankTransports
from kvtransfer.transports.staged import StagedTransport
from kvtransfer.transports.staging import Stage, StagingSlots
from kvtransfer.transports.thread import TransferThread
from kvtransfer.transports.ways import HOST


class Place(NamedTuple):
    """Where a transport is to work."""

    config: TransferConfig
    agent_name: str  # of the worker's incarnation; each life of an agent adds its number
    memory: PoolMemory | RankPools
    stretch_bytes: int  # of a whole block: all heads of one layer's keys
    thread: TransferThread
    on_change: Callable[[], None]  # called on the thread, when what the event loop may read changed
    read_only: bool  # nothing is read into the memory: a source's
    opened: Mapping[str, Transport]  # before it

    @property
    def is_shared(self) -> bool:
        """Whether another process can map the memory."""
        return all(rank.memory.shared_fd is not None for rank in self.ranks)

    @property
    def ranks(self) -> list["RankPlace"]:
        """Where the agent of each rank is."""
        if not isinstance(self.memory, RankPools):
            return [RankPlace(self.agent_name, self.memory)]
        return [
            RankPlace(f"{self.agent_name}.rank-{rank}", part)
            for rank, part in enumerate(self.memory.parts)
        ]


class RankPlace(NamedTuple):
    """One rank's part of a place."""

    agent_name: str
    memory: PoolMemory


class Way(NamedTuple):
    """One transport: how it is opened, and what it cannot do without."""

    open: Callable[[Place], Transport]  # on the transfer thread
    needs_shared_memory: bool = False
    needs_module: str = ""  # and the extra of that name; only where it is not among ours


def _open_inline(place: Place) -> Transport:
    return InlineTransport(place.memory)


def _open_nixl(place: Place) -> Transport:
    """Inside the worker where that is asked for, and where no other process maps the pool."""
    if place.is_shared and place.config.nixl_process == "child":
        return _open_child("nixl", nixl_lanes, place)
    from kvtransfer.transports.nixl import NixlTransport  # needs numpy

    return _of_ranks(
        place,
        lambda rank: NixlTransport(
            place.config, rank.agent_name, rank.memory, place.thread, place.on_change
        ),
    )


def _open_ucxx(place: Place) -> Transport:
    return _open_child("ucxx", ucxx_lanes, place)


def _open_child(library: str, lanes_of: LanesOf, place: Place) -> Transport:
    """``library``: as ``agents.main`` names it."""
    from kvtransfer.transports.child import ChildTransport  # needs numpy

    return _of_ranks(
        place,
        lambda rank: ChildTransport(
            library,
            lanes_of,
            place.config,
            rank.agent_name,
            rank.memory,
            place.thread,
            place.on_change,
            read_only=place.read_only,
        ),
    )


def _of_ranks(place: Place, open_one: Callable[[RankPlace], RankTransport]) -> Transport:
    parts = [open_one(rank) for rank in place.ranks]
    return RankTransports(parts, place.memory.block_bytes, place.stretch_bytes)


def _open_staged(place: Place) -> Transport:
    """Beside a device an agent of the staging blocks; else the one that reads the pool anyway."""
    if place.memory.memory_kind == HOST:
        return StagedTransport(place.opened.get("nixl") or _open_nixl(place), None)
    assert isinstance(place.memory, DeviceCopies)
    staging = _staging(place.memory, place.config.staging_bytes)
    stage = Stage(place.memory, staging, StagingSlots(staging.num_blocks))
    beside = place._replace(memory=staging, agent_name=f"{place.agent_name}.staged")
    return StagedTransport(_open_child("nixl", nixl_lanes, beside), stage)


def _staging(pool: DeviceCopies, num_bytes: int) -> HostMemory:
    """Raises ConfigurationError: it does not fit."""
    num_blocks = min(num_bytes // pool.block_bytes, pool.num_blocks)
    if not num_blocks:
        raise ConfigurationError(
            f"transfer.staging_bytes: {num_bytes} hold no block of {pool.block_bytes}"
        )
    try:
        return pool.new_staging(num_blocks)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"transfer.staging_bytes: no room for {num_bytes}: {error}"
        ) from error


TRANSPORTS: Mapping[TransportName, Way] = {
    "nixl": Way(_open_nixl),
    "ucxx": Way(_open_ucxx, needs_shared_memory=True, needs_module="ucxx"),
    "staged": Way(_open_staged),
    "inline": Way(_open_inline),
}


def open_transport(name: TransportName, place: Place) -> Transport:
    """Make one, on the transfer thread; it may take a while to get ready.

    Raises ConfigurationError: it lacks what it needs here.
    """
    way = TRANSPORTS[name]
    if way.needs_shared_memory and not place.is_shared:
        raise ConfigurationError(
            f"transfer.transports: {name} needs a KV pool in shared host memory, that of device cpu"
        )
    if way.needs_module and importlib.util.find_spec(way.needs_module) is None:
        raise ConfigurationError(
            f"transfer.transports: {name} is not installed: "
            f"pip install -e '.[{name}]' (in Diptych's clone)"
        )
    return way.open(place)

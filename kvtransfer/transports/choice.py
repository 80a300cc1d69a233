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


class Site(NamedTuple):
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
    def ranks(self) -> list["RankSite"]:
        """Where the agent of each rank is."""
        if not isinstance(self.memory, RankPools):
            return [RankSite(self.agent_name, self.memory)]
        return [
            RankSite(f"{self.agent_name}.rank-{rank}", part)
            for rank, part in enumerate(self.memory.parts)
        ]


class RankSite(NamedTuple):
    """One rank's part of a site."""

    agent_name: str
    memory: PoolMemory


class Opening(NamedTuple):
    """One transport: how it is opened, and what it cannot do without."""

    open: Callable[[Site], Transport]  # on the transfer thread
    needs_shared_memory: bool = False
    needs_module: str = ""  # and the extra of that name; only where it is not among ours


def _open_inline(site: Site) -> Transport:
    return InlineTransport(site.memory)


def _open_nixl(site: Site) -> Transport:
    """Inside the worker where that is asked for, and where no other process maps the pool."""
    if site.is_shared and site.config.nixl_process == "child":
        return _open_child("nixl", nixl_lanes, site)
    from kvtransfer.transports.inside import InsideTransport  # needs numpy

    return _of_ranks(
        site,
        lambda rank: InsideTransport(
            site.config, rank.agent_name, rank.memory, site.thread, site.on_change
        ),
    )


def _open_ucxx(site: Site) -> Transport:
    return _open_child("ucxx", ucxx_lanes, site)


def _open_child(library: str, lanes_of: LanesOf, site: Site) -> Transport:
    """``library``: as ``agents.main`` names it."""
    from kvtransfer.transports.child import ChildTransport  # needs numpy

    return _of_ranks(
        site,
        lambda rank: ChildTransport(
            library,
            lanes_of,
            site.config,
            rank.agent_name,
            rank.memory,
            site.thread,
            site.on_change,
            read_only=site.read_only,
        ),
    )


def _of_ranks(site: Site, open_one: Callable[[RankSite], RankTransport]) -> Transport:
    parts = [open_one(rank) for rank in site.ranks]
    return RankTransports(parts, site.memory.block_bytes, site.stretch_bytes)


def _open_staged(site: Site) -> Transport:
    """Beside a device an agent of the staging blocks; else the one that reads the pool anyway."""
    if site.memory.memory_kind == HOST:
        return StagedTransport(site.opened.get("nixl") or _open_nixl(site), None)
    assert isinstance(site.memory, DeviceCopies)
    staging = _staging(site.memory, site.config.staging_bytes)
    stage = Stage(site.memory, staging, StagingSlots(staging.num_blocks))
    beside = site._replace(memory=staging, agent_name=f"{site.agent_name}.staged")
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


TRANSPORTS: Mapping[TransportName, Opening] = {
    "nixl": Opening(_open_nixl),
    "ucxx": Opening(_open_ucxx, needs_shared_memory=True, needs_module="ucxx"),
    "staged": Opening(_open_staged),
    "inline": Opening(_open_inline),
}


def open_transport(name: TransportName, site: Site) -> Transport:
    """Make one, on the transfer thread; it may take a while to get ready.

    Raises ConfigurationError: it lacks what it needs here.
    """
    opening = TRANSPORTS[name]
    if opening.needs_shared_memory and not site.is_shared:
        raise ConfigurationError(
            f"transfer.transports: {name} needs a KV pool in shared host memory, that of device cpu"
        )
    if opening.needs_module and importlib.util.find_spec(opening.needs_module) is None:
        raise ConfigurationError(
            f"transfer.transports: {name} is not installed: "
            f"pip install -e '.[{name}]' (in Diptych's clone)"
        )
    return opening.open(site)

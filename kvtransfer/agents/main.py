"""The process of a transport agent: ``python -m kvtransfer.agents.main`` with settings.

A crash or a hang of the transport library ends here, and the worker starts another
one. Maps the worker's KV pool, registers it, and does the reads that it is told to.
Ends with its worker, whichever way that ends. One thread; light imports.
"""

import argparse
import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Collection

import numpy as np

from kvtransfer.agents.base import Agent, AgentCopy, AgentPeer, AgentSettings, Library, Region
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.agents.nixl_reads import NixlPeer
from kvtransfer.agents.parent import end_with_parent
from kvtransfer.agents.ucxx import UcxxAgent, UcxxPeer
from kvtransfer.agents.wire import (
    Channel,
    Kind,
    Message,
    PeerCommand,
    ReadCommand,
    pack_error,
)
from kvtransfer.errors import BrokenReadError, TransportError

LIBRARIES = {
    "nixl": Library(NixlAgent, NixlPeer),
    "ucxx": Library(UcxxAgent, UcxxPeer),
}

POLL_MIN_S = 50e-6  # between polls while something moves
POLL_MAX_S = 1e-3  # and when nothing has for a while
SERVE_MAX_S = 50e-3  # where only peers may be reading: next to none of that needs us
MAX_PEERS = 1024  # each costs memory in proportion to its pool, and files


class AgentLoop:
    """Carries out the worker's commands; sleeps while nothing moves."""

    def __init__(self, library: Library, agent: Agent, channel: Channel) -> None:
        self._library = library
        self._agent = agent
        self._channel = channel
        self._peers: dict[int, AgentPeer | TransportError] = {}
        self._copies: dict[int, AgentCopy] = {}  # begun, not ended
        self._broken: list[AgentCopy] = []  # begun, and ended by our own end only
        self._serving = False

    def run(self) -> None:
        """Until the worker is gone: raises EOFError or OSError."""
        pause_s = POLL_MIN_S
        while True:
            active = self._serving or bool(self._copies)
            channel = self._channel.socket.fileno()
            to_write = [channel] if self._channel.has_unsent else []
            sleep_s = self._agent.sleep_s(active, pause_s)
            ready = ready_files([channel, *self._agent.files], to_write, sleep_s)
            self._channel.flush()
            longest_s = POLL_MAX_S if self._copies else SERVE_MAX_S
            pause_s = POLL_MIN_S if ready else min(2 * pause_s, longest_s)
            if channel in ready:
                for message in self._channel.receive():
                    self._obey(message)
            if self._progress():
                pause_s = POLL_MIN_S

    def _obey(self, message: Message) -> None:
        match message.kind:
            case Kind.PING:
                self._channel.send(Message(Kind.PONG))
            case Kind.SERVE:
                self._serving = bool(message.id)
            case Kind.CONNECT:
                self._channel.send(Message(Kind.CONNECTING, message.id))
                self._connect(message)
                self._channel.send(Message(Kind.CONNECTING))
            case Kind.DISCONNECT:
                peer = self._peers.pop(message.id, None)
                if peer is not None and not isinstance(peer, TransportError):
                    peer.close()
            case Kind.READ:
                self._read(message.id, ReadCommand.unpacked(message.payload))
            case _:
                raise AssertionError(message.kind)

    def _connect(self, message: Message) -> None:
        """Whatever is wrong with a peer fails its reads, not the others'."""
        if len(self._peers) >= MAX_PEERS:
            return
        try:
            region, metadata, pieces = PeerCommand.unpacked(message.payload)
            self._peers[message.id] = self._library.peer(self._agent, metadata, region, pieces)
        except TransportError as error:
            self._peers[message.id] = error
        except Exception as error:  # noqa: BLE001 - what the source said made the library raise
            self._peers[message.id] = TransportError(f"{type(error).__name__}: {error}")

    def _read(self, read_id: int, command: ReadCommand) -> None:
        try:
            copy = self._copy(command)
        except TransportError as error:
            self._channel.send(Message(Kind.FAILED, read_id, pack_error(error)))
            return
        self._copies[read_id] = copy
        if self._advance(read_id, copy.post, b"\1"):
            del self._copies[read_id]

    def _copy(self, command: ReadCommand) -> AgentCopy:
        """A read to post. Raises TransportError."""
        peer = self._peers.get(command.peer_id)
        if peer is None:
            raise TransportError(f"the agent does not know the source: it has {MAX_PEERS} others")
        if isinstance(peer, TransportError):
            raise peer
        return peer.read(command.source_block_ids, command.local_block_ids, command.num_bytes)

    def _advance(self, read_id: int, step: Callable[[], bool], how: bytes) -> bool:
        """One step of a read; True if it is over, or can only be ended by our own end."""
        try:
            if not step():
                return False
            self._channel.send(Message(Kind.DONE, read_id, how))
        except BrokenReadError as broken:
            self._broken.append(self._copies[read_id])
            self._channel.send(Message(Kind.BROKEN, read_id, pack_error(broken.error)))
        except TransportError as error:
            self._channel.send(Message(Kind.FAILED, read_id, pack_error(error)))
        return True

    def _progress(self) -> bool:
        """Poll once; True when something ended."""
        if self._serving or self._agent.files:
            with contextlib.suppress(TransportError):  # of one reader: the others go on
                self._agent.serve()
        ended = [
            read_id
            for read_id, copy in self._copies.items()
            if self._advance(read_id, copy.poll, b"\0")
        ]
        for read_id in ended:
            del self._copies[read_id]
        return bool(ended)


def ready_files(
    to_read: Collection[int], to_write: Collection[int], sleep_s: float | None
) -> set[int]:
    """Sleep until one of these is ready, or for ``sleep_s`` (None: for as long as it takes).

    As many files as there are, whatever their numbers: ucxx has one for each peer.
    """
    poll = select.poll()
    for file in to_read:
        poll.register(file, select.POLLIN)
    for file in to_write:
        poll.register(file, select.POLLIN | select.POLLOUT)
    if sleep_s is not None and 0 < sleep_s <= POLL_MAX_S:  # it knows milliseconds only
        ready = poll.poll(0)
        if not ready:
            time.sleep(sleep_s)
            ready = poll.poll(0)
    else:
        ready = poll.poll(None if sleep_s is None else sleep_s * 1e3)
    return {file for file, _ in ready}


def map_pool(
    fd: int, block_bytes: int, num_blocks: int, *, read_only: bool
) -> tuple[mmap.mmap, Region]:
    """The worker's pool at an address of ours, its pages looked up now, not at the first read.

    ``read_only``: whatever writes there, by a bug of the library or of a peer, ends this
    process instead.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    prot = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    pool = mmap.mmap(fd, block_bytes * num_blocks, flags=flags, prot=prot)
    address = np.frombuffer(pool, np.uint8).ctypes.data
    return pool, Region(address, block_bytes, num_blocks)


def main() -> None:
    parser = argparse.ArgumentParser()
    numbers = ("parent-pid", "socket-fd", "pool-fd", "block-bytes", "num-blocks", "read-only")
    for name in numbers:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    for name in AgentSettings._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", required=True)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent_pid)
    channel = Channel(socket.socket(fileno=arguments.socket_fd))
    _pool, region = map_pool(
        arguments.pool_fd,
        arguments.block_bytes,
        arguments.num_blocks,
        read_only=bool(arguments.read_only),
    )
    settings = AgentSettings(*(getattr(arguments, name) for name in AgentSettings._fields))
    library = LIBRARIES[arguments.library]
    try:
        agent = library.agent(settings, region)
    except TransportError as error:
        channel.send(Message(Kind.UNABLE, 0, pack_error(error)))
        return
    try:
        channel.send(Message(Kind.READY, region.base_address, agent.metadata))
        AgentLoop(library, agent, channel).run()
    except (EOFError, OSError):  # the worker is gone
        os._exit(0)


if __name__ == "__main__":
    main()

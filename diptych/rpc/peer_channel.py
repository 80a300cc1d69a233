"""The channel to one process of the cluster, whichever certificates there are meanwhile."""

from dataclasses import dataclass

import grpc

from diptych.rpc.channel import open_channel
from diptych.rpc.identity import Identity, PeerRole
from diptych.timers import Timers


@dataclass(frozen=True, slots=True)
class Dialer:
    """How a process opens channels to others. ``identity`` is None where nothing is locked."""

    timers: Timers
    identity: Identity | None = None

    def open(self, address: str, role: PeerRole) -> grpc.aio.Channel:
        """To a process that must be of that role. The caller closes it."""
        if self.identity is None:
            return open_channel(address, self.timers)
        name = self.identity.name(role)
        return open_channel(address, self.timers, (self.identity.to_peer(), name))


class PeerChannel:
    """Opened when first asked for, and anew once our certificate or the role has changed.

    gRPC connects again by itself, but with the certificate that the channel began with. Calls
    under way stay on the channel on which they began: it is closed at the change after next.
    Event loop only.
    """

    def __init__(self, dialer: Dialer, address: str, role: PeerRole) -> None:
        self._dialer = dialer
        self._address = address
        self._role: PeerRole = role
        self._opened_for: object = None  # which role and certificate the newest channel is of
        self._channels: list[grpc.aio.Channel] = []  # the one in use is the last

    def expect(self, role: PeerRole) -> None:
        """What the process has to be from the next channel on, which ``renewed`` opens."""
        self._role = role

    async def renewed(self) -> grpc.aio.Channel:
        """The one to begin the next calls on; reads the certificate's files."""
        identity = self._dialer.identity
        wanted = None if identity is None else (self._role, identity.pems)
        if not self._channels or wanted != self._opened_for:
            self._opened_for = wanted
            self._channels.append(self._dialer.open(self._address, self._role))
            for channel in self._channels[:-2]:
                await channel.close(None)
            del self._channels[:-2]
        return self._channels[-1]

    @property
    def channel(self) -> grpc.aio.Channel:
        """What was renewed last."""
        return self._channels[-1]

    async def close(self) -> None:
        """Close it, with every call on it."""
        for channel in self._channels:
            await channel.close(None)
        self._channels.clear()

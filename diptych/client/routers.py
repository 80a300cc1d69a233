"""The routers that a client knows, and which of them it asks."""

from typing import Final, TypeAlias

import grpc

from diptych.address import PORT_EXPECTED, has_own_port
from diptych.errors import ConfigurationError
from diptych.rpc.channel import Lock, open_channel
from diptych.v1 import inference_pb2_grpc

Router: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"

_SCHEMES: Final = ("http://", "https://", "grpc://", "grpcs://")


class Routers:
    """Channels to one or several routers, each opened when first used. Event loop only.

    All are alike to a client: it stays with one until that fails, then goes on to the next.
    """

    def __init__(self, addresses: str, lock: Lock | None) -> None:
        """``addresses``: host:port, or several with commas. Raises ConfigurationError: none."""
        names = [name.strip() for name in addresses.split(",")]
        if not all(names):
            raise ConfigurationError(f"{addresses!r}: expected host:port, or several with commas")
        for name in names:
            if not has_own_port(name):
                raise ConfigurationError(PORT_EXPECTED)
            if name.startswith(_SCHEMES):
                scheme = name.partition("//")[0]
                raise ConfigurationError(
                    f"{scheme}//: expected host:port of a router's gRPC, and nothing before it"
                )
        self._names = names
        self._lock = lock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Router] = {}
        self._asked = 0  # index of the one that is

    @property
    def asked(self) -> Router:
        """The router that calls go to now."""
        name = self.address
        if name not in self._stubs:  # in the event loop that calls it, and goes on to
            self._channels[name] = open_channel(name, lock=self._lock, by_proxy=True)
            self._stubs[name] = inference_pb2_grpc.InferenceStub(self._channels[name])
        return self._stubs[name]

    @property
    def address(self) -> str:
        """Of the one that is asked."""
        return self._names[self._asked]

    def leave(self, failed: Router) -> None:
        """Calls go to the next one, unless another call's failure has seen to it."""
        if failed is self.asked:
            self._asked = (self._asked + 1) % len(self._names)

    async def close(self) -> None:
        """Close all channels; calls under way are cancelled."""
        for channel in self._channels.values():
            await channel.close(None)

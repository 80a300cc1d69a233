"""The routers that a client knows, and which of them it asks."""

from typing import TypeAlias

from diptych.errors import ConfigurationError
from diptych.rpc.channel import Lock, open_channel
from diptych.v1 import inference_pb2_grpc

Router: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"


class Routers:
    """Channels to one or several routers, each opened when first used. Event loop only.

    All are alike to a client: it stays with one until that fails, then goes on to the next.
    """

    def __init__(self, addresses: str, lock: Lock | None) -> None:
        """``addresses``: host:port, or several with commas. Raises ConfigurationError: none."""
        names = [name.strip() for name in addresses.split(",")]
        if not all(names):
            raise ConfigurationError(f"{addresses!r}: expected host:port, or several with commas")
        self._names = names
        self._channels = [open_channel(name, lock=lock) for name in names]
        self._stubs = [inference_pb2_grpc.InferenceStub(each) for each in self._channels]
        self._asked = 0  # index of the one that is

    @property
    def asked(self) -> Router:
        """The router that calls go to now."""
        return self._stubs[self._asked]

    @property
    def address(self) -> str:
        """Of the one that is asked."""
        return self._names[self._asked]

    def leave(self, failed: Router) -> None:
        """Calls go to the next one, unless another call's failure has seen to it."""
        if failed is self.asked:
            self._asked = (self._asked + 1) % len(self._stubs)

    async def close(self) -> None:
        """Close all channels; calls under way are cancelled."""
        for channel in self._channels:
            await channel.close(None)

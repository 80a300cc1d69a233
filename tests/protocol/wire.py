"""One RPC between two simulated processes: ordered both ways, delivers or breaks."""

from collections import deque
from typing import NamedTuple, Protocol

from google.protobuf.message import Message

from diptych.errors import DiptychError, NoWorkerError


class End(NamedTuple):
    """The other side closed (no error), ended with one, or is lost."""

    error: DiptychError | None


class Side(Protocol):
    """Either end of a stream."""

    def on_message(self, message: Message) -> None: ...

    def on_end(self, error: DiptychError | None) -> None: ...


class Direction:
    """Messages on their way to ``side``; it hears nothing after its End."""

    def __init__(self, name: str, side: Side | None) -> None:
        self.name = name
        self.side = side
        self.queue: deque[Message | End] = deque()
        self._over = False

    @property
    def can_deliver(self) -> bool:
        return self.side is not None and bool(self.queue)

    @property
    def messages(self) -> list[Message]:
        """On their way."""
        return [message for message in self.queue if not isinstance(message, End)]

    def put(self, message: Message) -> None:
        if not self._over and self.side is not None:
            copy = type(message)()
            copy.CopyFrom(message)
            self.queue.append(copy)

    def repeat(self, message: Message) -> None:
        """Send what is on its way once more, right behind it."""
        self.queue.insert(self.queue.index(message) + 1, message)

    def drop(self, message: Message) -> None:
        """It never arrives."""
        self.queue.remove(message)

    def drop_last(self) -> bool:
        """If the sender has ended the stream, its last message before that never arrives."""
        can_drop = len(self.queue) > 1 and isinstance(self.queue[-1], End)
        if can_drop:
            del self.queue[-2]
        return can_drop

    def end(self, error: DiptychError | None) -> None:
        if not self._over:
            self._over = True
            self.queue.append(End(error))

    def lose(self, num_kept: int) -> None:
        """The stream broke: the first messages may still arrive, nothing after them."""
        while len(self.queue) > num_kept:
            self.queue.pop()
        self._over = False
        self.end(NoWorkerError("the stream broke"))

    def deaf(self) -> None:
        """``side`` listens no more."""
        self.side = None
        self.queue.clear()

    def deliver(self) -> None:
        message, side = self.queue.popleft(), self.side
        if side is None:
            return
        if isinstance(message, End):
            self.deaf()
            side.on_end(message.error)
        else:
            side.on_message(message)


class Stream:
    """``up`` goes to the server, ``down`` to the client."""

    def __init__(self, name: str, client: Side, server: Side | None) -> None:
        self.up = Direction(f"{name} up", server)
        self.down = Direction(f"{name} down", client)
        if server is None:  # nobody listens at the address
            self.down.end(NoWorkerError("connection refused"))

    @property
    def is_over(self) -> bool:
        """Neither side listens."""
        return self.up.side is None and self.down.side is None

    def client_closes(self) -> None:
        """Half-close or cancel; the client hears nothing more."""
        self.up.end(None)
        self.down.deaf()

    def server_ends(self, error: DiptychError | None) -> None:
        """The handler returned."""
        self.down.end(error)
        self.up.deaf()

    def breaks(self, num_kept: int = 0, num_kept_down: int | None = None) -> None:
        """Each side is told when its End is delivered; so many messages each way still arrive."""
        self.up.lose(num_kept)
        self.down.lose(num_kept if num_kept_down is None else num_kept_down)

    def client_dies(self, num_kept: int = 0) -> None:
        self.breaks(num_kept)
        self.down.deaf()

    def server_dies(self, num_kept: int = 0) -> None:
        self.breaks(num_kept)
        self.up.deaf()

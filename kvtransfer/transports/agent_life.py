"""One process of a transport's agent, from its start to its end, with the reads it was given."""

import enum
import itertools
from collections.abc import Callable
from typing import Protocol

from diptych.transitions import Transitions
from kvtransfer.agents.wire import Kind, Message, ReadCommand, unpack_error
from kvtransfer.errors import AgentLostError, AgentTakenError, TransportError
from kvtransfer.transports.agent_process import AgentOwner, AgentProcess
from kvtransfer.transports.thread import TransferThread

DRAIN_S = 1.0  # that the reads under way over an agent which is to end may take to finish


class LifeState(enum.Enum):
    """Where an agent stands."""

    STARTING = enum.auto()  # loads its library, registers the pool
    SERVING = enum.auto()  # peers are connected and reads posted
    DRAINING = enum.auto()  # neither any more; the reads under way may finish
    ENDED = enum.auto()  # so have all of its reads


class LifeEvent(enum.Enum):
    """What moves it."""

    READY = enum.auto()
    RETIRE = enum.auto()
    END = enum.auto()


LIFE_TRANSITIONS = Transitions(
    {
        LifeState.STARTING: {
            LifeEvent.READY: LifeState.SERVING,
            LifeEvent.END: LifeState.ENDED,
        },
        LifeState.SERVING: {
            LifeEvent.RETIRE: LifeState.DRAINING,
            LifeEvent.END: LifeState.ENDED,
        },
        LifeState.DRAINING: {LifeEvent.END: LifeState.ENDED},
    },
    ignored={
        LifeState.DRAINING: {LifeEvent.RETIRE},
        LifeState.ENDED: {LifeEvent.RETIRE},
    },
)


class PostedRead(Protocol):
    """Hears once how a read that was handed to an agent's process ended."""

    def ended(self, *, was_local: bool = False, error: TransportError | None = None) -> None: ...


class LifeOwner(Protocol):
    """The transport whose agent it is. Called on the transfer thread."""

    def on_ready(self, life: "AgentLife", base_address: int, metadata: bytes) -> None:
        """Peers can be connected."""
        ...

    def on_unable(self, life: "AgentLife", error: TransportError) -> None:
        """The agent cannot be made; the process ends."""
        ...

    def on_broken(self, life: "AgentLife", error: TransportError) -> None:
        """A read met ``error`` and can be ended by the agent's end only: it is to be replaced."""
        ...

    def on_life_end(self, life: "AgentLife", why: str, num_reads: int) -> None:
        """The process is gone, with so many reads that had not ended."""
        ...


class AgentLife:
    """Owns one process and knows its unfinished reads. Transfer thread only.

    Invariant: a read is reported as ended when the process said that it is done or never
    began, else when the system says that the process is gone. Where that was neither asked for
    nor expected, the peer that it was connecting is to blame, if it was, and else nobody.
    """

    def __init__(self, name: str, owner: LifeOwner, thread: TransferThread) -> None:
        """``name`` is the transport's, for messages. ``start`` follows."""
        self.state = LifeState.STARTING
        self._name = name
        self._owner = owner
        self._thread = thread
        self._process: AgentProcess | None = None
        self._reads: dict[int, tuple[int, PostedRead]] = {}  # handed over, not ended; of which peer
        self._broken: dict[int, TransportError] = {}  # those that end with the process only
        self._read_ids = itertools.count(1)
        self._connecting = 0  # the peer that the process is at, or ended at
        self._why = ""  # it ended

    @property
    def pid(self) -> int | None:
        """Of the process; None before its start."""
        return None if self._process is None else self._process.pid

    def start(self, start: Callable[[AgentOwner], AgentProcess]) -> None:
        """Start the process. Raises OSError."""
        self._process = start(self)

    def send(self, message: Message) -> None:
        if self._process is not None:
            self._process.send(message)

    def begin(self, read: PostedRead, command: ReadCommand) -> None:
        """Hand a read over. Only while SERVING."""
        assert self.state is LifeState.SERVING, self.state
        read_id = next(self._read_ids)
        self._reads[read_id] = command.peer_id, read
        self.send(Message(Kind.READ, read_id, command.packed()))

    def lost(self, peer_id: int) -> TransportError:
        """What a read of this peer meets that the process will not do, or did not end."""
        if self.state is LifeState.ENDED and peer_id == self._connecting:
            return AgentTakenError(
                f"the {self._name} agent's process ended as it connected the source: {self._why}"
            )
        return AgentLostError(f"the {self._name} agent's process ended: {self._why or 'replaced'}")

    def retire(self, why: str) -> None:
        """Take no more reads; end when those under way have finished, or soon. Idempotent."""
        if LIFE_TRANSITIONS.allows(self.state, LifeEvent.RETIRE):
            self._thread.later(DRAIN_S, lambda: self.end(why))
        self._move(LifeEvent.RETIRE)
        self._end_if_drained()

    def end(self, why: str) -> None:
        """End it now; ``on_life_end`` follows. Idempotent."""
        if self._process is not None and self.state is not LifeState.ENDED:
            self._process.kill(why)

    def close(self) -> None:
        """End it and wait until it is gone; ``on_life_end`` follows before this returns."""
        if self._process is not None:
            self._process.close()

    # AgentOwner

    def on_message(self, message: Message) -> None:
        match message.kind:
            case Kind.READY:
                self._move(LifeEvent.READY)
                self._owner.on_ready(self, message.id, message.payload)
            case Kind.DONE:
                self._pop(message.id).ended(was_local=message.payload == b"\1")
            case Kind.FAILED:
                self._pop(message.id).ended(error=unpack_error(message.payload))
            case Kind.CONNECTING:
                self._connecting = message.id
            case Kind.BROKEN:
                error = self._broken[message.id] = unpack_error(message.payload)
                error.broke_agent = True
                self._owner.on_broken(self, error)
            case Kind.UNABLE:
                self._owner.on_unable(self, unpack_error(message.payload))
        self._end_if_drained()

    def on_end(self, why: str) -> None:
        if self.state is not LifeState.SERVING:
            self._connecting = 0
        self._move(LifeEvent.END)
        self._why = why
        reads, self._reads = self._reads, {}
        for read_id, (peer_id, read) in reads.items():
            read.ended(error=self._broken.get(read_id) or self.lost(peer_id))
        self._owner.on_life_end(self, why, len(reads))

    def _pop(self, read_id: int) -> PostedRead:
        return self._reads.pop(read_id)[1]

    def _end_if_drained(self) -> None:
        if self.state is LifeState.DRAINING and self._reads.keys() == self._broken.keys():
            self.end("its reads have ended")

    def _move(self, event: LifeEvent) -> None:
        self.state = LIFE_TRANSITIONS.after(self.state, event) or self.state

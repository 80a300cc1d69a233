"""Which transport of a source is tried next, the most wanted first. Pure."""

import enum
from collections.abc import Iterable

from diptych.v1 import decode_pb2
from kvtransfer.reader.pull_machine import PullError

_TRIES = 3  # before the next transport's turn
_AGENT_TRIES = 20  # the same, where an agent ended: the next one is on its way


class Turn(enum.Enum):
    """Whose it is after a failure."""

    SAME = enum.auto()  # after a pause: this may have healed by then
    NEXT = enum.auto()  # if one is left


class TransportSearch:
    """One search for a transport over which a pair can be proven."""

    def __init__(self, ranked: Iterable[str]) -> None:
        self._failures: dict[str, str] = {}  # messages, by transport
        self.wanted = list(ranked)  # still to be tried
        self._num_tries = 0  # of the transport whose turn it is
        self._num_agent_tries = 0  # of all

    @property
    def has_failures(self) -> bool:
        """Whether any transport failed, so that what is left says little of the source."""
        return bool(self._failures)

    @property
    def message(self) -> str:
        """How transports failed."""
        return "; ".join(f"{name}: {message}" for name, message in self._failures.items())

    @property
    def error(self) -> PullError:
        """That none is left."""
        return PullError(decode_pb2.PULL_FAILURE_TRANSPORT, self.message)

    def failed(self, name: str, error: PullError) -> Turn:
        """``name`` was tried. Raises ``error`` where that is no transport's fault."""
        is_agents = error.agent_lost and not error.took_agent
        if is_agents and self._num_agent_tries < _AGENT_TRIES:
            self._num_agent_tries += 1
            return Turn.SAME
        lost = error.failure == decode_pb2.PULL_FAILURE_SOURCE_LOST
        if error.refusal or (lost and not error.agent_lost):
            raise error
        self._num_tries += 1
        # What a stopped peer left behind heals.
        if self._num_tries < _TRIES and not error.took_agent:
            self._failures[name] = error.message
            return Turn.SAME
        self.pass_over(name, error.message)
        return Turn.NEXT

    def pass_over(self, name: str, why: str) -> None:
        """Leave ``name`` at once, and what is wanted more than it."""
        self._failures[name] = why
        self.wanted = self.wanted[self.wanted.index(name) + 1 :]
        self._num_tries = 0

    def worked(self, name: str) -> None:
        """Over ``name`` it was proven at last."""
        self._failures.pop(name, None)

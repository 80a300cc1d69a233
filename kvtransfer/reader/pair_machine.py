"""Where the pair of this reader and one source stands, and over which link. Pure.

The shell is :mod:`kvtransfer.reader.pair`. Event loop only.
"""

import enum

from diptych.learned_cost import LearnedCost
from diptych.transitions import Transitions
from kvtransfer.reader.proven_link import Link, ProvenLink

_RATE_WEIGHT = 0.2  # of the newest pull in the moving average


class PairState(enum.Enum):
    """Where a pair stands."""

    CONNECTING = enum.auto()  # being proven: pulls wait for it
    PROVEN = enum.auto()  # pulls go over its link
    FAILED = enum.auto()  # not proven when last tried: pulls do not wait for the next time
    REFUSED = enum.auto()  # source and reader do not fit: not tried again
    LEFT = enum.auto()  # not kept any more


class PairEvent(enum.Enum):
    """What moves it."""

    PROVE = enum.auto()
    IMPROVE = enum.auto()  # a better link is there as well, beside the one in use
    LOSE = enum.auto()  # something failed over the link
    FAIL = enum.auto()
    REFUSE = enum.auto()
    LEAVE = enum.auto()


PAIR_TRANSITIONS = Transitions(
    {
        PairState.CONNECTING: {
            PairEvent.PROVE: PairState.PROVEN,
            PairEvent.FAIL: PairState.FAILED,
            PairEvent.REFUSE: PairState.REFUSED,
            PairEvent.LEAVE: PairState.LEFT,
        },
        PairState.PROVEN: {
            PairEvent.IMPROVE: PairState.PROVEN,
            PairEvent.LOSE: PairState.CONNECTING,
            PairEvent.FAIL: PairState.FAILED,
            PairEvent.LEAVE: PairState.LEFT,
        },
        PairState.FAILED: {
            PairEvent.PROVE: PairState.PROVEN,
            PairEvent.FAIL: PairState.FAILED,
            PairEvent.REFUSE: PairState.REFUSED,
            PairEvent.LEAVE: PairState.LEFT,
        },
        PairState.REFUSED: {PairEvent.LEAVE: PairState.LEFT},
    },
    ignored={
        PairState.CONNECTING: {PairEvent.IMPROVE, PairEvent.LOSE},  # of the link before
        PairState.LEFT: set(PairEvent),
    },
)


class PairMachine:
    """One pair. Invariant: it has a link while PROVEN, and only then.

    Whoever calls owns each link that a method returns: nobody begins a fetch over it.
    """

    def __init__(self) -> None:
        self.state = PairState.CONNECTING
        self.link: Link | None = None
        self.message = ""  # why it is not proven, or not over a better transport
        self.bytes_per_s = 0.0  # of the newest link's proof, then a moving average of pulls
        self.cost = LearnedCost(2)  # s of a pull over the link, for itself and for each byte

    def prove(self, proven: ProvenLink, message: str) -> Link | None:
        """Pulls may go over this link; it comes back where it is too late for that."""
        return self._use(PairEvent.PROVE, proven, message)

    def improve(self, proven: ProvenLink, message: str) -> Link:
        """This link takes the place of the one that is returned, or comes back itself."""
        unused = self._use(PairEvent.IMPROVE, proven, message)
        assert unused is not None, "only a link that is there is improved on"
        return unused

    def measured(self, num_bytes: int, read_s: float) -> None:
        """A pull over the link took so long, which is more than nothing."""
        self.bytes_per_s += _RATE_WEIGHT * (num_bytes / read_s - self.bytes_per_s)
        self.cost.learn((1.0, float(num_bytes)), read_s)

    def lose(self, why: str) -> Link | None:
        """It has to be proven again. None: nothing was lost."""
        return self._drop(PairEvent.LOSE, why)

    def fail(self, why: str) -> Link | None:
        """It could not be proven, for now."""
        return self._drop(PairEvent.FAIL, why)

    def refuse(self, why: str) -> None:
        """It never can be, as long as both processes live."""
        self._drop(PairEvent.REFUSE, why)

    def leave(self, why: str) -> Link | None:
        """It is not kept any more: nobody is to wait for it."""
        return self._drop(PairEvent.LEAVE, why)

    def _use(self, event: PairEvent, proven: ProvenLink, message: str) -> Link | None:
        if not self._move(event):
            return proven.link
        before, self.message = self.link, message
        self.link, self.bytes_per_s = proven.link, proven.bytes_per_s
        self.cost = LearnedCost(2)
        return before

    def _drop(self, event: PairEvent, message: str) -> Link | None:
        if not self._move(event):
            return None
        link, self.link, self.message = self.link, None, message
        return link

    def _move(self, event: PairEvent) -> bool:
        """Whether the event counts. Raises IllegalTransitionError."""
        following = PAIR_TRANSITIONS.after(self.state, event)
        if following is not None:
            self.state = following
        return following is not None

"""Which transports of a source are left alone, because it took our agent with it. Pure."""

from random import Random
from typing import NamedTuple

from diptych.v1 import kv_source_pb2

_FIRST_RATIO = 0.5  # of the time between tries of better transports: it is among the next ones
_MOST_RATIO = 16  # of the same


class _Rest(NamedTuple):
    begin_s: float
    length_s: float
    spread_ratio: float  # of its length, that it really takes
    why: str
    agent: kv_source_pb2.MemoryDescriptor  # the source's, as it was then
    other_agent_s: float  # how long it is at the most where the source has another by now

    def until_s(self, agent: kv_source_pb2.MemoryDescriptor) -> float:
        length_s = self.length_s if agent == self.agent else self.other_agent_s
        return self.begin_s + self.spread_ratio * min(length_s, self.length_s)


class TransportRests:
    """Each try may cost all other pairs theirs, so it rests twice as long after each that did.

    Another agent of the source's is tried at once: the fault may have been the one before. Not
    so if that took ours as well; then it rests as after a first time. Pairs that meet one fault
    together are not tried again together: a rest is its length, or down to half of that.
    Seconds of one monotonic clock.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._rests: dict[str, _Rest] = {}
        self._broke: dict[str, kv_source_pb2.MemoryDescriptor] = {}  # the source's, by a read

    def took_agent(
        self,
        name: str,
        why: str,
        agent: kv_source_pb2.MemoryDescriptor,
        now: float,
        reprove_s: float,
        *,
        by_read: bool = False,
    ) -> bool:
        """It was tried once more; better transports are tried each ``reprove_s``.

        Whether it rests for that. Not for the first one ``by_read``, which met an error, with one
        agent of the source's: a stopped source leaves that.
        """
        if by_read:
            is_first = self._broke.get(name) != agent
            self._broke[name] = agent
            if is_first:
                return False
        before = self._rests.get(name)
        length_s, other_agent_s = _FIRST_RATIO * reprove_s, 0.0
        if before is not None:
            other_agent_s = length_s
            length_s = min(2 * before.length_s, _MOST_RATIO * reprove_s)
        spread_ratio = self._random.uniform(0.5, 1.0)
        self._rests[name] = _Rest(now, length_s, spread_ratio, why, agent, other_agent_s)
        return True

    def worked(self, name: str) -> None:
        """It did: whatever it took before is forgotten."""
        self._rests.pop(name, None)
        self._broke.pop(name, None)

    def nothing_else_works(self, reprove_s: float) -> None:
        """The source cannot be read while they rest: none rests for longer than ``reprove_s``."""
        for name, rest in self._rests.items():
            self._rests[name] = rest._replace(length_s=min(rest.length_s, reprove_s))

    def resting(self, name: str, agent: kv_source_pb2.MemoryDescriptor, now: float) -> str | None:
        """Why it is not to be tried; None: it may be. agent: how the source describes it now."""
        rest = self._rests.get(name)
        return rest.why if rest is not None and now < rest.until_s(agent) else None

"""How far a sequence is that was promised a pace: told by workers, used by routers. Pure."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from diptych.v1 import worker_pb2

MOST_TOLD: Final = 8  # by one worker, those that can lose the least
_OF_ONE_PACE: Final = MOST_TOLD // 2  # where others have another pace: nobody hides those
_HOPELESS: Final = 0.8  # of the time that tokens take: whoever has less for each has missed
_OUTLIVING: Final = 4  # who draws more than was expected draws a fourth of what it has more
_LEAST_S: Final = 1e-6
_MOST_S: Final = 1e6
_MOST_TOKENS: Final = 1 << 30


class Paced(NamedTuple):
    """One that decodes, as of when its worker told. Times in s."""

    tpot_s: float  # that it was promised, between two tokens on average
    decoding_s: float  # since its first token
    num_drawn: int  # tokens since then
    num_more: int  # tokens that it is expected to draw; one at the least
    owner: str = ""  # whose it is: its router's incarnation; empty: the worker does not say
    sequence_id: int = 0
    share: float = 1.0  # how likely it goes on so; a worker tells of one way

    @classmethod
    def expected(
        cls,
        tpot_s: float,
        decoding_s: float,
        num_drawn: int,
        num_to_come: int,
        owner: str = "",
        sequence_id: int = 0,
    ) -> "Paced":
        """So many tokens are to come; less than 1: nobody knows, or it outlived that."""
        num_more = max(num_to_come, num_outliving(num_drawn))
        return cls(tpot_s, decoding_s, num_drawn, num_more, owner, sequence_id)

    def left_s(self, tpot_s: float) -> float:
        """For all tokens that are to come, so that it has that pace in the end."""
        return tpot_s * (self.num_drawn + self.num_more) - self.decoding_s

    def spare_s(self, token_s: float) -> float:
        """That it can lose, if each token that is to come takes so long."""
        return self.left_s(self.tpot_s) - self.num_more * token_s


_TOLD: Final = Paced._fields[:-1]
_told: Final = attrgetter(*_TOLD)


def num_outliving(num_drawn: int) -> int:
    """Tokens that one draws yet that has drawn as many as were expected, or more."""
    return 1 + num_drawn // _OUTLIVING


def tightest(paced: Iterable[Paced], token_s: float) -> list[Paced]:
    """Those that can lose the least, of those that can keep their pace; a token takes so long."""
    hopeful = (each for each in paced if each.spare_s(_HOPELESS * token_s) > 0.0)
    num_of_pace = Counter[float]()
    first: list[Paced] = []
    rest: list[Paced] = []
    for each in sorted(hopeful, key=lambda each: each.spare_s(token_s)):
        num_of_pace[each.tpot_s] += 1
        (first if num_of_pace[each.tpot_s] <= _OF_ONE_PACE else rest).append(each)
    return (first + rest)[:MOST_TOLD]


def to_proto(paced: Iterable[Paced]) -> list[worker_pb2.PacedSequence]:
    """For Watch."""
    return [
        worker_pb2.PacedSequence(**{name: getattr(each, name) for name in _TOLD}) for each in paced
    ]


def from_proto(told: Iterable[worker_pb2.PacedSequence]) -> tuple[Paced, ...]:
    """What a worker says; without those that cannot be."""
    paced = [Paced(*_told(each)) for each in islice(told, MOST_TOLD)]
    return tuple([each for each in paced if _can_be(each)])


def _can_be(paced: Paced) -> bool:
    tpot_s, decoding_s, num_drawn, num_more, *_ = paced
    times = _LEAST_S <= tpot_s <= _MOST_S and 0.0 <= decoding_s <= _MOST_S  # no NaN either
    return times and num_drawn < _MOST_TOKENS and 0 < num_more < _MOST_TOKENS

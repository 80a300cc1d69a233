"""What sequences of ours were promised, by worker. Pure."""

from collections import Counter

from router.placement.loss import NOTHING_PROMISED, Promised
from router.placement.types import Promise, WorkerId


class Promises:
    """Of each sequence that runs: it is counted from being placed until it has ended.

    Nobody is forgotten with a worker: of one that is gone all end, and one whose Watch broke off
    may run them all the while.
    """

    def __init__(self) -> None:
        self._counts: dict[WorkerId, Counter[Promise]] = {}
        self._promised: dict[WorkerId, Promised] = {}  # what these come to

    def on(self, worker: WorkerId) -> Promised:
        """All of one worker."""
        return self._promised.get(worker, NOTHING_PROMISED)

    def began(self, worker: WorkerId, promise: Promise) -> None:
        """One more runs there."""
        counts = self._counts.setdefault(worker, Counter())
        counts[_alike(promise)] += 1
        self._promised[worker] = _sum(counts)

    def ended(self, worker: WorkerId, promise: Promise) -> None:
        """One of these runs no more."""
        counts, alike = self._counts.get(worker), _alike(promise)
        if counts is None or not counts[alike]:
            return
        counts[alike] -= 1
        if not counts[alike]:
            del counts[alike]
        self._promised[worker] = _sum(counts)
        if not counts:
            del self._counts[worker], self._promised[worker]


def _alike(promise: Promise) -> Promise:
    """Lengths of one power of two are taken to be the least of it: there are few of them."""
    num_tokens = promise.num_output_tokens
    return promise._replace(num_output_tokens=num_tokens and 1 << (num_tokens.bit_length() - 1))


def _sum(counts: Counter[Promise]) -> Promised:
    paces, lengths = [], Counter[int]()
    for promise, num in counts.items():
        if promise.tpot_s is not None:
            paces.append(promise.tpot_s)
            lengths[promise.num_output_tokens] += num
    told = tuple(lengths.items())
    return Promised(counts.total(), lengths.total(), min(paces, default=0.0), told)

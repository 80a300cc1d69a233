"""Which prompt blocks each worker's prefix cache holds, as the workers tell. Pure."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from diptych.block_hash import BlockKey
from diptych.cache_change import CacheChange, fold

_MOST_SETTLING: Final = 8192  # prompts of one worker, between two words of it


class _Worker:
    """What one process told of its cache, and what is on its way into it."""

    def __init__(self, bit: int) -> None:
        self.bit = bit  # its own, in the masks of the index
        self.seq: int | None = None  # up to where it told; None: nothing
        self.held: dict[BlockKey, None] = {}  # what was told or asked for last is at the end
        self.is_whole = True  # nothing that it told was dropped for want of room
        self.digest = 0  # of all that it told, whether or not it is in ``held``
        self.expected: dict[BlockKey, int] = {}  # by so many prompts
        self.settling: deque[Sequence[BlockKey]] = deque()  # since it told last
        self.overdue: deque[Sequence[BlockKey]] = deque()  # since before that

    def is_as_told(self, change: CacheChange) -> bool:
        """Whether what it told, up to this change, is what it says that it has."""
        is_all = len(self.held) == change.num_blocks or not self.is_whole
        return is_all and self.digest == change.digest

    def use(self, keys: Iterable[BlockKey]) -> None:
        """A prompt with these goes there: of what it holds they are the last to be dropped.

        Its first key is the very last: without that one the others are of no use.
        """
        held = self.held
        for key in reversed([key for key in keys if key in held]):
            del held[key]
            held[key] = None

    def retract(self, key: BlockKey) -> bool:
        """One prompt less expects it; whether it was the last."""
        num_expecting = self.expected.get(key, 0)
        if num_expecting > 1:
            self.expected[key] = num_expecting - 1
        elif num_expecting:
            del self.expected[key]
        return num_expecting == 1


class CacheIndex:
    """The caches of all workers, by incarnation, exactly as they were when they told last.

    A worker tells by :class:`CacheChange`; one that misses something is asked for everything.
    What a prompt will bring is *expected* from its placement on, so that prompts that come
    together meet, until its worker had the time to tell of it. Of a worker that does not tell,
    nothing but what is expected is known: it is taken to have nothing.

    Keys are hashes that are chained over the tenant's salt: tenants meet where their salts are
    the same, and nobody else's prompts are in them to be read.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks`` of one worker at the most: what is new takes the room of what was not
        asked for since longest.
        """
        self._max_blocks = max_blocks
        self._workers: dict[str, _Worker] = {}
        self._by_bit: dict[int, str] = {}
        self._held: dict[BlockKey, int] = {}  # masks of the workers that hold it
        self._expected: dict[BlockKey, int] = {}  # and of those where some prompt expects it
        self._asked: Sequence[BlockKey] | None = None
        self._hits: dict[str, int] = {}  # of what was asked last, as long as nothing changes

    def seq(self, incarnation: str) -> int | None:
        """Up to where the worker's changes are known; None: nothing of it is."""
        worker = self._workers.get(incarnation)
        return None if worker is None else worker.seq

    def is_whole(self, incarnation: str) -> bool:
        """Whether there was room for all that the worker told."""
        worker = self._workers.get(incarnation)
        return worker is None or worker.is_whole

    @property
    def num_blocks(self) -> int:
        """Known to be held, of all workers together."""
        return sum(len(worker.held) for worker in self._workers.values())

    def told(self, incarnation: str, change: CacheChange) -> bool:
        """The worker told of its cache. False: something is missing, ask it for everything.

        Nothing that it told before is believed then.
        """
        worker = self._worker(incarnation)
        if change.is_reset:
            self._reset(worker)
        elif worker.seq != change.from_seq:
            self.untold(incarnation)
            return False
        self._apply(worker, change)
        if not worker.is_as_told(change):
            self.untold(incarnation)
            return False
        if not change.has_more:
            # What had settled before it told last, it would have told of by now.
            overdue, worker.overdue, worker.settling = worker.overdue, worker.settling, deque()
            self._retract_all(worker, overdue)
        return True

    def untold(self, incarnation: str) -> None:
        """The worker does not tell any more: what it holds is not known."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._changed()
            self._reset(worker)
            awaited = (*worker.overdue, *worker.settling)
            worker.overdue, worker.settling = deque(), deque()
            self._retract_all(worker, awaited)
            self._drop_if_empty(incarnation, worker)

    def forget(self, incarnation: str) -> None:
        """The worker is gone, or not seen for a while.

        What is expected ends with who expects it: it may still be computed, and whoever expects
        the same once the worker is seen again has to find only its own part taken back.
        """
        self.untold(incarnation)

    def expect(self, incarnation: str, block_keys: Sequence[BlockKey]) -> None:
        """The worker was asked to take a prompt: it will hold these blocks, if it does."""
        worker, masks = self._worker(incarnation), self._expected
        if 2 * len(worker.held) > self._max_blocks:  # else nothing is dropped so soon
            worker.use(block_keys)
        bit, expected = worker.bit, worker.expected
        for key in block_keys:
            num_expecting = expected.get(key, 0)
            if num_expecting:
                expected[key] = num_expecting + 1
            elif len(expected) < self._max_blocks:
                expected[key] = 1
                masks[key] = masks.get(key, 0) | bit

    def retract(self, incarnation: str, block_keys: Sequence[BlockKey]) -> None:
        """The worker did not take a prompt for which these blocks were expected."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._changed()
            self._retract_all(worker, (block_keys,))
            self._drop_if_empty(incarnation, worker)

    def settle(self, incarnation: str, block_keys: Sequence[BlockKey]) -> None:
        """The worker has computed what was expected, or never will.

        It tells of what it has with what it tells next but one at the latest; until then it is
        taken to have it. Of one that does not tell, nothing is remembered.
        """
        worker = self._workers.get(incarnation)
        if worker is None or worker.seq is None:
            self.retract(incarnation, block_keys)
        else:
            worker.settling.append(block_keys)
            if len(worker.settling) > _MOST_SETTLING:  # it never ends to tell
                self.retract(incarnation, worker.settling.popleft())

    def holders(self, block_keys: Sequence[BlockKey]) -> set[str]:
        """The workers that have the first block: of the rest, all others can use nothing."""
        return set(self._num_hits(block_keys))

    def num_hit_blocks(self, incarnation: str, block_keys: Sequence[BlockKey]) -> int:
        """How many leading blocks the worker has."""
        return self._num_hits(block_keys).get(incarnation, 0)

    def most_hit_blocks(self, block_keys: Sequence[BlockKey]) -> int:
        """How many leading blocks the worker has that has most of them."""
        return max(self._num_hits(block_keys).values(), default=0)

    def _num_hits(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Of each worker that has any; the keys are walked once for all of them."""
        if keys is self._asked:
            return self._hits
        self._asked, self._hits = keys, {}
        held, expected = self._held, self._expected
        having, num_keys = -1, 0  # workers that have all keys so far
        for num_keys, key in enumerate(keys):
            mask = held.get(key, 0) | expected.get(key, 0)
            if num_keys:
                self._note_hits(having & ~mask, num_keys)
            having &= mask
            if not having:
                break
        else:
            self._note_hits(having if keys else 0, len(keys))
        return self._hits

    def _note_hits(self, workers: int, num_hits: int) -> None:
        while workers:
            bit = workers & -workers
            self._hits[self._by_bit[bit]] = num_hits
            workers ^= bit

    def _apply(self, worker: _Worker, change: CacheChange) -> None:
        held, masks, added = worker.held, self._held, change.added
        self._drop_keys(worker, held.keys() & change.removed)
        if change.is_reset or change.from_seq == change.to_seq:
            # Of a whole cache what lasted longest comes first; of much that is new, the newest.
            added = added[: max(0, self._max_blocks - len(held))]
            worker.is_whole &= len(added) == len(change.added)
        for key in added:
            held[key] = None
            masks[key] = masks.get(key, 0) | worker.bit
        num_over = len(held) - self._max_blocks
        if num_over > 0:
            self._drop_keys(worker, list(islice(held, num_over)))
            worker.is_whole = False
        worker.digest ^= fold(change.removed) ^ fold(change.added)
        worker.seq = change.to_seq

    def _drop_keys(self, worker: _Worker, keys: Collection[BlockKey]) -> None:
        """Each of them is held."""
        _unmark(self._held, keys, worker.bit)
        for key in keys:
            del worker.held[key]

    def _reset(self, worker: _Worker) -> None:
        """Drop what it told."""
        _unmark(self._held, worker.held, worker.bit)
        worker.seq, worker.held, worker.is_whole, worker.digest = None, {}, True, 0

    def _retract_all(self, worker: _Worker, prompts: Iterable[Sequence[BlockKey]]) -> None:
        """So many prompts less expect their blocks."""
        for keys in prompts:
            _unmark(self._expected, filter(worker.retract, keys), worker.bit)

    def _worker(self, incarnation: str) -> _Worker:
        """That may be changed."""
        self._changed()
        worker = self._workers.get(incarnation)
        if worker is None:
            bit = 1
            while bit in self._by_bit:
                bit <<= 1
            worker = self._workers[incarnation] = _Worker(bit)
            self._by_bit[bit] = incarnation
        return worker

    def _drop_if_empty(self, incarnation: str, worker: _Worker) -> None:
        if worker.seq is None and not worker.expected:
            self._drop(incarnation, worker)

    def _drop(self, incarnation: str, worker: _Worker) -> None:
        del self._workers[incarnation], self._by_bit[worker.bit]

    def _changed(self) -> None:
        self._asked = None


def _unmark(masks: dict[BlockKey, int], keys: Iterable[BlockKey], bit: int) -> None:
    """Each of them has that bit."""
    for key in keys:
        mask = masks[key] ^ bit
        if mask:
            masks[key] = mask
        else:
            del masks[key]

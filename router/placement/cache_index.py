"""Which prompt blocks each worker's prefix cache holds, as the workers tell. Pure."""

from collections.abc import Iterable, Sequence

from diptych.block_hash import BlockKey
from diptych.cache_change import CacheChange, fold


class _Worker:
    """What one process told of its cache, and what is on its way into it."""

    def __init__(self, bit: int) -> None:
        self.bit = bit  # its own, in the masks of the index
        self.seq: int | None = None  # up to where it told; None: nothing
        self.held: set[BlockKey] = set()
        self.is_whole = True  # nothing that it told was left out for want of room
        self.digest = 0  # of all that it told, whether or not it is in ``held``
        self.expected: dict[BlockKey, int] = {}  # by so many prompts
        self.settling: list[Sequence[BlockKey]] = []  # since it told last
        self.overdue: list[Sequence[BlockKey]] = []  # since before that

    def is_as_told(self, change: CacheChange) -> bool:
        """Whether what it told, up to this change, is what it says that it has."""
        is_all = len(self.held) == change.num_blocks or not self.is_whole
        return is_all and self.digest == change.digest

    def retract(self, keys: Sequence[BlockKey]) -> None:
        """One prompt less expects these."""
        for key in keys:
            num_expecting = self.expected.get(key, 0)
            if num_expecting > 1:
                self.expected[key] = num_expecting - 1
            elif num_expecting:
                del self.expected[key]

    def settle_all(self) -> None:
        """Nothing more is awaited of it."""
        for keys in (*self.overdue, *self.settling):
            self.retract(keys)
        self.settling, self.overdue = [], []

    def settle_overdue(self) -> None:
        """It told: what had settled before it told last, it would have told of by now."""
        for keys in self.overdue:
            self.retract(keys)
        self.settling, self.overdue = [], self.settling

    def num_hits(self, keys: Sequence[BlockKey], num_held: int) -> int:
        """How many in a row, from the first on, it is to hold, if it holds so many of them."""
        while num_held < len(keys) and (
            keys[num_held] in self.expected or keys[num_held] in self.held
        ):
            num_held += 1
        return num_held


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
        """``max_blocks`` of one worker at the most; what it has beyond is not known."""
        self._max_blocks = max_blocks
        self._workers: dict[str, _Worker] = {}
        self._by_bit: dict[int, str] = {}
        self._masks: dict[BlockKey, int] = {}  # of the workers that hold it
        self._asked: Sequence[BlockKey] | None = None
        self._hits: dict[str, int] = {}  # of what was asked last, as long as nothing changes

    def seq(self, incarnation: str) -> int | None:
        """Up to where the worker's changes are known; None: nothing of it is."""
        worker = self._workers.get(incarnation)
        return None if worker is None else worker.seq

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
        worker.settle_overdue()
        return True

    def untold(self, incarnation: str) -> None:
        """The worker does not tell any more: what it holds is not known."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._changed()
            self._reset(worker)
            worker.settle_all()
            self._drop_if_empty(incarnation, worker)

    def forget(self, incarnation: str) -> None:
        """The worker is gone."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._changed()
            self._reset(worker)
            self._drop(incarnation, worker)

    def expect(self, incarnation: str, block_keys: Sequence[BlockKey]) -> None:
        """The worker was asked to take a prompt: it will hold these blocks, if it does."""
        expected = self._worker(incarnation).expected
        for key in block_keys:
            if key in expected or len(expected) < self._max_blocks:
                expected[key] = expected.get(key, 0) + 1

    def retract(self, incarnation: str, block_keys: Sequence[BlockKey]) -> None:
        """The worker did not take a prompt for which these blocks were expected."""
        worker = self._workers.get(incarnation)
        if worker is not None:
            self._changed()
            worker.retract(block_keys)
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

    def holders(self, block_keys: Sequence[BlockKey]) -> set[str]:
        """The workers that have the first block: of the rest, all others can use nothing."""
        return set(self._num_hits(block_keys))

    def num_hit_blocks(self, incarnation: str, block_keys: Sequence[BlockKey]) -> int:
        """How many leading blocks the worker has."""
        return self._num_hits(block_keys).get(incarnation, 0)

    def _num_hits(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Of each worker that has any; the keys are walked once for all of them."""
        if keys is self._asked:
            return self._hits
        self._asked, self._hits = keys, {}
        having, num_keys = -1, 0  # workers that have all keys so far
        for num_keys, key in enumerate(keys):
            mask = self._masks.get(key, 0)
            if num_keys:
                self._note_hits(having & ~mask, num_keys)
            having &= mask
            if not having:
                break
        else:
            self._note_hits(having if keys else 0, len(keys))
        for name, worker in self._workers.items():
            if worker.expected:
                num_held = self._hits.get(name, 0)
                num_hits = worker.num_hits(keys, num_held)
                if num_hits > num_held:
                    self._hits[name] = num_hits
        return self._hits

    def _note_hits(self, workers: int, num_hits: int) -> None:
        while workers:
            bit = workers & -workers
            self._hits[self._by_bit[bit]] = num_hits
            workers ^= bit

    def _apply(self, worker: _Worker, change: CacheChange) -> None:
        bit, masks, held = worker.bit, self._masks, worker.held
        self._unmark(held.intersection(change.removed), bit)
        held.difference_update(change.removed)
        added = change.added[: max(0, self._max_blocks - len(held))]
        worker.is_whole &= len(added) == len(change.added)
        for key in added:
            masks[key] = masks.get(key, 0) | bit
        held.update(added)
        worker.digest ^= fold(change.removed) ^ fold(change.added)
        worker.seq = change.to_seq

    def _reset(self, worker: _Worker) -> None:
        """Drop what it told."""
        self._unmark(worker.held, worker.bit)
        worker.seq, worker.held, worker.is_whole, worker.digest = None, set(), True, 0

    def _unmark(self, keys: Iterable[BlockKey], bit: int) -> None:
        masks = self._masks
        for key in keys:
            mask = masks[key] ^ bit
            if mask:
                masks[key] = mask
            else:
                del masks[key]

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

"""Random lives of prefix caches that routers follow: real pools, logs and indexes, no sockets.

Between a worker and a router lies a stream: what the worker told and the router has not heard.
It may lose a message, break, or come to nothing because either side starts anew. When all has
been quiet, each router's index has to be what is in the pools.
"""

import random
from collections import Counter, deque
from collections.abc import Callable

from diptych.block_hash import block_keys
from diptych.cache_change import CacheChange
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.errors import BlocksExhaustedError
from router.placement.cache_index import CacheIndex

NUM_BLOCKS = 48
BLOCK_SIZE = 2
_NUM_PROMPTS = 24  # that may be drawn; beginnings are shared
_LONGEST = 12  # blocks of one
_MOST_UNHEARD = 8  # messages of one stream
_SALTS = (b"", b"one tenant", b"another")


class Worker:
    """A pool that sequences come to and leave; of one process."""

    def __init__(self, incarnation: str, rng: random.Random) -> None:
        self.incarnation = incarnation
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self._rng = rng
        self._tables: list[list[int]] = []

    def admit(self, keys: list[bytes]) -> None:
        """A sequence that computes what it does not find, if there is room."""
        hits = self.pool.lookup(keys)
        try:
            self.pool.check_available(len(keys) - len(hits), hits)
        except BlocksExhaustedError:
            return
        self.pool.hold(hits, Owner.RUNNING)
        fresh = self.pool.allocate(len(keys) - len(hits), Owner.RUNNING)
        num_computed = self._rng.randint(len(hits), len(keys))  # the rest is cut off
        for index in range(len(hits), num_computed):
            parent = keys[index - 1] if index else None
            self.pool.insert(fresh[index - len(hits)], keys[index], parent)
        self._tables.append(hits + fresh)

    def release(self) -> None:
        """Some sequence ends."""
        if self._tables:
            table = self._tables.pop(self._rng.randrange(len(self._tables)))
            self.pool.free(table, Owner.RUNNING)

    def distrust(self) -> None:
        """What some sequence computed is shared no more."""
        if self._tables:
            self.pool.forget(self._rng.choice(self._tables)[-2:])

    def keys(self) -> set[bytes]:
        """All that are cached."""
        found = (self.pool.key_of(block_id) for block_id in range(NUM_BLOCKS))
        return {key for key in found if key is not None}


class Stream:
    """One router's of one worker's place; ``worker`` is the process that it was opened to."""

    def __init__(self, index: CacheIndex, worker: Worker) -> None:
        self.index = index
        self.worker = worker
        self.unheard: deque[CacheChange] = deque()
        self._told_seq: int | None = None
        self.open(worker)

    def open(self, worker: Worker) -> None:
        """Again, or for the first time: what was under way is lost."""
        if worker is not self.worker:
            self.index.forget(self.worker.incarnation)
        self.worker = worker
        self.unheard.clear()
        self._told_seq = self.index.seq(worker.incarnation)

    def tell(self) -> None:
        """The worker says what became other, if the stream takes more."""
        if len(self.unheard) < _MOST_UNHEARD:
            changes = list(self.worker.pool.cache_log.since(self._told_seq))
            self._told_seq = changes[-1].to_seq
            self.unheard.extend(changes)

    def hear(self) -> bool:
        """The next message; True if it made the router ask for everything."""
        if not self.unheard:
            return False
        if self.index.told(self.worker.incarnation, self.unheard.popleft()):
            return False
        self.open(self.worker)
        return True


class CacheEvents:
    """Some workers, some routers, and what may happen to them. One seed, one run."""

    def __init__(self, seed: int, num_workers: int = 3, num_routers: int = 2) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._num_started = 0
        self._workers = [self._start() for _ in range(num_workers)]
        self._indexes = [CacheIndex(1000) for _ in range(num_routers)]
        self._streams = [[Stream(i, w) for w in self._workers] for i in self._indexes]
        self._prompts = self._draw_prompts()
        kinds: list[tuple[int, Callable[[], None]]] = [
            (300, self._admit),
            (290, self._release),
            (3, self._distrust),
            (120, self._tell),
            (200, self._hear),
            (40, self._expect),
            (4, self._lose),
            (4, self._break),
            (1, self._restart_worker),
            (1, self._restart_router),
        ]
        self._weights = [weight for weight, _ in kinds]
        self._kinds = [happen for _, happen in kinds]

    def run(self, num_events: int) -> None:
        """So many things happen."""
        for happen in self._rng.choices(self._kinds, self._weights, k=num_events):
            happen()

    def check(self) -> None:
        """Let all be quiet: what routers know is what there is, to the last block."""
        for router, index in enumerate(self._indexes):
            for place, worker in enumerate(self._workers):
                stream = self._streams[router][place]
                if stream.worker is not worker:
                    stream.open(worker)
                for _ in range(3):  # what settles does so with the third that it tells
                    self._hear_all(stream)
                    stream.tell()
                self._hear_all(stream)
                assert index._workers[worker.incarnation].held.keys() == worker.keys()
                for keys in self._prompts:
                    num_hits = len(worker.pool.lookup(keys))
                    assert index.num_hit_blocks(worker.incarnation, tuple(keys)) == num_hits
            assert len(index._workers) == len(self._workers), "a process that is gone is known"
        self.counts["checks"] += 1

    def _hear_all(self, stream: Stream) -> None:
        while stream.unheard:
            self.counts["asked anew"] += stream.hear()

    def _draw_prompts(self) -> list[list[bytes]]:
        prompts = []
        for _ in range(_NUM_PROMPTS):
            start = self._rng.choice((1, 2)), self._rng.choice((1, 2, 3))
            num_own = self._rng.randrange(1, _LONGEST - 1) * BLOCK_SIZE
            own = [self._rng.randrange(9) for _ in range(num_own)]
            token_ids = [start[0]] * BLOCK_SIZE + [start[1]] * BLOCK_SIZE + own
            prompts.append(block_keys(token_ids, BLOCK_SIZE, self._rng.choice(_SALTS)))
        return prompts

    def _start(self) -> Worker:
        self._num_started += 1
        return Worker(f"w{self._num_started}", self._rng)

    def _stream(self) -> Stream:
        return self._rng.choice(self._rng.choice(self._streams))

    def _admit(self) -> None:
        self._rng.choice(self._workers).admit(self._rng.choice(self._prompts))

    def _release(self) -> None:
        self._rng.choice(self._workers).release()

    def _distrust(self) -> None:
        self._rng.choice(self._workers).distrust()

    def _tell(self) -> None:
        self._stream().tell()

    def _hear(self) -> None:
        self.counts["asked anew"] += self._stream().hear()

    def _expect(self) -> None:
        """A prompt is placed, and is computed or refused."""
        stream, keys = self._stream(), self._rng.choice(self._prompts)
        name = stream.worker.incarnation
        stream.index.expect(name, keys)
        self._rng.choice((stream.index.settle, stream.index.retract))(name, keys)

    def _lose(self) -> None:
        stream = self._stream()
        if stream.unheard:
            del stream.unheard[self._rng.randrange(len(stream.unheard))]
            self.counts["lost messages"] += 1

    def _break(self) -> None:
        stream = self._stream()
        stream.open(stream.worker)
        self.counts["broken streams"] += 1

    def _restart_worker(self) -> None:
        """The routers find the new process one after the other, some only in the end."""
        place = self._rng.randrange(len(self._workers))
        self._workers[place] = self._start()
        for streams in self._streams:
            if self._rng.random() < 0.5:
                streams[place].open(self._workers[place])
        self.counts["worker restarts"] += 1

    def _restart_router(self) -> None:
        router = self._rng.randrange(len(self._indexes))
        index = self._indexes[router] = CacheIndex(1000)
        self._streams[router] = [Stream(index, worker) for worker in self._workers]
        self.counts["router restarts"] += 1

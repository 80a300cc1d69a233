"""How many prompt tokens this router has waiting on each prefill worker. Pure."""

from collections import Counter
from collections.abc import Callable

from router.placement.types import WorkerId


class PrefillBacklog:
    """Sums of what leases were opened for and is not computed. ``on_change`` hears of each.

    Of each worker it knows which leases came since the worker last told how it is: what it told
    has none of these, whatever it has computed of the others.
    """

    def __init__(self, on_change: Callable[[WorkerId], None]) -> None:
        self._on_change = on_change
        self._pending: dict[int, tuple[WorkerId, int]] = {}  # by the lease's sequence id
        self._sums: Counter[WorkerId] = Counter()
        self._payers: dict[int, bytes] = {}
        self._by_payer: Counter[tuple[WorkerId, bytes]] = Counter()  # prompts that wait
        self._sent: dict[WorkerId, set[int]] = {}  # sequence ids, since the worker told

    def opened(
        self, sequence_id: int, worker: WorkerId, num_tokens: int, payer: bytes = b""
    ) -> None:
        """A lease was asked for."""
        self._payers[sequence_id] = payer
        self._by_payer[worker, payer] += 1
        self._sent.setdefault(worker, set()).add(sequence_id)
        self._set(sequence_id, worker, num_tokens)

    def accepted(self, sequence_id: int, num_cached_tokens: int) -> None:
        """The worker has that much of its prompt in its cache: only the rest is work."""
        if sequence_id in self._pending:
            worker, num_tokens = self._pending[sequence_id]
            self._set(sequence_id, worker, max(0, num_tokens - num_cached_tokens))

    def computed(self, sequence_id: int) -> None:
        """Its prompt is computed, or the lease is gone. Idempotent."""
        worker, num_tokens = self._pending.pop(sequence_id, (None, 0))
        if worker is not None:
            key = worker, self._payers.pop(sequence_id)
            self._by_payer[key] -= 1
            if not self._by_payer[key]:
                del self._by_payer[key]
            sent = self._sent.get(worker, set())
            sent.discard(sequence_id)
            if not sent:
                self._sent.pop(worker, None)
            self._add(worker, -num_tokens)

    def told(self, worker: WorkerId) -> None:
        """The worker said how it is, all that was sent until now included."""
        self._sent.pop(worker, None)

    def num_pending_tokens(self, worker: WorkerId) -> int:
        """Of this router's prompts on ``worker``."""
        return self._sums[worker]

    def num_behind(self, worker: WorkerId, payer: bytes) -> int:
        """Tokens that wait there and do so behind that payer's next prompt, as payers take turns.

        0 where one of its own waits there already. Of the others the first goes on.
        """
        return 0 if (worker, payer) in self._by_payer else self._sums[worker]

    def num_sent_tokens(self, worker: WorkerId) -> int:
        """Of these, such as were sent since it told how it is."""
        return sum(self._pending[each][1] for each in self._sent.get(worker, ()))

    def _set(self, sequence_id: int, worker: WorkerId, num_tokens: int) -> None:
        before = self._pending[sequence_id][1] if sequence_id in self._pending else 0
        self._pending[sequence_id] = (worker, num_tokens)
        self._add(worker, num_tokens - before)

    def _add(self, worker: WorkerId, num_tokens: int) -> None:
        self._sums[worker] += num_tokens
        if not self._sums[worker]:
            del self._sums[worker]
        self._on_change(worker)

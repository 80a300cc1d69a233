"""What of this router's prompts waits on each prefill worker. Pure."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from router.placement.prefill_load import OwnPrompts
from router.placement.views import WorkerId


class _Prompt(NamedTuple):
    """Of a lease."""

    worker: WorkerId
    num_tokens: int  # that are to be computed
    payer: bytes
    is_accepted: bool = False


class PrefillBacklog:
    """What leases were opened for and is not computed. ``on_change`` hears of each change.

    Of each worker it knows which leases were not there when it last told how it is: what it told
    has none of these, whatever it has computed of the others. Those that it had not accepted by
    then are taken to be on their way to it.
    """

    def __init__(self, on_change: Callable[[WorkerId], None]) -> None:
        self._on_change = on_change
        self._pending: dict[int, _Prompt] = {}  # by the lease's sequence id
        self._sums: Counter[WorkerId] = Counter()
        self._payers: dict[WorkerId, Counter[bytes]] = {}  # prompts that wait, of each
        self._sent: dict[WorkerId, set[int]] = {}  # sequence ids, of those that were not there

    def opened(self, sequence_id: int, worker: WorkerId, num_tokens: int, payer: bytes) -> None:
        """A lease was asked for."""
        self._payers.setdefault(worker, Counter())[payer] += 1
        self._sent.setdefault(worker, set()).add(sequence_id)
        self._pending[sequence_id] = _Prompt(worker, num_tokens, payer)
        self._add(worker, num_tokens)

    def accepted(self, sequence_id: int, num_cached_tokens: int) -> None:
        """The worker has that much of its prompt in its cache: only the rest is work."""
        prompt = self._pending.get(sequence_id)
        if prompt is not None:
            num_left = max(0, prompt.num_tokens - num_cached_tokens)
            self._pending[sequence_id] = prompt._replace(num_tokens=num_left, is_accepted=True)
            self._add(prompt.worker, num_left - prompt.num_tokens)

    def computed(self, sequence_id: int) -> None:
        """Its prompt is computed, or the lease is gone. Idempotent."""
        prompt = self._pending.pop(sequence_id, None)
        if prompt is None:
            return
        worker, payers = prompt.worker, self._payers[prompt.worker]
        payers[prompt.payer] -= 1
        if not payers[prompt.payer]:
            del payers[prompt.payer]
        if not payers:
            del self._payers[worker]
        sent = self._sent.get(worker, set())
        sent.discard(sequence_id)
        if not sent:
            self._sent.pop(worker, None)
        self._add(worker, -prompt.num_tokens)

    def told(self, worker: WorkerId) -> OwnPrompts:
        """The worker said how it is, all that it had accepted included; what waits there."""
        sent = self._sent.pop(worker, set())
        on_their_way = {each for each in sent if not self._pending[each].is_accepted}
        if on_their_way:
            self._sent[worker] = on_their_way
        return self.own(worker)

    def own(self, worker: WorkerId) -> OwnPrompts:
        """What waits on ``worker``."""
        num_sent = sum(self._pending[each].num_tokens for each in self._sent.get(worker, ()))
        payers = frozenset(self._payers.get(worker, ()))
        return OwnPrompts(self._sums[worker], num_sent, payers)

    def _add(self, worker: WorkerId, num_tokens: int) -> None:
        self._sums[worker] += num_tokens
        if not self._sums[worker]:
            del self._sums[worker]
        self._on_change(worker)

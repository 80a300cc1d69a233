"""Who goes next among those that wait: shares of the engines' seconds, by class and tenant. Pure.

Classes share by weight, the tenants of a class alike, and a tenant's own requests go by when
they are due. Whoever goes is charged what it is expected to take of the engines, and what it
took less or more once that is known; the one that was charged the least for its weight is
next (virtual counters: Sheng et al., arXiv 2401.00588). Who comes back after a pause is lifted
to those who waited meanwhile, so that nobody saves up seconds that he did not want; nor does
he by what is given back of earlier charges, which puts him before none of those that wait.
Who was lifted to somebody who was charged too much follows him when that is given back, but
not to before others that have waited all the while.
Where nobody waited he is lifted to whoever was charged the most (the end of a busy period in
start-time fair queueing: Goyal et al., SIGCOMM 1996): what was taken while nobody else wanted
it is no debt. While others wait all of it is.

Nobody is starved: a class always has its share, a tenant's turn does not depend on how large
its request is, and a request that waited for ``_PATIENCE_S`` goes before its tenant's later
ones, whatever these were promised.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from diptych.request_class import RequestClass
from router.placement.account import Account
from router.placement.claim import Asked, payer_of

DEFAULT_WEIGHTS: Final[Mapping[RequestClass, float]] = {
    RequestClass.REALTIME: 8.0,
    RequestClass.STANDARD: 4.0,
    RequestClass.BATCH: 1.0,
}
MAX_IDLE_TENANTS: Final = 1024  # of a class, whose counters are kept while nothing of theirs waits

_PATIENCE_S: Final = 10.0  # when one is due that was promised nothing, and at the latest
_MOST_STALE: Final = 16  # entries of a heap, beside as many as there are good ones

T = TypeVar("T")  # what can be a key


class Turn(NamedTuple):
    """What one that waits stands in the queue by. Moments are of the queue's clock, s."""

    request_class: RequestClass = RequestClass.STANDARD
    tenant: str = ""
    cost_s: float = 1.0  # of engines, that it is expected to take
    due_s: float | None = None  # its first token; None: no matter
    latest_start_s: float | None = None  # later ones are hopeless, and go last; None: none are
    prompt_s: float | None = None  # of ``cost_s``, before the next can start; None: all of it
    tpot_s: float = math.inf  # wanted between two tokens
    may_be_local: bool = True  # see :class:`router.placement.claim.Asked`

    @property
    def asked(self) -> Asked:
        """Of workers."""
        return Asked(payer_of(self.request_class, self.tenant), self.may_be_local)

    @property
    def start_s(self) -> float:
        """Of engines, that it takes before the next can start."""
        return self.cost_s if self.prompt_s is None else self.prompt_s


class _Waiting(Generic[T]):
    """One that waits, from ``add`` until it is taken or removed."""

    __slots__ = ("is_choice", "is_waiting", "item", "key", "latest_start_s", "tenant", "turn")

    def __init__(
        self,
        item: T,
        turn: Turn,
        tenant: "_Tenant[T]",
        now_s: float,
        number: int,
        *,
        is_choice: bool,
    ) -> None:
        latest_s = -math.inf if is_choice else now_s + _PATIENCE_S
        due_s = latest_s if turn.due_s is None else min(turn.due_s, latest_s)
        self.item = item
        self.turn = turn
        self.tenant = tenant
        self.key = (due_s, number)
        self.latest_start_s = None if is_choice else turn.latest_start_s
        self.is_choice = is_choice
        self.is_waiting = True

    def __lt__(self, other: "_Waiting[T]") -> bool:
        return self.key < other.key


class _Tenant(Account, Generic[T]):
    """One tenant's requests of one class, the first due first. Owned by its line."""

    __slots__ = ("all", "first_choices", "heap", "line", "name", "ticket", "waiting_s")

    def __init__(self, name: str, line: "_Line[T]", number: int) -> None:
        super().__init__(number)
        self.name = name
        self.line = line
        self.all: dict[T, _Waiting[T]] = {}
        self.first_choices: dict[T, None] = {}  # of those, in the order in which they came
        self.heap: list[_Waiting[T]] = []  # those, and some that wait no more
        self.ticket: _Ticket[T] | None = None  # its place in the line; None: it stands aside
        self.waiting_s = 0.0  # of engines, before others can start

    def push(self, waiting: _Waiting[T]) -> None:
        """It may be next."""
        if len(self.heap) > 2 * len(self.all) + _MOST_STALE:
            self.heap = [each for each in self.heap if each.is_waiting]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, waiting)

    def pop(self, now_s: float) -> _Waiting[T] | None:
        """The first that is not hopeless; of those each is put behind what is due soon, once."""
        while self.heap:
            waiting = heapq.heappop(self.heap)
            if not waiting.is_waiting:
                continue
            if waiting.latest_start_s is None or waiting.latest_start_s >= now_s:
                return waiting
            waiting.latest_start_s = None
            waiting.key = (now_s + _PATIENCE_S, waiting.key[1])
            heapq.heappush(self.heap, waiting)
        return None


class _Ticket(Generic[T]):
    """A tenant's place in its line; it counts while it is the tenant's newest."""

    __slots__ = ("key", "tenant")

    def __init__(self, tenant: _Tenant[T], number: int) -> None:
        self.key = (tenant.counter_s, number)
        self.tenant = tenant

    def __lt__(self, other: "_Ticket[T]") -> bool:
        return self.key < other.key


class _Line(Account, Generic[T]):
    """The tenants of one class, who was charged the least first. Its own is over its weight."""

    def __init__(self, weight: float, numbers: Iterator[int]) -> None:
        super().__init__(0)
        self.weight = weight
        self.levelled = 0  # the last lift, its own or of who came when nobody waited
        self.num_waiting = 0
        self.num_tenants = 0  # of whom something waits
        self.waiting_s = 0.0  # of engines, before others can start
        self._numbers = numbers
        self._tenants: dict[str, _Tenant[T]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # of those, the longest idle first
        self._heap: list[_Ticket[T]] = []
        self._most_s = 0.0  # that any tenant's counter was
        self._levelled = 0  # the last lift to it; what all were charged before was made theirs

    def find(self, name: str) -> _Tenant[T] | None:
        """Whose counter is still known."""
        return self._tenants.get(name)

    def entered(self, name: str) -> _Tenant[T]:
        """The tenant, of whom something waits from now on."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self, next(self._numbers))
        if not tenant.all:
            self._idle.pop(name, None)
            least = self._least()
            least_s = self._most_s if least is None else least.counter_s
            if least_s > tenant.counter_s:
                tenant.lift_to(least_s, least, next(self._numbers))
                if not self.num_tenants:
                    self._levelled = tenant.lift
            self.num_tenants += 1
            self.stand(tenant)
        return tenant

    def emptied(self, tenant: _Tenant[T]) -> None:
        """Nothing of it waits any more: what it was charged is known for a while."""
        tenant.ticket = None
        tenant.heap.clear()
        tenant.waiting_s = 0.0  # exactly
        self.num_tenants -= 1
        if not self.num_tenants:
            self.waiting_s = 0.0
        self._idle[tenant.name] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            name, _ = self._idle.popitem(last=False)
            gone = self._tenants.pop(name)
            gone.forget()
            gone.dismiss()

    def stand(self, tenant: _Tenant[T]) -> None:
        """It may be next, by its counter as it is now."""
        if len(self._heap) > 2 * self.num_tenants + _MOST_STALE:
            self._heap = [each for each in self._heap if each.tenant.ticket is each]
            heapq.heapify(self._heap)
        tenant.ticket = _Ticket(tenant, next(self._numbers))
        heapq.heappush(self._heap, tenant.ticket)

    def pop(self) -> _Tenant[T] | None:
        """Whose turn it is: it stands aside until it is let ``stand`` again."""
        while self._heap:
            ticket = heapq.heappop(self._heap)
            if ticket.tenant.ticket is ticket:
                ticket.tenant.ticket = None
                return ticket.tenant
        return None

    def charge(self, name: str, seconds: float) -> None:
        """So much more of the engines."""
        self.counter_s += seconds / self.weight
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._move(tenant, seconds)

    def give_back(
        self, name: str, seconds: float, charged: int, waiting: "Sequence[_Line[T]]"
    ) -> None:
        """So much less of what was charged before any lift with a larger number than ``charged``.

        Neither goes below those that wait where it was lifted since; ``waiting`` are the classes
        that do.
        """
        back_s = seconds / self.weight
        if self.num_waiting and self.levelled > charged:
            least_s = min(each.counter_s for each in waiting)
            back_s = min(back_s, max(0.0, self.counter_s - least_s))
            self.keep(seconds / self.weight - back_s, charged)
        for _ in self.lower(back_s, charged, lambda: waiting):
            pass
        tenant = self._tenants.get(name)
        if tenant is None:
            return
        least = self._least()
        if tenant.all and least is not None and max(tenant.lift, self._levelled) > charged:
            given_s = min(seconds, max(0.0, tenant.counter_s - least.counter_s))
            tenant.keep(seconds - given_s, charged)
            seconds = given_s
        for each in tenant.lower(seconds, charged, self._busy):
            if isinstance(each, _Tenant) and each.ticket is not None:
                self.stand(each)

    def _move(self, tenant: _Tenant[T], seconds: float) -> None:
        tenant.counter_s += seconds
        self._most_s = max(self._most_s, tenant.counter_s)
        if tenant.ticket is not None:
            self.stand(tenant)

    def _busy(self) -> Iterable[_Tenant[T]]:
        """Those of whom something waits."""
        return (each for each in self._tenants.values() if each.all)

    def _least(self) -> _Tenant[T] | None:
        """That was charged the least of those that wait; None: none does."""
        while self._heap and self._heap[0].tenant.ticket is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].tenant if self._heap else None


class FairQueue(Generic[T]):
    """Those that wait. Each operation touches few of them, however many there are.

    Invariants: what was added is taken or removed once; ``in_turn`` names each that waits
    once; of two tenants of a class that both wait all the while none is charged more than
    the other by more than its largest request.
    """

    def __init__(self, weights: Mapping[RequestClass, float] = DEFAULT_WEIGHTS) -> None:
        self._numbers = itertools.count()
        self._lines: dict[RequestClass, _Line[T]] = {
            each: _Line(weights[each], self._numbers) for each in RequestClass
        }
        self._waiting: dict[T, _Waiting[T]] = {}
        self._by_length: dict[int, dict[_Tenant[T], None]] = {}  # tenants with so many that wait
        self._longest = 0
        self._num_choices = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_choices(self) -> int:
        """That wait and are further choices."""
        return self._num_choices

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def num_waiting(self, request_class: RequestClass) -> int:
        """Of one class."""
        return self._lines[request_class].num_waiting

    def add(self, item: T, turn: Turn, now_s: float, *, is_choice: bool = False) -> None:
        """``item`` waits from now on.

        ``is_choice``: a further one of a request of which one was taken: its tenant's next.
        """
        line = self._lines[turn.request_class]
        if not line.num_waiting:
            self._comes_back(line)
        tenant = line.entered(turn.tenant)
        number = next(self._numbers)
        waiting = _Waiting(item, turn, tenant, now_s, number, is_choice=is_choice)
        self._waiting[item] = waiting
        tenant.all[item] = waiting
        tenant.push(waiting)
        line.num_waiting += 1
        line.waiting_s += turn.start_s
        tenant.waiting_s += turn.start_s
        if is_choice:
            self._num_choices += 1
        else:
            tenant.first_choices[item] = None
            self._changed(tenant, len(tenant.first_choices) - 1)

    def remove(self, item: T) -> None:
        """``item`` waits no more, and is not charged. Idempotent."""
        waiting = self._waiting.pop(item, None)
        if waiting is None:
            return
        waiting.is_waiting = False
        tenant = waiting.tenant
        del tenant.all[item]
        tenant.line.num_waiting -= 1
        tenant.line.waiting_s -= waiting.turn.start_s
        tenant.waiting_s -= waiting.turn.start_s
        if waiting.is_choice:
            self._num_choices -= 1
        else:
            del tenant.first_choices[item]
            self._changed(tenant, len(tenant.first_choices) + 1)
        if not tenant.all:
            tenant.line.emptied(tenant)

    def charge(self, turn: Turn) -> int:
        """One with that turn goes to the engines, whether or not it waited here.

        When that was, as ``settle`` is to be told.
        """
        self._lines[turn.request_class].charge(turn.tenant, turn.cost_s)
        return next(self._numbers)

    def settle(self, turn: Turn, used_s: float, charged: int | None = None) -> None:
        """One that was charged is done, and took so much of the engines.

        ``charged`` is what ``charge`` said; None: nobody was lifted since.
        """
        line = self._lines[turn.request_class]
        charged = next(self._numbers) if charged is None else charged
        if used_s >= turn.cost_s:
            line.charge(turn.tenant, used_s - turn.cost_s)
        else:
            waiting = [each for each in self._lines.values() if each.num_waiting]
            line.give_back(turn.tenant, turn.cost_s - used_s, charged, waiting)

    def in_turn(
        self, now_s: float, without: Collection[RequestClass] = ()
    ) -> Generator[T, None, None]:
        """Each that waits, the next first. Whoever is named may be taken before the next is.

        Nobody of the classes in ``without``, which may become more meanwhile.
        Of each tenant that has its turn and takes none of what it is offered, the next request
        is named after the others'. Close it before anything else is done with the queue.
        """
        passed: list[_Waiting[T]] = []  # were named and were not taken
        aside: list[_Tenant[T]] = []  # had their turn, and took nothing
        try:
            while True:
                tenant = self._next_tenant(without)
                if tenant is None:
                    if not aside:
                        return
                    self._let_stand(aside)
                    continue
                waiting = tenant.pop(now_s)
                if waiting is None:
                    continue  # all that it has was named: it stands again at the end
                passed.append(waiting)
                aside.append(tenant)
                yield waiting.item
                if not waiting.is_waiting:
                    del passed[-1]
                    self._let_stand([aside.pop()])
        finally:
            for waiting in passed:
                if waiting.is_waiting:
                    waiting.tenant.push(waiting)
            self._let_stand([waiting.tenant for waiting in passed])

    def newest_of_longest(self) -> T:
        """The one that came last of the tenant of whom the most wait. There has to be one.

        Further choices do not count.
        """
        tenant = next(reversed(self._by_length[self._longest]))
        return next(reversed(tenant.first_choices))

    @property
    def waiting_s(self) -> float:
        """Of engines, before all that wait can start."""
        return sum(line.waiting_s for line in self._lines.values())

    def ahead_s(self, turn: Turn) -> float:
        """Of engines, that is likely to be given to others before one that came now can start."""
        line = self._lines[turn.request_class]
        tenant = line.find(turn.tenant)
        own_s, num_others = 0.0, line.num_tenants
        if tenant is not None and tenant.all:
            own_s, num_others = tenant.waiting_s, num_others - 1
        within_s = min(line.waiting_s, own_s + num_others * (own_s + turn.start_s))
        share_s = (within_s + turn.start_s) / line.weight
        others = (each for each in self._lines.values() if each is not line)
        return within_s + sum(min(each.waiting_s, share_s * each.weight) for each in others)

    def _least(self) -> _Line[T]:
        """The class that was charged the least of those that wait; else, of all, the most."""
        active = [each for each in self._lines.values() if each.num_waiting]
        if active:
            return min(active, key=lambda each: each.counter_s)
        return max(self._lines.values(), key=lambda each: each.counter_s)

    def _comes_back(self, line: _Line[T]) -> None:
        """Where nobody waits, what all classes were charged before is made this one's."""
        least = self._least()
        if least.counter_s > line.counter_s:
            leader = least if self._waiting else None
            line.lift_to(least.counter_s, leader, next(self._numbers))
            for each in [line] if self._waiting else self._lines.values():
                each.levelled = line.lift

    def _next_tenant(self, without: Collection[RequestClass]) -> _Tenant[T] | None:
        """Of the class with the least counter that has one which does not stand aside."""
        lines = [
            line
            for request_class, line in self._lines.items()
            if line.num_waiting and request_class not in without
        ]
        lines.sort(key=lambda line: line.counter_s)
        for line in lines:
            tenant = line.pop()
            if tenant is not None:
                return tenant
        return None

    def _let_stand(self, tenants: list[_Tenant[T]]) -> None:
        for tenant in tenants:
            if tenant.all and tenant.ticket is None:
                tenant.line.stand(tenant)
        tenants.clear()

    def _changed(self, tenant: _Tenant[T], num_before: int) -> None:
        """So many of a tenant's waited until now, further choices aside."""
        if num_before:
            bucket = self._by_length[num_before]
            del bucket[tenant]
            if not bucket:
                del self._by_length[num_before]
        num_now = len(tenant.first_choices)
        if num_now:
            self._by_length.setdefault(num_now, {})[tenant] = None
        self._longest = max(self._longest, num_now)
        while self._longest and self._longest not in self._by_length:
            self._longest -= 1

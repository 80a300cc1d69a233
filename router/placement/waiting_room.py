"""Where requests wait for a placement: bounded, and in fair turns. Pure."""

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple, Protocol

from diptych.errors import DiptychError, QueueFullError
from diptych.request_class import RequestClass
from router.placement.claim import Asked
from router.placement.departures import Departures
from router.placement.fair_queue import FairQueue, Turn
from router.placement.favourite import Favourite
from router.placement.front_line import FrontLine
from router.placement.holding_back import ANY_PACE, MAX_UNPASSED_S, HoldingBack, Paces

# Offers in one pump to the first in line of a class, and as many to those behind, in vain.
_MAX_MISSES = 8
# Of who is held at least so many, or a part of them: what bars one bars most of them.
_LEAST_HELD_MISSES, _HELD_PARTS = 3, 4
_MAX_KINDS = 32  # of who waits, that are looked at in one look for room, and as many further ones
# Who is held for better objectives is skipped in a pump; so often, of each class, without a look
# at the others.
_MAX_SKIPPED = 32
_HOLD_S = 0.3  # before those who are held are asked again
_LEAST_HOLD_S = 0.06  # the same where a prompt was computed meanwhile
_REST_S = 0.05  # before those are asked whom a pump did not reach
# Those whose prompts prefill workers alone would compute are looked at again, so many in so long:
# decode workers may have cached meanwhile what they begin with. A look costs a tenth of an offer.
_LOOK_S = 1.0
_MAX_LOOKS = 256

Soon = Callable[[Callable[[], None]], object]
Later = Callable[[float, Callable[[], None]], object]  # after so many seconds


ANY_TURN: Final = Turn()


class _Slot(NamedTuple):
    arrival: int
    turn: Turn  # that it was charged
    charged: int  # when, in the queue's order


class Waiter(Protocol):
    """A request that wants a placement. Only a pump calls it."""

    def offer(self, *, room_made: bool) -> None:
        """Ask for a placement; whoever gets one calls ``WaitingRoom.take`` before it returns.

        Whoever gets none, though there is room, as some objective would be missed calls ``hold``.

        ``room_made``: another request ended, so whoever refused before may take this one.
        """
        ...

    def may_be_local(self) -> bool:
        """Whether a decode worker may compute its prompt by now."""
        ...

    def may_come(self) -> bool:
        """Whether it is room alone that it lacks: workers that are there could take it."""
        ...

    def turn_away(self, error: DiptychError) -> None:
        """There is no place to wait; the waiter is out of the queue already."""
        ...


class WaitingRoom:
    """The router's queue, and how many requests are on workers.

    Whoever was placed once keeps a slot until ``leave``, and waits before all who were not,
    in the order in which they came, if it must be placed again; where all slots are taken others
    may have its own while no worker that is there could take it. The others have fair turns
    (:class:`FairQueue`), which is the order in which they came where all are one tenant's and
    of one class; but other choices of a request of which one was placed are their tenant's next.
    Where too many wait, who came last of the tenant of whom most wait is turned away; choices
    never are, and nobody is because of them. Called on the event loop
    only. No method but ``pump`` calls a waiter, and nothing that a waiter calls pumps:
    whatever changes makes a pump due, which ``schedule`` runs later, once.

    A pump ends early where no worker has room, or after some offers in vain, a refusal included:
    of those who came since the last one, of the first in line and of the others some are asked.
    Whoever is held for better objectives is asked again after a while, or when another one left
    or, sooner, has its prompt computed, so what is asked in vain in a second is bounded.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_placed: int,
        schedule: Soon,
        schedule_rest: Later | None = None,
        has_room: Callable[[Iterable[Asked]], bool] = lambda those: True,
        departures: Departures | None = None,
        queue: FairQueue[Waiter] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        used: Callable[[RequestClass, float], None] = lambda request_class, used_s: None,
    ) -> None:
        """``schedule`` calls what it gets soon, from an empty stack; ``schedule_rest`` after so
        many seconds, for those whom a pump did not reach. ``has_room``: whether workers might
        take one of these. ``clock`` is that of turns' moments, s; ``used`` is told of each
        class's use of engines, s.
        """
        self._max_waiting = max_waiting
        self._max_placed = max_placed
        self._schedule = schedule
        self._schedule_rest = schedule_rest or (lambda after_s, pump: schedule(pump))
        self._has_room_for = has_room
        self._departures = departures or Departures(lambda: 0.0, lambda: 0.5)
        self._arrivals = itertools.count()
        self._front = FrontLine[Waiter]()
        self._favourite = Favourite(self._front)
        self._fresh: FairQueue[Waiter] = FairQueue() if queue is None else queue
        self._clock = clock
        self._used = used
        self._all: OrderedDict[Waiter, Turn] = (
            OrderedDict()
        )  # that wait; who was asked last is the last
        self._placed: dict[Waiter, _Slot] = {}
        self._lost = set[Waiter]()  # of these, for whom there was no worker when they asked last
        self._newcomers: list[Waiter] = []  # since the last pump; they may be turned away
        self._num_left = 0  # since the last pump
        self._kinds = Counter[Asked]()  # of all that wait
        self._num_looked_at = 0  # kinds that workers had no room for, of many
        self._remote = OrderedDict[Waiter, None]()  # may not be local; who was looked at is last
        self._look_at_s = -math.inf  # when some of these are looked at again
        self._held: dict[Waiter, float] = {}  # wait for better objectives; since when
        self._holding_back = HoldingBack()
        self._held_asked_s = -math.inf  # when they were last
        self._held_until_s = -math.inf  # none of them is asked before, unless another one left
        self._is_pump_due = False
        self._rest_due_s = math.inf

    @property
    def num_waiting(self) -> int:
        return len(self._all)

    def num_waiting_of(self, request_class: RequestClass) -> int:
        """Of one class."""
        return self._front.num_of(request_class) + self._fresh.num_waiting(request_class)

    def has_others_than(self, request_class: RequestClass) -> bool:
        """Whether one of another class waits."""
        return any(self.num_waiting_of(each) for each in RequestClass if each is not request_class)

    @property
    def num_placed(self) -> int:
        """That are on workers, ask them, or wait for what some of them could give."""
        return len(self._placed) - len(self._lost)

    def ends_in_s(self) -> float:
        """When those that wait now have probably been placed; half of it is chance."""
        return self._departures.retry_after_s(self.num_waiting)

    def wait_s(self, turn: Turn, num_engines: int) -> float:
        """How long one that came now is likely to wait for others' turns on so many engines, and,
        where all slots are taken, for as many to leave.
        """
        ahead_s, waiting_s = self._fresh.ahead_s(turn), self._fresh.waiting_s
        wait_s = ahead_s / num_engines
        if self.has_slots:
            return wait_s
        num_ahead = len(self._fresh) * ahead_s / waiting_s if waiting_s > 0.0 else 0.0
        return max(wait_s, self._departures.expected_s(num_ahead + 1.0))

    def enter(self, waiter: Waiter, *, front: bool, turn: Turn = ANY_TURN) -> None:
        """Let ``waiter`` wait for its ``turn``.

        ``front``: it was placed before, so it goes before all who were not; or another choice
        of its request was: it has its turn before the others of its tenant and class.

        The next pump, soon, places it, lets it wait, or turns it away if nobody else
        may wait (never if ``front``).
        """
        self._all[waiter] = turn
        slot = self._placed.get(waiter)
        if slot is not None:
            self._front.add(waiter, slot.arrival, turn.request_class)
            self._favourite.entered()
        else:
            self._fresh.add(waiter, turn, self._clock(), is_choice=front)
            if not front:
                self._newcomers.append(waiter)
        self._kinds[turn.asked] += 1
        if not turn.may_be_local:
            if not self._remote:
                self._look_at_s = self._clock() + _LOOK_S
            self._remote[waiter] = None
        self.pump_soon()

    def take(self, waiter: Waiter) -> None:
        """``waiter`` got a placement: it waits no more, keeps a slot, and is charged, once."""
        self._favourite.placed(waiter)
        turn = self._all.get(waiter, ANY_TURN)
        self._remove(waiter)
        if waiter not in self._placed:
            charged = self._fresh.charge(turn)
            self._placed[waiter] = _Slot(next(self._arrivals), turn, charged)

    def settled(self, waiter: Waiter) -> None:
        """Workers granted all that its placement asked of them: it bars nobody. Idempotent."""
        if waiter is self._favourite.one:
            self._favourite.follow()
            self.pump_soon()

    def hold(self, waiter: Waiter) -> None:
        """``waiter`` waits for better objectives, not for room: it is not asked all the time.

        Nor are those behind it placed that want tokens no faster: they would keep it waiting.
        """
        if waiter in self._fresh:
            self._held.setdefault(waiter, self._clock())

    def reconsider(self) -> None:
        """A prompt was computed: who is held is asked sooner, and others at once."""
        self._held_until_s = min(self._held_until_s, self._held_asked_s + _LEAST_HOLD_S)
        self.pump_soon()

    def stop_waiting(self, waiter: Waiter) -> None:
        """``waiter`` wants no placement any more. Idempotent."""
        self._remove(waiter)
        if waiter is self._favourite.one:
            self._favourite.follow()

    def leave(self, waiter: Waiter, used_s: float | None = None) -> None:
        """``waiter`` is done, and took so much of the engines; None: what was expected.

        Idempotent.
        """
        self.stop_waiting(waiter)
        slot = self._placed.pop(waiter, None)
        if slot is not None:
            used_s = slot.turn.cost_s if used_s is None else used_s
            self._fresh.settle(slot.turn, used_s, slot.charged)
            self._used(slot.turn.request_class, used_s)
            self._num_left += 1
            self._departures.left(others_wait=self.num_waiting > 0)
            self.pump_soon()

    def pump_soon(self) -> None:
        """Something changed: see to it that there is a pump."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._schedule(self._pump_if_due)

    def pump(self) -> None:
        """Offer placements, to whose turn it is first; then turn away whom there is no place for.

        For each request that left, one that was refused need not sit out its pause.
        """
        self._is_pump_due = False
        self._look_again()
        newcomers, self._newcomers = self._newcomers, []
        if self._favourite.bars(self._clock()):
            one = self._favourite.one
            self._ask([one] if one and self._is_waiting(one) else (), set(), set())
            if self.num_waiting and self._has_room():
                self._pump_rest_soon()
        else:
            self._ask_in_turn(newcomers)
        num_new = sum(waiter in self._fresh for waiter in newcomers)
        for _ in range(min(num_new, self._num_requests - self._max_waiting)):
            self._turn_away(self._fresh.newest_of_longest())
        if self._remote:
            self._pump_rest_soon(self._look_at_s - self._clock())

    def _look_again(self) -> None:
        """Whoever may be local by now is the next of those behind that is asked."""
        now_s = self._clock()
        if now_s < self._look_at_s or not self._remote:
            return
        self._look_at_s = now_s + _LOOK_S
        some = list(itertools.islice(self._remote, _MAX_LOOKS))
        near = [waiter for waiter in some if waiter.may_be_local()]
        for waiter in some:
            self._remote.move_to_end(waiter)
        for waiter in reversed(near):
            turn = self._all[waiter]
            self._forget_kind(waiter, turn)
            self._all[waiter] = turn = turn._replace(may_be_local=True)
            self._all.move_to_end(waiter, last=False)
            self._kinds[turn.asked] += 1

    def _forget_kind(self, waiter: Waiter, turn: Turn) -> None:
        self._remote.pop(waiter, None)
        self._kinds[turn.asked] -= 1
        if not self._kinds[turn.asked]:
            del self._kinds[turn.asked]

    def _ask_in_turn(self, newcomers: list[Waiter]) -> None:
        if not self._all:
            self._num_left = 0
            return
        may_place = self.has_slots
        num_askable = len(self._all if may_place else self._front)
        asked: set[Waiter] = set()
        now_s = self._clock()
        asks_held = now_s >= self._held_until_s
        if not (asks_held or self._num_left) and len(self._held) == len(self._all):
            if self._held:
                self._pump_rest_soon(self._held_until_s - now_s)
            return  # all are held
        held = set() if asks_held else set(self._held)
        self._ask(self._front.in_order(), asked, held)
        if may_place and (len(held) < len(self._fresh) or self._num_left):
            enough: set[RequestClass] = set()
            with closing(self._fresh.in_turn(now_s, enough)) as line:
                with_slots = itertools.takewhile(lambda _: self.has_slots, line)
                self._ask(with_slots, asked, held, enough=enough)
        paces = ANY_PACE.behind_all(map(self._pace, self._held))
        with closing(self._long_ago(asked, held, paces, may_place=may_place)) as line:
            self._ask(line, asked, held, paces)
        self._ask(newcomers, asked, held, paces)
        if asks_held and self._held:
            self._held_asked_s, self._held_until_s = now_s, now_s + _HOLD_S
        if len(asked) >= num_askable:
            self._num_left = 0
        elif self._has_room():
            self._pump_rest_soon()

    def _long_ago(
        self, asked: set[Waiter], held: set[Waiter], paces: Paces, *, may_place: bool
    ) -> Generator[Waiter, None, None]:
        """Those behind, who was asked so longest ago first; whoever is asked goes to the end.

        Of those that have fair turns one at the most is placed so.
        """
        while True:
            behind = (
                waiter
                for waiter in (self._all if may_place else self._front)
                if waiter not in asked
                and waiter not in held
                and (waiter in self._front or not self._is_patient(waiter, paces))
            )
            waiter = next(behind, None)
            if waiter is None:
                return
            was_in_front = waiter in self._front
            yield waiter
            if waiter not in asked:
                return  # nobody is asked any more
            if waiter in self._all:
                self._all.move_to_end(waiter)
                self._front.asked(waiter)
            elif not was_in_front and waiter in self._placed:
                may_place = False

    def _ask(
        self,
        line: Iterable[Waiter],
        asked: set[Waiter],
        held: set[Waiter],
        paces: Paces = ANY_PACE,
        enough: set[RequestClass] | None = None,
    ) -> None:
        """Offer placements to those who were not asked yet, until too many were in vain of each
        class: a batch that waits for spare room takes no turn of others. ``enough`` is told of
        which classes no more have to be named.

        Who is ``held`` is asked only where another one left, and so are all who wait for better
        objectives once some of them were asked in vain. Of the others only who wants tokens as
        fast as all those that are held before it, and as ``paces`` say; in any case who was placed
        before.
        """
        num_skipped, num_misses = Counter[RequestClass](), Counter[RequestClass]()
        num_held_misses = Counter[RequestClass]()
        most_held_misses = max(_LEAST_HELD_MISSES, len(self._held) // _HELD_PARTS)
        has_room = False  # for sure: nothing is another since it was looked for
        for waiter in line:
            if waiter in asked or not self._has_slot(waiter) or not self._is_waiting(waiter):
                continue
            request_class = self._all[waiter].request_class
            if num_skipped[request_class] >= _MAX_SKIPPED:
                if enough is None:
                    return
                enough.add(request_class)
                continue
            if num_misses[request_class] >= _MAX_MISSES:
                num_skipped[request_class] += 1
                continue
            has_room = has_room or self._has_room()
            if not has_room:
                return
            room_made, is_held = self._num_left > 0, waiter in self._held
            rests = waiter in held or num_held_misses[request_class] >= most_held_misses
            if self._is_patient(waiter, paces) or (is_held and rests and not room_made):
                num_skipped[request_class] += 1
                paces = paces.behind(*self._pace(waiter))
                continue
            asked.add(waiter)
            self._num_left -= room_made
            self._offer(waiter, room_made=room_made)
            has_room = self._is_waiting(waiter)
            if has_room:
                paces = paces.behind(*self._pace(waiter))
            is_miss = has_room or waiter not in self._placed
            num_misses[request_class] += is_miss
            num_held_misses[request_class] += is_miss and is_held
            self._note_if_lost(waiter)

    def _note_if_lost(self, waiter: Waiter) -> None:
        """It was asked. Where slots are left nobody needs its own."""
        self._lost.discard(waiter)
        if waiter in self._front and not self.has_slots and not waiter.may_come():
            self._lost.add(waiter)

    def _offer(self, waiter: Waiter, *, room_made: bool) -> None:
        """It is held no more, unless it says so again: it may wait for nothing but room by now."""
        since_s = self._held.pop(waiter, None)
        waiter.offer(room_made=room_made)
        if since_s is not None and waiter in self._held:
            self._held[waiter] = since_s
        elif since_s is not None and waiter in self._placed:
            self._holding_back.paid_off(self._clock())

    def _has_room(self) -> bool:
        """Of many kinds it looks at the first, and at some others, at further ones each time."""
        begin = max(_MAX_KINDS, self._num_looked_at)
        some = list(itertools.islice(self._kinds, begin + _MAX_KINDS))
        if self._has_room_for((*some[:_MAX_KINDS], *some[begin:])):
            return True
        self._num_looked_at = begin + _MAX_KINDS if len(some) == begin + _MAX_KINDS else 0
        return False

    @property
    def _num_requests(self) -> int:
        """That wait, of none of which another choice was placed."""
        return self.num_waiting - self._fresh.num_choices

    def _remove(self, waiter: Waiter) -> None:
        turn = self._all.pop(waiter, None)
        if turn is None:
            return
        self._forget_kind(waiter, turn)
        self._held.pop(waiter, None)
        self._fresh.remove(waiter)
        self._front.remove(waiter)
        self._lost.discard(waiter)

    def _pace(self, waiter: Waiter) -> tuple[RequestClass, float]:
        """Of one that waits, that those behind it have to want as long as it is held; else any."""
        turn, since_s = self._all[waiter], self._held.get(waiter)
        holds_back = since_s is not None and self._clock() - since_s <= MAX_UNPASSED_S
        return turn.request_class, turn.tpot_s if holds_back else math.inf

    def _is_patient(self, waiter: Waiter, paces: Paces) -> bool:
        """Whether it waits for one that is held, and wants tokens as fast as ``paces`` say."""
        if waiter not in self._fresh:
            return False
        turn = self._all[waiter]
        is_slower = turn.tpot_s > paces.of(turn.request_class)
        return is_slower and self._holding_back.may(self._clock())

    def _has_slot(self, waiter: Waiter) -> bool:
        """Whether it may be placed at all, as far as this router is concerned."""
        return waiter in self._placed or self.has_slots

    @property
    def has_slots(self) -> bool:
        """Whether one more may be placed, as far as this router is concerned."""
        return self.num_placed < self._max_placed

    def _is_waiting(self, waiter: Waiter) -> bool:
        return waiter in self._all

    def _pump_if_due(self) -> None:
        if self._is_pump_due:
            self.pump()

    def _pump_rest_soon(self, after_s: float = _REST_S) -> None:
        due_s = self._clock() + after_s
        if due_s < self._rest_due_s:
            self._rest_due_s = due_s
            self._schedule_rest(after_s, partial(self._pump_rest, due_s))

    def _pump_rest(self, due_s: float) -> None:
        if due_s == self._rest_due_s:  # else one that was due sooner took its place
            self._rest_due_s = math.inf
            self.pump()

    def _turn_away(self, waiter: Waiter) -> None:
        self.stop_waiting(waiter)
        error = QueueFullError(
            f"{self._num_requests} requests are waiting already",
            retry_after_s=self.ends_in_s(),
            max_queue=str(self._max_waiting),
        )
        waiter.turn_away(error)

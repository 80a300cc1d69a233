"""Requests that need two workers each, of workers of both roles whose pools hold about one."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import pytest

from diptych.errors import BlocksExhaustedError, DiptychError
from diptych.rpc.status import to_failure
from diptych.timers import Timers
from diptych.v1 import common_pb2, decode_pb2
from router.placement.eligible import ordered
from router.placement.placement import Paired, Placement
from router.placement.query import Query
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.waiting_room import WaitingRoom
from router.request import actions, events
from router.request.deps import RequestDeps
from router.request.emitted_tokens import RequestShape
from router.request.events import Event
from router.request.machine import RequestMachine
from tests.unit.router.request.world import LENGTH, decoded, policy, worker

MESSAGE_S: Final = 0.001
LONG_S: Final = 20.0
WORKERS: Final = (worker("a"), worker("b"))
NUM_BLOCKS: Final = 16  # of each pool
PREFILL_S, DECODE_S, TELL_S = 0.05, 0.2, 0.25
TIMERS: Final = Timers(no_worker_s=10.0)


class Pools:
    """Two pools of blocks, and a clock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.ids = itertools.count(1)
        self.held: dict[WorkerId, dict[int, int]] = {each: {} for each in WORKERS}

    def after(self, delay_s: float, happening: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now_s + delay_s, next(self.ids), happening))

    def message(self, happening: Callable[[], None]) -> None:
        self.after(MESSAGE_S * (0.5 + self.random.random()), happening)

    def run(self, until_s: float) -> None:
        while self.agenda and self.agenda[0][0] <= until_s:
            self.now_s, _, happening = heapq.heappop(self.agenda)
            happening()

    def hold(self, at: WorkerId, sequence_id: int, num_blocks: int) -> bool:
        if sum(self.held[at].values()) + num_blocks > NUM_BLOCKS:
            return False
        self.held[at][sequence_id] = num_blocks
        return True


class Router:
    """The real machines, room and policy of one router over the pools."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.told = dict.fromkeys(WORKERS, NUM_BLOCKS)
        self.policy = policy(allow_recompute=False, local_below_tokens=0)
        self.room = WaitingRoom(
            max_waiting=999,
            max_placed=999,
            schedule=lambda pump: pools.after(0.0, pump),
            schedule_rest=pools.after,
            clock=lambda: pools.now_s,
        )
        self.errors: list[DiptychError] = []
        self.num_done = 0
        self.tell()

    def tell(self) -> None:
        """As workers do."""
        held = self.pools.held
        self.told = {each: NUM_BLOCKS - sum(held[each].values()) for each in WORKERS}
        self.room.pump_soon()
        self.pools.after(TELL_S, self.tell)

    def snapshot(self) -> Snapshot:
        prefills = tuple(
            PrefillView(
                worker=each,
                num_pending_tokens=0,
                max_model_len=999,
                num_available_blocks=self.told[each],
            )
            for each in WORKERS
        )
        others = dict(zip(WORKERS, reversed(WORKERS), strict=True))
        decodes = tuple(
            DecodeView(
                worker=each,
                num_sequences=0,
                max_model_len=999,
                local_prefill=False,
                proven=frozenset({others[each].incarnation}),
                num_available_blocks=self.told[each],
            )
            for each in WORKERS
        )
        return Snapshot(prefills, decodes)


class Client:
    """One request."""

    def __init__(self, router: Router, num_blocks: int, on_end: Callable[[], None]) -> None:
        self.router = router
        self.on_end = on_end
        self.pools = router.pools
        self.num_blocks = num_blocks
        self.at: dict[int, WorkerId] = {}
        self.computed_s = 0.0
        self.machine = RequestMachine(
            RequestShape(prompt_ids=tuple(range(num_blocks)), max_tokens=4),
            RequestDeps(
                clock=lambda: router.pools.now_s,
                place=self.place,
                has_workers=lambda: True,
                queue_ends_in_s=lambda: 1.0,
                new_sequence_id=lambda: next(router.pools.ids),
                new_ticket=lambda: b"t" * 16,
                timers=TIMERS,
                max_attempts=3,
                draw=router.pools.random.random,
                allow_recompute=False,
            ),
            lambda token_ids, margins, logprobs: False,
        )

    def place(self, query: Query) -> Placement | None:
        snapshot = self.router.snapshot()
        return ordered(self.router.policy.place(query, snapshot), snapshot)

    def offer(self, *, room_made: bool) -> None:
        self.on(events.Offered(room_made))

    def may_be_local(self) -> bool:
        return True

    def may_come(self) -> bool:
        return True

    def turn_away(self, error: DiptychError) -> None:
        raise AssertionError("there is room to wait")

    def on(self, event: Event) -> None:
        self.do(self.machine.handle(event))
        if self.machine.wake_at_s is not None:
            wake_s = max(0.0, self.machine.wake_at_s - self.pools.now_s)
            self.pools.after(wake_s + 1e-6, self.tick)

    def tick(self) -> None:
        due_s = self.machine.wake_at_s
        if due_s is not None and due_s <= self.pools.now_s:
            self.on(events.Tick())

    def do(self, wanted: Sequence[actions.Action]) -> None:
        router, pools = self.router, self.pools
        for action in wanted:
            match action:
                case actions.OpenLease() | actions.Reserve():
                    self.at[action.sequence_id] = action.worker
                    pools.message(partial(self.ask, action))
                case actions.CloseLease() | actions.Release():
                    pools.message(partial(self.free, action.sequence_id))
                case actions.Grant():
                    granted = events.Granted(action.sequence_id, action.grant_id)
                    pools.message(partial(self.say, granted))
                case actions.Bind():
                    proven = events.Proven(
                        action.sequence_id, action.bind_id, common_pb2.TransferStats()
                    )
                    wait_s = max(0.0, self.computed_s - pools.now_s)
                    pools.after(wait_s, partial(self.say, proven))
                case actions.Start():
                    pools.after(DECODE_S, partial(self.end, action.sequence_id))
                case actions.Enqueue():
                    router.room.enter(self, front=action.front)
                case actions.Dequeue():
                    room = router.room
                    (room.take if action.is_placed else room.stop_waiting)(self)
                case actions.Settled():
                    router.room.settled(self)
                case actions.Pump():
                    router.room.pump_soon()
                case actions.Finish():
                    router.num_done += 1
                    self.leave()
                case actions.Fail():
                    router.errors.append(action.error)
                    self.leave()
                case _:
                    pass

    def leave(self) -> None:
        self.router.room.leave(self)
        self.pools.after(0.0, self.on_end)

    def ask(self, asked: actions.OpenLease | actions.Reserve) -> None:
        pools, sequence_id = self.pools, asked.sequence_id
        is_held = pools.hold(asked.worker, sequence_id, self.num_blocks)
        refusal = BlocksExhaustedError("full")
        if isinstance(asked, actions.Reserve):
            failure = decode_pb2.Ended(sequence_id=sequence_id, failure=to_failure(refusal))
            self.say(events.Reserved(sequence_id, 0) if is_held else decoded(failure))
        elif is_held:
            self.say(events.Accepted(sequence_id, 0))
            self.computed_s = pools.now_s + PREFILL_S
            drawn = events.FirstToken(sequence_id, 7, self.num_blocks, None, 0)
            pools.after(PREFILL_S, lambda: self.say(drawn))
        else:
            self.say(events.LeaseEnded(sequence_id, refusal))

    def say(self, said: Event) -> None:
        self.pools.message(lambda: self.on(said))

    def free(self, sequence_id: int) -> None:
        self.pools.held[self.at[sequence_id]].pop(sequence_id, None)

    def end(self, sequence_id: int) -> None:
        self.free(sequence_id)
        self.say(decoded(decode_pb2.Ended(sequence_id=sequence_id, finish_reason=LENGTH)))


@pytest.mark.parametrize("sizes", [(4, 14), (9, 10)])
def test_leases_and_reservations_do_not_starve_each_other(sizes: tuple[int, int]) -> None:
    """As many come as end: nobody is passed until it is told that there is no room."""
    pools = Pools(seed=1)
    router = Router(pools)
    coming = itertools.cycle([*[sizes[0]] * 2, sizes[1]])

    def come() -> None:
        Client(router, next(coming), on_end=come).on(events.Begin())

    for number in range(12):
        pools.after(0.001 * number, come)
    pools.run(LONG_S)
    assert router.errors == []
    assert router.num_done > 3 * LONG_S, "one takes a pair for about 0.27 s"


class Crossing(Client):
    """Wants that pair, and waits if it is refused."""

    def __init__(self, router: Router, prefill: WorkerId, decode: WorkerId) -> None:
        self.pair = Paired(prefill, decode)
        super().__init__(router, 9, on_end=lambda: None)

    def place(self, query: Query) -> Placement | None:
        return None if query.refused else ordered(self.pair, self.router.snapshot())


@pytest.mark.parametrize("seed", range(8))
def test_of_two_that_want_each_what_the_other_wants_one_gets_both_at_once(seed: int) -> None:
    """Each pool has room for one half; whatever message comes first."""
    pools = Pools(seed)
    router, (one, other) = Router(pools), WORKERS
    both = Crossing(router, one, other), Crossing(router, other, one)
    for client in both:
        client.on(events.Begin())
    pools.run(0.02)
    assert [client.machine.attempt.is_settled for client in both].count(True) == 1

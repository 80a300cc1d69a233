"""How a request's actions reach workers, and what is booked of them on the way. No sockets."""

import time
from dataclasses import replace

import pytest

from diptych.errors import (
    BlocksExhaustedError,
)
from diptych.finish_reason import FinishReason
from diptych.paced import Paced
from diptych.request_class import RequestClass
from diptych.v1 import common_pb2, decode_pb2, worker_pb2
from router.config import RouterConfig
from router.generation.answer import Usage
from router.placement.answer_length import AnswerLength
from router.placement.cache_index import CacheIndex
from router.placement.claim import NO_CLAIM, Claim
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import (
    DecodeOnly,
    Forecast,
    Outlook,
    Paired,
    Placement,
    Unreachable,
    Why,
)
from router.placement.promises import NOTHING_PROMISED, Promise, Promised, promised
from router.placement.query import Objectives, Query
from router.placement.views import PrefillView, Snapshot, WorkerId
from router.request import actions, events
from router.request.dispatch import Dispatch
from tests.told_caches import whole
from tests.unit.router.request.dispatch_world import (
    DECODE,
    PREFILL,
    PROMPT,
    Deaf,
    Untraced,
    World,
    opened,
    resolved,
    started,
)

LOST = Unreachable("too late", 2.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


@pytest.mark.parametrize("to_pull", [True, False])
async def test_a_worker_is_told_whether_there_will_be_a_lease_to_pull_from(
    world: World, monkeypatch: pytest.MonkeyPatch, to_pull: bool
) -> None:
    asked: list[decode_pb2.Reserve] = []

    def note(command: decode_pb2.Reserve, listener: object, answer: AnswerLength) -> bool:
        asked.append(command)
        return True

    link = world.welcomes(DECODE)
    monkeypatch.setattr(link, "reserve", note)
    assert world.request().reserve(actions.Reserve(DECODE, 1, 0, to_pull=to_pull), (), Deaf())
    assert [command.to_pull for command in asked] == [to_pull]


async def test_why_workers_were_chosen_is_worked_out_for_a_trace_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Placement] = []
    chosen = Paired(PREFILL, DECODE)
    monkeypatch.setattr(LeastLoaded, "place", lambda self, query, snapshot: chosen)
    monkeypatch.setattr(Untraced, "placed", lambda self, placement, why: told.append(placement))
    world.request()
    assert told == []
    monkeypatch.setattr(Untraced, "is_traced", True)
    world.request()
    assert told == [chosen]


class Foreteller(LeastLoaded):
    """Foretells the same of every request, and remembers of which it came true."""

    def __init__(self) -> None:
        super().__init__(
            CacheIndex(1), local_below_tokens=0, allow_local=True, allow_recompute=True
        )
        self.came: list[Forecast] = []
        self.went_on_s: list[float] = []
        self.num_answered: list[int] = []

    def place(self, query: Query, snapshot: Snapshot) -> Placement:
        if not query.is_fresh:
            return Paired(PREFILL, DECODE)
        outlook = Outlook(PREFILL, DECODE, 0.5, 0.05, 0.0, 9.0)
        return Paired(PREFILL, DECODE, Forecast(outlook, (outlook,)))

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        assert ttft_s >= 0
        self.came.append(forecast)

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        assert forecast is self.came[-1]
        self.went_on_s.append(gap_s)

    def answered(self, forecast: Forecast, num_tokens: int) -> None:
        self.num_answered.append(num_tokens)


async def test_a_placement_is_asked_for_at_a_moment_of_the_clock_of_the_views(
    world: World,
) -> None:
    asked: list[Query] = []

    class Asked(Foreteller):
        def place(self, query: Query, snapshot: Snapshot) -> Placement:
            asked.append(query)
            return super().place(query, snapshot)

    began_s = time.monotonic()
    world.says(PREFILL, worker_pb2.WORKER_ROLE_PREFILL)
    world.services = replace(world.services, policy=Asked())
    world.request()
    watches = {member.watch.address: member.watch for member in world.cluster._members()}
    heard_s = watches[PREFILL.address].heard_s
    assert began_s <= heard_s <= asked[0].now_s <= time.monotonic()


async def test_what_came_true_of_a_placement_is_told_once_and_not_of_what_broke(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Foreteller()
    world.services = replace(world.services, policy=policy)
    request, first = world.request(), events.FirstToken(1, 7, len(PROMPT), None, 0)
    reconsidered: list[None] = []
    monkeypatch.setattr(world.services.room, "reconsider", lambda: reconsidered.append(None))
    request.heard(first)
    request.heard(first)
    assert len(policy.came) == 1
    assert reconsidered, "who is held asks again"
    broken = world.request()
    broken.heard(events.LeaseEnded(1, BlocksExhaustedError("full", retry_after_s=1.0)))
    broken.heard(first)
    assert len(policy.came) == 1


async def test_of_a_pair_that_was_foretold_the_decode_workers_first_tokens_are_awaited(
    world: World,
) -> None:
    """The prompt is there then; what was foretold came true before, at the other worker."""
    policy = Foreteller()
    world.services = replace(world.services, policy=policy)
    world.welcomes(DECODE)
    request = world.request()
    assert request.reserve(actions.Reserve(DECODE, 2, 0, to_pull=True), (), Deaf())
    assert not request.awaits_tokens
    request.heard(events.FirstToken(1, 7, len(PROMPT), None, 0))
    request.start(actions.Start(2, (), compute_missing=False))
    assert request.awaits_tokens
    policy.cache.told(DECODE.incarnation, whole(()))
    request.heard(events.Tokens(2, len(PROMPT) + 1, (7,), ()))
    assert not request.awaits_tokens
    assert len(policy.came) == 1


async def test_how_long_an_answer_was_is_told_of_the_newest_placement(world: World) -> None:
    policy = Foreteller()
    world.services = replace(world.services, policy=policy)
    kept, broken = world.request(), world.request()
    broken.place(Query(num_tokens=9, num_max_tokens=13, failed=frozenset({"lost"})))
    taken = Usage(num_prompt_tokens=len(PROMPT), num_output_tokens=12, num_cached_tokens=0)
    for request in (kept, broken):
        request._terms.finished(taken, FinishReason.STOP)
    assert policy.num_answered == [12]


async def test_what_an_earlier_placement_foretold_is_not_said_of_a_later_one(world: World) -> None:
    policy = Foreteller()
    world.services = replace(world.services, policy=policy)
    request = world.request()
    request.place(Query(num_tokens=9, num_max_tokens=13, failed=frozenset({"lost"})))
    request.heard(events.FirstToken(1, 7, len(PROMPT), None, 0))
    assert not policy.came


FIRST = events.FirstToken(1, 7, len(PROMPT), None, 0)
SECOND = events.Tokens(2, len(PROMPT) + 1, (7,), ())


async def test_the_gap_in_which_its_kv_moved_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, now_s = Foreteller(), 100.0
    monkeypatch.setattr("router.request.dispatch.time.monotonic", lambda: now_s)
    world.services = replace(world.services, policy=policy)
    request = world.request()
    assert not request.awaits_tokens
    now_s = 101.0
    request.heard(FIRST)
    assert request.awaits_tokens
    now_s = 101.25
    request.heard(SECOND)
    assert not request.awaits_tokens
    request.heard(SECOND)
    assert policy.went_on_s == [0.25]


@pytest.mark.parametrize(
    "broke",
    [
        events.ReservationLost(2, "it is gone"),
        events.Ended(2, 1, 0, None),
        events.PullFailed(2, 1, decode_pb2.PULL_FAILURE_TRANSPORT, "it broke"),
        None,
    ],
    ids=["lost", "ended", "pull failed", "placed anew"],
)
async def test_of_what_broke_between_its_first_token_and_its_second_no_gap_is_told(
    world: World, broke: events.Event | None
) -> None:
    policy = Foreteller()
    world.services = replace(world.services, policy=policy)
    request = world.request()
    request.heard(FIRST)
    if broke is None:
        request.place(Query(num_tokens=9, num_max_tokens=13, failed=frozenset({"lost"})))
    else:
        request.heard(broke)
    request.heard(SECOND)
    assert not policy.went_on_s


class Local(Foreteller):
    """Has decode workers compute prompts."""

    def place(self, query: Query, snapshot: Snapshot) -> Placement:
        outlook = Outlook(None, DECODE, 0.5, 0.05, 0.0, 9.0)
        return DecodeOnly(DECODE, Why.CHOICE, 0, Forecast(outlook, (outlook,)))


async def test_the_first_tokens_of_a_decode_worker_come_true_too(world: World) -> None:
    policy = Local()
    world.services = replace(world.services, policy=policy)
    request, tokens = world.request(), events.Tokens(1, len(PROMPT), (7,), ())
    assert request.awaits_tokens
    request.heard(tokens)
    assert not request.awaits_tokens
    request.heard(tokens)
    assert len(policy.came) == 1
    assert not policy.went_on_s, "nothing moved"
    broken = world.request()
    broken.heard(events.ReservationLost(1, "it is gone"))
    assert not broken.awaits_tokens
    broken.heard(tokens)
    assert len(policy.came) == 1


@pytest.mark.parametrize(
    ("claim", "tpot_s", "due_in_s"),
    [
        (Claim(), 0.0, None),
        (Claim(tpot_s=0.04, first_token_due_s=107.0), 0.04, 7.0),
        (Claim(first_token_due_s=107.0, ttft_s=9.0, has_deadline_first=True), 0.0, None),
        (Claim(first_token_due_s=107.0, has_deadline_first=True, asks_first_too=True), 0.0, 7.0),
        (Claim(first_token_due_s=-1e9), 0.0, -86_400.0),
        (Claim(tpot_s=1e9, first_token_due_s=1e12), 86_400.0, 86_400.0),  # a day at the most
    ],
)
async def test_workers_are_told_what_is_promised(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    claim: Claim,
    tpot_s: float,
    due_in_s: float | None,
) -> None:
    told: list[common_pb2.SequenceSpec] = []

    def note(command: decode_pb2.Reserve, listener: object, answer: AnswerLength) -> bool:
        told.append(command.spec)
        return True

    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(world.welcomes(DECODE), "reserve", note)
    request = made(world, claim)
    for emitted in ((), (7, 8, 9)):
        reserve = actions.Reserve(DECODE, 1 + len(emitted), len(emitted), to_pull=False)
        assert request.reserve(reserve, emitted, Deaf())
    first, resumed = told
    assert [spec.tpot_s for spec in told] == [tpot_s] * 2
    assert [spec.num_expected_tokens for spec in told] == [50, 50], "less is left of what it may"
    assert first.HasField("due_in_s") is (due_in_s is not None)
    assert first.due_in_s == (due_in_s or 0.0)
    assert not resumed.HasField("due_in_s"), "its first token has come"


async def test_placement_knows_what_pace_was_promised_where_until_it_is_over(
    world: World,
) -> None:
    def told() -> Promised:
        link = world.cluster.decode_link(DECODE)
        assert link is not None
        return link.load.promised

    world.services = replace(world.services, policy=Local())
    world.welcomes(DECODE)
    request = made(world, Claim(tpot_s=0.04))
    for sequence_id in (1, 2, 3):
        reserve = actions.Reserve(DECODE, sequence_id, 0, to_pull=False)
        assert request.reserve(reserve, (), Deaf())
    promise = Promise(0.04, 50)
    assert told() == promised([promise] * 3)
    request.release(1)
    request.release(1)
    assert told() == promised([promise] * 2)
    request.close_all()
    assert told() == NOTHING_PROMISED


async def test_placement_knows_how_long_an_answer_may_be_that_has_some_tokens_already(
    world: World,
) -> None:
    """Half have ten tokens and half have 40; of one that has twelve 28 are to come."""
    world.services = replace(world.services, policy=Local())
    world.welcomes(DECODE)
    for num_tokens in (10, 40) * 50:
        world.services.lengths.learn(RequestClass.STANDARD, "", num_tokens)
    request = made(world, Claim(tpot_s=0.04))
    link = world.cluster.decode_link(DECODE)
    assert link is not None
    for sequence_id, num_emitted, ways in ((1, 0, [9, 39]), (2, 12, [27])):
        reserve = actions.Reserve(DECODE, sequence_id, num_emitted, to_pull=False)
        assert request.reserve(reserve, [5] * num_emitted, Deaf())
        owner = world.services.incarnation
        told = Paced(0.04, 0.0, 0, (25, 27)[num_emitted > 0], owner, sequence_id)
        link.load.told(sequence_id, [told], 0.0)
        assert link.load.paced is not None
        assert [way.num_more for way in link.load.paced] == ways
    request.close_all()


@pytest.mark.parametrize(
    ("beside", "why", "is_told"),
    [
        (None, Why.CHOICE, True),
        (DECODE, Why.CHOICE, False),
        (DECODE, Why.NO_PREFILL, True),
        (WorkerId("d:2", "d-2"), Why.CHOICE, True),
    ],
)
async def test_what_shares_the_blocks_of_another_choice_is_no_local_prefill(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    beside: WorkerId | None,
    why: Why,
    is_told: bool,
) -> None:
    """The trace and the counters are those of the first choice's way, too."""
    told: list[object] = []
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: DecodeOnly(DECODE, why))
    monkeypatch.setattr(LeastLoaded, "explain", lambda *asked: None)
    monkeypatch.setattr(Untraced, "is_traced", True)
    monkeypatch.setattr(Untraced, "ran_locally", lambda observer, why: told.append(why))
    monkeypatch.setattr(Untraced, "placed", lambda observer, *chosen: told.append("placed"))
    world.welcomes(DECODE)
    session = started(world, world.services.config, beside=beside)
    world.services.room.pump()
    reserved = decode_pb2.Reserved(sequence_id=1, num_cached_tokens=32)
    session.on_decode_event(decode_pb2.DecodeEvent(reserved=reserved))
    assert session.is_under_way
    assert told == (["placed", why] if is_told else [])
    session.close()


def made(world: World, claim: Claim) -> Dispatch:
    return world.dispatch(resolved(claim=claim, max_tokens=50))


async def test_placement_is_told_what_is_left_of_the_objectives(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Query] = []
    place = world.services.policy.place
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def told(query: Query, snapshot: Snapshot) -> Placement | None:
        asked.append(query)
        return place(query, snapshot)

    monkeypatch.setattr(world.services.policy, "place", told)
    query = Query(num_tokens=len(PROMPT), num_max_tokens=len(PROMPT) + 50)
    made(world, Claim(RequestClass.REALTIME, "", 100.5, 0.04)).place(query)
    made(world, NO_CLAIM).place(query)
    assert asked[0].objectives.ttft_s == pytest.approx(0.5)
    assert asked[0].objectives.tpot_s == 0.04
    assert asked[1].objectives == Objectives()
    assert asked[0].num_output_tokens == 50


class Decliner(LeastLoaded):
    """Places nobody, for objectives or for want of room."""

    def __init__(self, *, has_declined: bool) -> None:
        super().__init__(
            CacheIndex(1), local_below_tokens=0, allow_local=True, allow_recompute=True
        )
        self._has_declined = has_declined

    @property
    def has_declined(self) -> bool:
        return self._has_declined

    def place(self, query: Query, snapshot: Snapshot) -> None:
        return None


@pytest.mark.parametrize("has_declined", [True, False])
async def test_only_who_would_miss_objectives_is_held_and_not_who_lacks_room(
    world: World, monkeypatch: pytest.MonkeyPatch, has_declined: bool
) -> None:
    """Who is held keeps others from the workers that there are."""
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: True)
    world.services = replace(world.services, policy=Decliner(has_declined=has_declined))
    request = made(world, NO_CLAIM)
    assert request.place(Query(num_tokens=9, num_max_tokens=10, may_refuse=True)) is None
    assert request.is_held is has_declined


@pytest.mark.parametrize("request_class", list(RequestClass))
async def test_a_batch_sees_no_room_where_prompts_wait(
    world: World, monkeypatch: pytest.MonkeyPatch, request_class: RequestClass
) -> None:
    busy = PrefillView(worker=PREFILL, num_pending_tokens=100, max_model_len=1000)
    monkeypatch.setattr(world.cluster, "snapshot", lambda: Snapshot(prefill=(busy,)))
    seen: list[Snapshot] = []

    def place(policy: LeastLoaded, query: Query, snapshot: Snapshot) -> None:
        seen.append(snapshot)

    monkeypatch.setattr(LeastLoaded, "place", place)
    session = started(world, RouterConfig(model="m"), Claim(request_class))
    world.services.room.pump()
    session.close()
    assert [view.has_runway for each in seen for view in each.prefill] == [
        request_class is not RequestClass.BATCH
    ]

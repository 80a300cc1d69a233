"""What placement and the queue hear of a request when it ends, and what is paid for. No sockets."""

import pytest

from diptych.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    DiptychError,
    InvalidRequestError,
    LogitsError,
    QueueFullError,
    SlowClientError,
)
from diptych.v1 import common_pb2, decode_pb2
from router.config import RouterConfig
from router.placement.engine_seconds import EngineRates
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Unreachable, Why
from router.placement.query import EndedRequest
from router.placement.views import Snapshot
from router.request import actions
from tests.unit.router.request.dispatch_world import DECODE, PROMPT, World, opened, started

LOST = Unreachable("too late", 2.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (SlowClientError("it takes nothing"), False),
        (InvalidRequestError("no such token", field="prompt"), False),
        (LogitsError("no number"), False),
        (DeadlineExceededError("the request's deadline passed"), False),
        (QueueFullError("full", retry_after_s=1.0), True),
    ],
)
async def test_what_a_request_did_itself_is_not_held_against_placement(
    world: World, monkeypatch: pytest.MonkeyPatch, error: DiptychError, is_told: bool
) -> None:
    told: list[EndedRequest] = []
    monkeypatch.setattr(world.services.policy, "ended_as", told.append)
    session = started(world, RouterConfig(model="m"))
    session.turn_away(error)
    assert len(told) == is_told
    session.close()


@pytest.mark.parametrize("front", [False, True])
async def test_another_choice_is_no_request_to_placement(
    world: World, monkeypatch: pytest.MonkeyPatch, *, front: bool
) -> None:
    """It came when the first one ran, so that its first token would count as late."""
    told: list[EndedRequest] = []
    monkeypatch.setattr(world.services.policy, "ended_as", told.append)
    for ended in (False, True):
        session = started(world, RouterConfig(model="m"), front=front)
        if ended:
            session._execute(actions.Finish(common_pb2.FINISH_REASON_STOP))
        else:
            session.turn_away(QueueFullError("full", retry_after_s=1.0))
        session.close()
    assert len(told) == (0 if front else 2)


@pytest.mark.parametrize(
    ("reason", "is_cut"),
    [(common_pb2.FINISH_REASON_STOP, False), (common_pb2.FINISH_REASON_LENGTH, True)],
)
async def test_an_answer_that_max_tokens_ended_teaches_that_it_was_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch, reason: int, *, is_cut: bool
) -> None:
    taught: list[bool] = []

    def learn(*answer: object, is_cut: bool) -> None:
        taught.append(is_cut)

    monkeypatch.setattr(world.services.lengths, "learn", learn)
    session = started(world, RouterConfig(model="m"))
    session._execute(actions.Finish(reason))
    session.close()
    assert taught == [is_cut]


@pytest.mark.parametrize(("is_taken", "num_computed"), [(False, 0), (True, len(PROMPT) - 16)])
async def test_what_no_worker_took_is_not_paid_for(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool, num_computed: int
) -> None:
    """It was placed, and its client left before a worker said that it has blocks for it."""
    used: list[float] = []
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: DecodeOnly(DECODE, Why.CHOICE))
    room = world.services.room
    monkeypatch.setattr(room, "_used", lambda request_class, used_s: used.append(used_s))
    world.welcomes(DECODE)
    session = started(world, RouterConfig(model="m"))
    room.pump()
    assert room.num_placed == 1
    if is_taken:
        reserved = decode_pb2.Reserved(sequence_id=1, num_cached_tokens=16)
        session.on_decode_event(decode_pb2.DecodeEvent(reserved=reserved))
    session.close()
    assert used == [pytest.approx(EngineRates().cost_s(num_computed, 0))]


async def test_a_session_ends_with_what_was_foretold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.services.policy, "foresee", lambda query, snapshot, wait_s: LOST)
    monkeypatch.setattr(Snapshot, "has_room_for", lambda self, those: False)
    for settings, is_refused in (
        ({"placement": "predicted"}, True),
        ({"placement": "predicted", "refuse_unreachable": False}, False),
        ({}, True),
        ({"placement": "least-loaded"}, False),
    ):
        session = started(world, RouterConfig(model="m", **settings))
        if is_refused:
            with pytest.raises(DeadlineUnreachableError):
                session.poll()
        assert world.services.room.num_waiting == (not is_refused)
        session.close()

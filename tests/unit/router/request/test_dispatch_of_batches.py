"""What workers are told of a request's class: whose turn it is, and whether it leaves room."""

from unittest.mock import create_autospec

import pytest

from diptych.request_class import RequestClass
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from router.placement.answer_length import AnswerLength
from router.placement.claim import Claim, payer_of
from router.placement.fair_queue import Turn
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Paired
from router.placement.query import Query
from router.placement.views import Snapshot
from router.placement.waiting_room import Waiter
from router.request import actions, dispatch
from tests.unit.router.request.dispatch_world import DECODE, PREFILL, Deaf, opened


@pytest.mark.parametrize(
    ("request_class", "others", "yields"),
    [
        (RequestClass.REALTIME, None, False),
        (RequestClass.STANDARD, None, False),
        (RequestClass.BATCH, None, True),
        (RequestClass.BATCH, RequestClass.BATCH, True),
        (RequestClass.BATCH, RequestClass.STANDARD, False),  # its turn came before theirs
    ],
)
async def test_workers_are_told_of_a_batch_that_others_go_first(
    monkeypatch: pytest.MonkeyPatch,
    request_class: RequestClass,
    others: RequestClass | None,
    yields: bool,
) -> None:
    world = opened(monkeypatch)
    if others is not None:
        waiter = create_autospec(Waiter, instance=True)
        world.services.room.enter(waiter, front=False, turn=Turn(others))
    asked: list[common_pb2.SequenceSpec] = []

    class Link:
        def __init__(
            self, channel: object, start: prefill_pb2.PrefillStart, *_: object, **__: object
        ):
            asked.append(start.spec)

        async def run(self) -> None: ...

    def note(command: decode_pb2.Reserve, listener: object, answer: AnswerLength) -> bool:
        asked.append(command.spec)
        return True

    monkeypatch.setattr(world.welcomes(DECODE), "reserve", note)
    monkeypatch.setattr(dispatch, "PrefillLink", Link)
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: Paired(PREFILL, DECODE))
    request = world.request(claim=Claim(request_class, "somebody"))
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=True), (), Deaf())
    assert request.open_lease(actions.OpenLease(PREFILL, 2, 0), (), Deaf())
    assert [spec.yields for spec in asked] == [yields] * 2
    weights = {RequestClass.REALTIME: (1, 8.0), RequestClass.STANDARD: (2, 4.0)}
    for spec in asked:
        assert (spec.tier, spec.tier_weight) == weights.get(request_class, (3, 1.0))
        assert spec.payer == payer_of(request_class, "somebody")
        assert b"somebody" not in spec.payer
    own = world.services.cluster.prefill_backlog.own(PREFILL)
    assert own.num_tokens == len(asked[1].token_ids)
    assert own.payers == {asked[1].payer}


@pytest.mark.parametrize("spare_only", [False, True])
async def test_placement_is_asked_for_its_payer_and_sees_what_it_may_use(
    monkeypatch: pytest.MonkeyPatch, spare_only: bool
) -> None:
    """A batch that leaves room sees none on a worker where others wait."""
    world = opened(monkeypatch)
    served = common_pb2.KVLayout(model_digest="m")
    world.says(DECODE, worker_pb2.WORKER_ROLE_DECODE, layout=served, max_model_len=99)
    world.says(
        PREFILL,
        worker_pb2.WORKER_ROLE_PREFILL,
        layout=served,
        max_model_len=99,
        prefill_tokens_per_s=100.0,
        num_pending_prefill_tokens=90,
    )
    asked: list[tuple[Query, Snapshot]] = []

    def note(policy: LeastLoaded, query: Query, snapshot: Snapshot) -> Paired:
        asked.append((query, snapshot))
        return Paired(PREFILL, DECODE)

    monkeypatch.setattr(LeastLoaded, "place", note)
    request = world.request(claim=Claim(RequestClass.BATCH, "somebody"))
    asked.clear()
    request.place(Query(num_tokens=40, num_max_tokens=44, takes_spare_only=spare_only))
    ((query, snapshot),) = asked
    assert (query.payer, query.is_batch) == (payer_of(RequestClass.BATCH, "somebody"), True)
    assert [view.has_runway for view in snapshot.prefill] == [not spare_only]


async def test_what_a_batch_keeps_is_decided_when_it_is_first_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came before others that waited: it leaves for nobody, wherever it goes on."""
    world = opened(monkeypatch)
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: Paired(PREFILL, DECODE))
    waiter = create_autospec(Waiter, instance=True)
    world.services.room.enter(waiter, front=False, turn=Turn(RequestClass.STANDARD))
    request = world.request(claim=Claim(RequestClass.BATCH, "somebody"))
    world.services.room.leave(waiter)
    request.place(Query(num_tokens=40, num_max_tokens=44))
    assert not request._spec(()).yields

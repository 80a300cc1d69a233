"""What workers are told of a request's class: whose turn it is, and whether it leaves room."""

from functools import partial
from unittest.mock import create_autospec

import pytest

from diptych.request_class import RequestClass
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.placement.claim import Claim, payer_of
from router.placement.fair_queue import Turn
from router.placement.policy import LeastLoaded
from router.placement.types import Paired
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

    def note(command: decode_pb2.Reserve, listener: object) -> bool:
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
    num_behind = partial(world.services.cluster.prefill_backlog.num_behind, PREFILL)
    assert num_behind(payer_of(request_class, "another")) == len(asked[1].token_ids)
    assert num_behind(asked[1].payer) == 0

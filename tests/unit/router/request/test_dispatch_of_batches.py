"""What workers are told of a request's class: whether its sequences leave room to others."""

from unittest.mock import create_autospec

import pytest

from diptych.request_class import RequestClass
from diptych.v1 import common_pb2, decode_pb2, prefill_pb2
from router.placement.claim import Claim
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
    request = world.request(claim=Claim(request_class))
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=True), (), Deaf())
    assert request.open_lease(actions.OpenLease(PREFILL, 2, 0), (), Deaf())
    assert [spec.yields for spec in asked] == [yields] * 2

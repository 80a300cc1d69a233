"""A line that waits in vain for workers, such as others may not need: whom that slows down."""

import asyncio
import json

import httpx
import pytest

from batch_server.records import LineOwner
from batch_server.runner.answers import Answer
from batch_server.runner.pace import Pace
from batch_server.runner.sender import LineSender
from batch_server.runner.slots import Slots
from tests.unit.batch_server.rig import CHAT, ROUTERS, well

NUM_PLACES = 4
RETRY_S = 7.0


class OneWaits:
    """Routers that let one line wait until it ``may_end``, in vain the first time."""

    def __init__(self, status: int, code: str, other_status: int) -> None:
        self._refusal = self._refused(status, code)
        self._other_status = other_status
        self._num_refused = 0
        self.has_one, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if "other" in request.content.decode():
            is_good = self._other_status == 200
            return well(request) if is_good else self._refused(self._other_status, "a_reason")
        self.has_one.set()
        await self.may_end.wait()
        self._num_refused += 1
        return self._refusal if self._num_refused == 1 else well(request)

    @staticmethod
    def _refused(status: int, code: str) -> httpx.Response:
        headers = {"retry-after": f"{RETRY_S:g}"}
        return httpx.Response(status, headers=headers, json={"error": {"code": code}})


@pytest.mark.parametrize(("status", "code"), [(429, "queue_timeout"), (503, "no_worker")])
@pytest.mark.parametrize(("other_status", "slows_others"), [(200, False), (400, True)])
async def test_who_waits_in_vain_while_others_are_served_slows_none_of_them(
    status: int, code: str, other_status: int, slows_others: bool
) -> None:
    now_s, pauses = 0.0, list[float]()

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        assert (slots.pace.pause_s(now_s) > 0) is slows_others
        assert (slots.pace.limit < NUM_PLACES) is slows_others

    async def wait(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    async def answer_to(name: str) -> Answer:
        async def read_body() -> bytes:
            return json.dumps({"messages": name, "seed": 1}).encode()

        return await sender.answer(LineOwner(name, name), CHAT, name, read_body)

    slots = Slots(Pace(NUM_PLACES), lambda: now_s, wait)
    routers = OneWaits(status, code, other_status)
    async with httpx.AsyncClient(transport=httpx.MockTransport(routers)) as client:
        sender = LineSender(client, ROUTERS, slots, 1, sleep=pause, clock=lambda: now_s)
        async with asyncio.TaskGroup() as tasks:
            one = tasks.create_task(answer_to("one"), name="one")
            await routers.has_one.wait()
            assert (await answer_to("other")).status == other_status
            routers.may_end.set()
    assert one.result().status == 200
    assert len(pauses) == 1
    assert pauses[0] >= RETRY_S

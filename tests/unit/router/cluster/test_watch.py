"""What the router makes of a worker's own words. No sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from diptych.errors import DiptychError, NoWorkerError
from diptych.rpc.peer_channel import Dialer
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc
from router.cluster.watch import WorkerWatch, able_roles_of, roles_of
from tests.work_count import num_calls


class FakeCall:
    def __init__(self, states: list[worker_pb2.WorkerState]) -> None:
        self._states = states

    async def __aiter__(self) -> AsyncIterator[worker_pb2.WorkerState]:
        for state in self._states:
            yield state

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> bool:
        return True


class FakeChannel:
    async def close(self, grace: float | None) -> None:
        pass


class DoneError(Exception):
    """The test has seen enough."""


async def watched(
    monkeypatch: pytest.MonkeyPatch, states: list[worker_pb2.WorkerState]
) -> list[int | None]:
    """The serving states that a watch of a decode worker told of, one stream long."""

    class FakeStub:
        def __init__(self, channel: grpc.aio.Channel) -> None:
            pass

        def Watch(self, request: worker_pb2.WatchRequest) -> FakeCall:
            return FakeCall(states)

    async def enough(delay_s: float) -> None:
        raise DoneError

    seen: list[int | None] = []
    monkeypatch.setattr(worker_pb2_grpc, "WorkerStub", FakeStub)
    monkeypatch.setattr(
        "diptych.rpc.peer_channel.open_channel", lambda address, timers: FakeChannel()
    )
    monkeypatch.setattr(asyncio, "sleep", enough)
    watch = WorkerWatch(
        "decode:1",
        worker_pb2.WORKER_ROLE_DECODE,
        router_incarnation="r1",
        dialer=Dialer(Timers()),
        on_change=lambda w: seen.append(None if w.state is None else w.state.state),
    )
    with pytest.raises(DoneError):
        await watch.run()
    return seen


def said(role: int, state: int) -> worker_pb2.WorkerState:
    message = worker_pb2.WorkerState(incarnation="w1")
    message.role, message.state = role, state  # type: ignore[assignment]
    return message


async def test_a_state_of_a_newer_worker_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = worker_pb2.WORKER_ROLE_DECODE
    states = [said(decode, worker_pb2.SERVING_STATE_READY), said(decode, 77)]
    assert await watched(monkeypatch, states) == [worker_pb2.SERVING_STATE_READY, 77, None]


async def test_a_worker_is_what_it_says_whichever_list_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = worker_pb2.SERVING_STATE_READY
    states = [said(worker_pb2.WORKER_ROLE_PREFILL, ready)]
    assert await watched(monkeypatch, states) == [ready, None]


async def test_a_role_without_a_name_here_is_complained_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert await watched(monkeypatch, [said(78, worker_pb2.SERVING_STATE_READY)] * 3) == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_locked", [True, False])
async def test_why_a_lock_did_not_open_is_told_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_locked: bool
) -> None:
    ends = ["expired", "expired", "Connection refused", "expired", "unknown authority"]
    dialer: Any = SimpleNamespace(timers=Timers(), identity=object() if is_locked else None)
    watch = WorkerWatch(
        "decode:1",
        worker_pb2.WORKER_ROLE_DECODE,
        router_incarnation="r1",
        dialer=dialer,
        on_change=lambda w: None,
    )

    async def nothing() -> None: ...

    class Stream:
        def __init__(self, *args: object, **options: object) -> None: ...

        async def run(self, on_message: object) -> DiptychError:
            return NoWorkerError(ends.pop(0))

    monkeypatch.setattr(watch._peer, "renewed", nothing)
    monkeypatch.setattr(worker_pb2_grpc, "WorkerStub", lambda channel: MagicMock())
    monkeypatch.setattr("router.cluster.watch.ClientStream", Stream)
    while ends:
        assert not await watch._watch()
    told = [(record.message, record.__dict__["why"]) for record in caplog.records]
    reasons = ["expired", "unknown authority"] if is_locked else []
    assert told == [("worker not reached", why) for why in reasons]


def test_roles_that_are_as_they_were_are_not_read_anew() -> None:
    """Each message says them, and is asked for them several times."""
    both = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
    state = worker_pb2.WorkerState(role=both[0], roles=both, able_roles=both)
    assert roles_of(state) == able_roles_of(state) == frozenset(both)
    again = worker_pb2.WorkerState.FromString(state.SerializeToString())
    assert num_calls(lambda: (roles_of(again), able_roles_of(again))) <= 4

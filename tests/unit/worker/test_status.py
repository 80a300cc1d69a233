"""What a worker says of itself, and when it takes work."""

import pytest

from diptych.errors import (
    RETRY_LATER_S,
    InvalidRequestError,
    NoWorkerError,
    WorkerDrainingError,
)
from diptych.v1 import worker_pb2
from diptych.worker.status import WorkerStatus


def test_states_in_order_and_admission() -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    with pytest.raises(NoWorkerError, match="loading") as refused:
        status.admit()
    assert refused.value.retry_after_s == RETRY_LATER_S
    status.loaded = True
    status.admit()
    status.set(worker_pb2.SERVING_STATE_READY)
    status.admit()
    status.set(worker_pb2.SERVING_STATE_DRAINING, "stop")
    with pytest.raises(WorkerDrainingError):
        status.admit()
    status.set(worker_pb2.SERVING_STATE_READY)  # too late
    assert status.snapshot().state == worker_pb2.SERVING_STATE_DRAINING
    status.set(worker_pb2.SERVING_STATE_FAILED, "broken")
    with pytest.raises(NoWorkerError, match="broken"):
        status.admit()


def test_roles_are_told_and_only_those_it_has_are_admitted() -> None:
    prefill, decode = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
    status = WorkerStatus(decode, able=(decode, prefill))
    status.loaded = True
    status.admit_as(decode)
    with pytest.raises(WorkerDrainingError, match="prefill"):
        status.admit_as(prefill)
    with status.watching_urgently() as urgent:
        assert status.set_roles([prefill]) == ((decode,), (prefill,))
        assert urgent.is_set(), "placement depends on it"
        urgent.clear()
        assert status.set_roles([prefill]) == ((prefill,), (prefill,))
        assert not urgent.is_set()
    status.admit_as(prefill)
    with pytest.raises(WorkerDrainingError, match="decode"):
        status.admit_as(decode)
    told = status.snapshot()
    assert (told.role, list(told.roles)) == (prefill, [prefill])
    assert list(told.able_roles) == [prefill, decode]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([], "at least one"),
        ([1, 1], "twice"),
        ([0], "0 is no role"),
        ([9], "9 is no role"),
        ([1, 2], "serves decode alone, not prefill"),
    ],
)
def test_roles_that_cannot_be_had_are_refused_and_nothing_changes(
    wanted: list[int], why: str
) -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    with pytest.raises(InvalidRequestError, match=why):
        status.set_roles(wanted)
    assert status.roles == (worker_pb2.WORKER_ROLE_DECODE,)


def test_other_routers_hear_at_once_of_work_that_one_sent() -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_PREFILL)
    with (
        status.watching() as changed,
        status.watching_urgently("a") as own,
        status.watching_urgently("b") as others,
    ):
        status.work_came("a")
        assert changed.is_set()
        assert others.is_set()
        assert not own.is_set(), "it knows"


def test_watchers_are_told_of_changes_only() -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_PREFILL)
    with status.watching() as changed:
        status.set(worker_pb2.SERVING_STATE_STARTING, "loading")
        assert not changed.is_set()
        status.set(worker_pb2.SERVING_STATE_STARTING, "loading: 10%")
        assert changed.is_set()
    changed.clear()
    status.changed()
    assert not changed.is_set()


def test_each_start_is_another_incarnation() -> None:
    one, two = (WorkerStatus(worker_pb2.WORKER_ROLE_DECODE) for _ in range(2))
    assert one.incarnation != two.incarnation
    assert one.snapshot().incarnation == one.incarnation


def test_where_it_runs_is_told_with_every_state() -> None:
    status = WorkerStatus(worker_pb2.WORKER_ROLE_PREFILL, zone="a", nvlink_domain="rack 7")
    state = status.snapshot()
    assert (state.zone, state.nvlink_domain) == ("a", "rack 7")

"""What a worker says of itself, and when it takes work."""

import pytest

from diptych.errors import RETRY_LATER_S, NoWorkerError, WorkerDrainingError
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

"""What a client tries again, and when."""

import grpc
import pytest

from diptych.client.retries import Retries, WatchRetries
from diptych.errors import (
    DiptychError,
    InvalidRequestError,
    ModelChangedError,
    NoWorkerError,
    QueueFullError,
    TransferInterruptedError,
)
from diptych.rpc.status import remote_error

LOST = remote_error(grpc.StatusCode.UNAVAILABLE, "", "Socket closed")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def pauses(error: DiptychError, drawn: float, num: int = 7) -> list[float | None]:
    retries = Retries(num, None, draw=lambda: drawn)
    return [retries.pause_s(error) for _ in range(num + 1)]


def test_pauses_grow_to_a_bound_and_end() -> None:
    assert pauses(LOST, 1.0) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, None]
    assert pauses(LOST, 0.0) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, None]


def test_a_transfer_that_was_interrupted_is_tried_again_as_no_other_abortion_is() -> None:
    aborted = grpc.StatusCode.ABORTED
    interrupted = remote_error(aborted, TransferInterruptedError.reason, "the source is gone")
    assert pauses(interrupted, 1.0, num=1) == [0.1, None]
    assert pauses(remote_error(aborted, "", "stopped"), 1.0, num=1) == [None, None]


def test_who_wants_to_wait_for_ever_does() -> None:
    """Half an hour of failures are more than a float has powers of two for."""
    assert pauses(LOST, 1.0, num=1100)[-2:] == [2.0, None]


def test_they_come_on_top_of_what_the_router_asks_for() -> None:
    assert pauses(QueueFullError("full", retry_after_s=3.0), 1.0, num=1) == [3.1, None]


def test_who_is_told_to_wait_for_long_decides_that_itself() -> None:
    assert pauses(QueueFullError("full", retry_after_s=30.0), 1.0, num=1)[0] == 30.1
    assert pauses(QueueFullError("full", retry_after_s=30.5), 1.0, num=1)[0] is None


@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_deadline_too_far_for_grpc_to_count_has_not_passed(timeout_s: float) -> None:
    retries = Retries(5, timeout_s)
    assert retries.left_s == 1e9
    assert retries.pause_s(LOST) is not None
    assert Retries(5, 1e8, lambda: 0.0).left_s == 1e8


def test_a_call_that_met_the_end_of_its_server_is_made_again() -> None:
    killed = remote_error(grpc.StatusCode.CANCELLED, "", "CANCELLED")
    assert pauses(killed, 1.0, num=1) == [0.1, None]


def test_what_brought_something_is_not_counted() -> None:
    retries = Retries(1, None, draw=lambda: 1.0)
    for _ in range(3):
        assert retries.pause_s(LOST) == 0.1
        retries.renew()


def test_nothing_is_tried_beyond_the_deadline() -> None:
    clock = Clock()
    retries = Retries(9, 1.0, clock, lambda: 1.0)
    assert retries.left_s == 1.0
    assert retries.pause_s(NoWorkerError("none", retry_after_s=1.0)) is None
    assert retries.pause_s(LOST) == 0.1
    clock.now_s += 0.85
    assert retries.left_s == pytest.approx(0.15)
    assert retries.pause_s(LOST) is None
    clock.now_s += 1
    assert retries.left_s == 0.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),  # does not say when
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ""),  # a message that is too large
        (grpc.StatusCode.ABORTED, "CLIENT_TOO_SLOW"),
        (grpc.StatusCode.INTERNAL, "STEP_FAILED"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY"),
        (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID"),
    ],
)
def test_what_does_not_heal_is_not_tried_again(code: grpc.StatusCode, reason: str) -> None:
    assert pauses(remote_error(code, reason, "no"), 1.0, num=1)[0] is None


def test_an_answer_that_began_with_other_weights_is_not_tried_again() -> None:
    assert pauses(ModelChangedError("x"), 1.0)[0] is None


def test_a_watch_that_is_told_nothing_new_is_asked_for_ever_more_seldom_and_not_for_ever() -> None:
    clock = Clock()
    retries = WatchRetries(5, clock, lambda: 1.0)
    waited: list[float] = []
    retries.came(is_new=True)
    clock.now_s += 50_000  # a batch may wait for long where nothing breaks
    while (pause_s := retries.pause_s(LOST)) is not None:
        waited.append(pause_s)
        clock.now_s += pause_s
        retries.came(is_new=False)
    assert waited[:10] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert set(waited[10:]) == {30.0}
    assert 3600 <= sum(waited) < 3630
    assert retries.is_still_for_good


def test_a_watch_that_is_told_something_new_goes_on() -> None:
    clock = Clock()
    retries = WatchRetries(1, clock, lambda: 1.0)
    for _ in range(20):
        retries.came(is_new=True)
        assert retries.pause_s(LOST) == 0.1
        clock.now_s += 3000
        retries.came(is_new=False)
        assert retries.pause_s(LOST) == 0.2
        assert not retries.is_still_for_good
        clock.now_s += 3000


def test_a_watch_that_is_told_nothing_at_all_has_the_tries_of_any_call() -> None:
    retries = WatchRetries(2, Clock(), lambda: 1.0)
    for _ in range(2):
        retries.came(is_new=False)
        assert retries.pause_s(LOST) is not None
        assert retries.pause_s(LOST) is not None
        assert retries.pause_s(LOST) is None
    assert not retries.is_still_for_good
    retries.came(is_new=True)
    assert retries.pause_s(InvalidRequestError("wrong", field="id")) is None

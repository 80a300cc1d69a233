"""Whom a request asks again once it has waited."""

from diptych.errors import NoWorkerError
from diptych.timers import Timers
from router.placement.views import WorkerId
from router.request.retry_state import RetryState

P, D = WorkerId("p:1", "p"), WorkerId("d:1", "d")


def test_who_waits_may_ask_everybody_again_after_pauses_that_grow() -> None:
    retry, pauses = RetryState(Timers(), max_attempts=3), list[float]()
    for now in range(6):
        retry.fail(P)
        retry.refuse(D, NoWorkerError("full"))
        retry.fail_pair(P, D)
        retry.wait(float(now))
        assert not retry.failed | retry.refused
        assert not retry.failed_pairs
        pauses.append(round(retry.not_before_s - now, 3))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert retry.wait_until_s == Timers().no_worker_s, "since it began to wait"


def test_who_has_nobody_to_avoid_makes_no_pause() -> None:
    retry = RetryState(Timers(), max_attempts=3)
    retry.wait(5.0)
    assert retry.not_before_s <= 5.0
    assert retry.due_s(5.0) == retry.wait_until_s


def test_what_was_placed_begins_anew() -> None:
    retry = RetryState(Timers(), max_attempts=3)
    for now in range(3):
        retry.fail(P)
        retry.wait(float(now))
    retry.refuse(D, NoWorkerError("full"))
    retry.fail(P)
    retry.placed()
    assert not retry.refused
    assert retry.refusal is None
    assert retry.failed == {P.incarnation}, "until it has to wait"
    retry.wait(9.0)
    assert (retry.not_before_s, retry.wait_until_s) == (9.05, 9.0 + Timers().no_worker_s)

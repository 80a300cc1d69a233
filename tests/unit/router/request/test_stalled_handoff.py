"""What a request's machine does when a hand-off does not end, though its workers live."""

import pytest

from tests.unit.router.request.world import TIMERS, World, worker


def test_a_lease_that_does_not_let_its_reader_in_is_lost() -> None:
    world = World(max_tokens=9).begin()
    world.accept()
    world.reserve()
    assert world.machine.wake_at_s == world.now + TIMERS.lost_peer_s
    world.pass_time(TIMERS.lost_peer_s - 0.1)
    assert world.lease.worker == worker("p1")
    world.pass_time(0.1)
    assert world.lease.worker == worker("p2")
    assert world.reservation.worker == worker("d1")
    world.hand_off()
    assert world.started


@pytest.mark.parametrize("step", ["reserved", "granted"])
def test_a_hand_off_that_does_not_end_behind_the_first_token_moves_on(step: str) -> None:
    """As a sequence that runs and gets no token."""
    world = World(max_tokens=9).begin()
    world.accept()
    world.reserve()
    if step != "reserved":
        world.grant()
    world.first()
    if step == "reserved":
        world.grant()
    world.pass_time(TIMERS.sequence_progress_s - 1)
    assert world.reservation.worker == worker("d1")
    world.pass_time(1)
    assert world.reservation.worker == worker("d2")
    assert world.machine.wake_at_s is not None, "and so would be the next"
    world.reserve()
    world.grant()
    world.pass_time(TIMERS.sequence_progress_s - 1)
    assert world.reservation.worker == worker("d2"), "its time begins anew"
    world.prove()
    assert world.started

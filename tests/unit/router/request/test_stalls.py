"""What a request's machine does when its sequence gets no token, though its worker lives."""

from tests.unit.router.request.world import TIMERS, World, worker


def test_a_sequence_that_gets_no_token_while_others_do_moves_on() -> None:
    world = World(max_tokens=9).begin()
    world.hand_off()
    world.pass_time(TIMERS.sequence_progress_s - 1)
    world.tokens(21)
    world.pass_time(1)
    assert world.reservation.worker == worker("d1"), "it got a token since it was looked last"
    world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d2")
    assert world.lease.num_emitted == 2
    assert world.retries == ["prefill_again"]


def test_a_prompt_takes_what_it_takes_where_it_is_decoded() -> None:
    """Behind others' prompts it may be minutes; from its first token on it is bounded."""
    world = World(prefills=(), max_tokens=9).begin()
    world.reserve(cached=0)
    assert world.ran_locally
    for _ in range(20):
        world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d1")
    world.tokens(20)
    world.pass_time(TIMERS.sequence_progress_s)
    world.tokens(21)
    world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d1")
    world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d2")


def test_what_is_lacking_behind_a_first_token_takes_what_it_takes_too() -> None:
    world = World(prefills=("p1",), max_tokens=9).begin()
    world.hand_off()
    world.tokens(21)
    world.prefills = []
    world.lose_reservation()
    world.reserve(cached=0)
    assert world.ran_locally
    for _ in range(20):
        world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d2")


def test_a_batchs_sequence_may_sit_out_but_its_hand_off_is_bounded() -> None:
    world = World(max_tokens=9, spare_only_s=10.0).begin()
    world.hand_off()
    for _ in range(20):
        world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d1")
    world = World(max_tokens=9, spare_only_s=10.0).begin()
    world.accept()
    world.reserve()
    world.first()
    world.grant()
    world.pass_time(TIMERS.sequence_progress_s)
    assert world.reservation.worker == worker("d2")


def test_time_in_the_queue_is_no_lack_of_progress() -> None:
    world = World(prefills=("p1",), decodes=("d1",), max_tokens=9).begin()
    world.hand_off()
    world.lose_reservation()
    assert world.queued
    world.pass_time(0.05)
    world.accept()
    world.reserve()
    world.grant()
    assert world.machine.wake_at_s is None, "nothing runs, nothing is due"


def test_a_sequence_that_is_excused_is_looked_at_again_one_bound_later() -> None:
    world = World(prefills=(), max_tokens=9).begin()
    world.reserve(cached=0)
    assert world.machine.wake_at_s == world.now + TIMERS.sequence_progress_s
    world.pass_time(TIMERS.sequence_progress_s)
    assert world.machine.wake_at_s == world.now + TIMERS.sequence_progress_s

"""An answer goes on with the weights with which it began, or not at all."""

import pytest

from diptych.errors import LogitsError, ModelChangedError
from router.request import events
from tests.unit.router.request.world import LENGTH, TIMERS, World, worker


def changed(world: World) -> bool:
    """Whether that is how it ended."""
    world.check_nothing_is_held()
    return isinstance(world.outcome, ModelChangedError)


def running() -> World:
    """With two tokens of "a"."""
    world = World().begin()
    world.hand_off()
    world.tokens(21)
    return world


def test_an_answer_that_lost_its_worker_does_not_go_on_with_other_weights() -> None:
    world = running()
    world.served = "b"
    world.lose_reservation()
    assert changed(world)
    assert str(world.outcome) == (
        "a model of digest b is served now; the answer began with a model of digest a: "
        "ask anew, without what came"
    ), "not that weights are others: the config may be, or how the digest is made"
    assert world.emitted == [20, 21]


@pytest.mark.parametrize("served", ["a", ""])
def test_with_the_same_weights_or_unknown_ones_it_goes_on(served: str) -> None:
    world = running()
    world.served = served
    world.lose_reservation()
    assert world.outcome is None
    assert world.lease.num_emitted == 2
    assert world.machine.model_digest == "a"


def test_where_it_runs_it_ends_whatever_is_served_meanwhile() -> None:
    world = running()
    world.served = "b"
    world.tokens(22, 23)
    world.end_reservation(LENGTH)
    assert world.outcome == LENGTH


def test_before_its_first_token_it_begins_anew_with_what_is_served() -> None:
    world = World(max_attempts=9).begin()
    world.bind()
    world.served = "b"
    world.lose_lease()
    world.lose_reservation()
    assert world.outcome is None
    assert world.machine.model_digest == "b"
    world.hand_off()
    world.served = "a"
    world.lose_reservation()
    assert changed(world)


def test_what_holds_all_kv_computes_on_where_it_is() -> None:
    """Its worker has the weights that it had."""
    world = World().begin()
    world.bind()
    world.prove()
    world.served = "b"
    world.lose_lease()
    assert world.outcome is None
    assert world.started
    world.tokens(20, 21, 22, 23)
    world.end_reservation(LENGTH)
    assert world.outcome == LENGTH
    assert world.machine.model_digest == "a"


def test_who_waits_hears_it_when_its_turn_comes_and_when_the_clock_looks() -> None:
    for tell in (World.pump, lambda world: world.pass_time(TIMERS.no_worker_s)):
        world = running()
        world.is_full = True
        world.lose_reservation()
        assert world.queued
        world.served = "b"
        tell(world)
        assert changed(world)


def test_what_is_resumed_asks_no_worker_with_other_weights() -> None:
    world = World(resumed=(20, 21), model_digest="b").begin()
    assert changed(world)
    assert world.num_asked == 0


def test_what_is_resumed_waits_until_it_is_known_what_is_served() -> None:
    world = World(prefills=(), resumed=(20, 21), model_digest="b")
    world.served = ""
    world.begin()
    assert world.queued
    assert world.machine.model_digest == "", "nobody but its client says so"
    world.served, world.prefills = "b", ["p1"]
    world.pump(room_made=True)
    assert world.lease.num_emitted == 2
    assert world.machine.model_digest == "b"


def test_what_is_resumed_is_not_placed_on_workers_that_do_not_say_what_they_have() -> None:
    """They may have anything."""
    world = World(resumed=(20,), model_digest="a")
    world.served = ""
    assert changed(world.begin())
    assert str(world.outcome).startswith("workers do not say which model they have; ")
    assert world.num_asked == 0
    assert world.machine.model_digest == ""


def test_a_digest_that_a_client_names_is_not_told_back() -> None:
    """Its answer is whole, so that no weights are asked."""
    world = World(max_tokens=2, resumed=(20, 21), model_digest="c").begin()
    assert world.outcome == LENGTH
    assert world.machine.model_digest == ""


def test_what_is_resumed_without_a_digest_is_of_what_it_was_placed_on() -> None:
    world = World(resumed=(20, 21)).begin()
    assert world.machine.model_digest == "a"
    world.served = "b"
    world.lose_reservation()
    world.lose_lease()
    assert changed(world)


def test_what_other_choices_have_tokens_of_is_demanded_before_the_first_token() -> None:
    world = World(model_digest="a")
    world.on(events.Begin(front=True))
    world.bind()
    world.served = "b"
    world.lose_lease()
    assert changed(world)
    world = World(model_digest="b")
    world.on(events.Begin(front=True))
    assert changed(world)
    assert world.num_asked == 0


def test_what_other_choices_begin_with_is_kept_to_by_the_first() -> None:
    world = World(prefills=("p1", "p2", "p3")).begin()
    world.bind()
    assert world.machine.keep_model() == "a"
    world.lose_lease()
    assert world.lease.worker != worker("p1")
    assert world.machine.model_digest == "a"
    world.served = "b"
    world.lose_lease()
    assert changed(world)


def test_what_other_choices_begin_with_is_not_forgotten_where_workers_do_not_say_theirs() -> None:
    world = World().begin()
    world.bind()
    world.machine.keep_model()
    world.served = ""
    world.lose_lease()
    assert changed(world)
    assert world.machine.model_digest == "a"


def test_of_an_answer_that_nobody_may_go_on_with_no_worker_is_forgiven() -> None:
    """That all others are of another model does not make one of them less suspect."""
    world = running()
    world.served = "b"
    num_asked = world.num_asked
    world.end_reservation(error=LogitsError("nan"))
    assert changed(world)
    assert world.num_asked == num_asked
    assert world.machine._retry.failed == {"p1", "d1"}

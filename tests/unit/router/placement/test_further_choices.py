"""Further choices of a request of which one was placed: whose turn they have. Pure."""

import pytest

from diptych.request_class import RequestClass
from router.placement.fair_queue import Turn
from tests.unit.router.placement.room_world import World, pass_it


def test_other_choices_have_turns_of_their_class_and_tenant() -> None:
    """They wait without a place of their own."""
    world = World(max_waiting=99, max_placed=99)
    turns = [Turn(RequestClass.BATCH), Turn(tenant="many"), Turn(RequestClass.REALTIME)]
    batch, many = ([world.waiter(front=True, turn=turn) for _ in range(30)] for turn in turns[:2])
    light = [world.waiter(turn=Turn(tenant="light")) for _ in range(9)]
    urgent = [world.waiter(turn=turns[2]) for _ in range(9)]
    world.run_scheduled()
    for _ in range(26):  # 8, 4 and 1 by weight, and tenants of a class alike
        world.capacity = 1
        world.room.pump()
    placed = [len(set(world.order) & set(each)) for each in (urgent, light, many, batch)]
    assert placed[0] == 9
    assert placed[1] == pytest.approx(placed[2], abs=1)
    assert placed[1] >= 4
    assert placed[3] >= 2


def test_another_choice_goes_before_all_else_of_its_tenant() -> None:
    world = World(max_waiting=99, max_placed=99)
    early = world.waiter()
    world.now_s = 11.0  # it is due
    late = world.waiter()
    choice = world.waiter(front=True)
    for _ in range(3):
        world.capacity = 1
        world.room.pump()
    assert world.order == [choice, early, late]


def test_other_choices_turn_nobody_away_and_are_not_turned_away() -> None:
    world = World(max_waiting=3, max_placed=99)
    choices = [world.waiter(front=True, turn=Turn(tenant="many")) for _ in range(50)]
    others = [world.waiter(turn=Turn(tenant="many")) for _ in range(2)]
    light = world.waiter(turn=Turn(tenant="light"))
    world.run_scheduled()
    assert not any(each.refusal for each in (*choices, *others, light))
    last = world.waiter(turn=Turn(tenant="many"))
    world.run_scheduled()
    assert [waiter.refusal is None for waiter in (*others, light, last)] == [
        True,
        True,
        True,
        False,
    ]
    assert not any(each.refusal for each in choices)


def test_a_batchs_other_choices_bar_nobody() -> None:
    world = World(max_waiting=99, max_placed=99)
    world.waiter(front=True, turn=Turn(RequestClass.BATCH))
    world.run_scheduled()
    pass_it(world)
    world.run_scheduled()
    late = world.waiter(turn=Turn(RequestClass.REALTIME))
    world.capacity = 1
    world.run_scheduled()
    assert late.is_placed

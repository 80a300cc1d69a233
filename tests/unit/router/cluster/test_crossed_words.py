"""What a worker told before it had what we sent says nothing of that. No sockets."""

import pytest

from diptych.step_model import StepCost, StepModel
from diptych.v1 import decode_pb2
from router.placement.views import WorkerId
from tests.unit.router.cluster.world import World
from tests.unit.router.request.dispatch_world import Deaf

pytestmark = pytest.mark.usefixtures("no_sockets")

D0 = WorkerId("d0:1", "d0:1-1")
MODEL = StepModel(StepCost(0.04, num_steps=30), StepCost(0.1, num_steps=30)).to_proto()


def told_world(**told: object) -> World:
    """One decode worker, which has told that, on a clock that stands still."""
    world = World(decode=1)
    world.passes(0.0)
    says(world, **told)
    return world


def says(world: World, **told: object) -> None:
    world.says("d0:1", step_model=MODEL, max_num_seqs=16, **told)


def num_sequences(world: World) -> int:
    (view,) = world.cluster.snapshot().decode
    return view.num_sequences


def num_sent(world: World) -> int:
    (view,) = world.cluster.snapshot().decode
    assert view.engine is not None
    return view.engine.num_departed_tokens


async def test_others_sequences_stay_beside_ours_that_the_worker_has_not_answered() -> None:
    world = told_world(num_running=10)
    ours = [world.reserve(D0, is_heard=False) for _ in range(5)]
    assert num_sequences(world) == 15
    says(world, num_running=10)
    assert num_sequences(world) == 15
    for sequence_id in ours[:2]:
        world.answers("d0:1", sequence_id)
    says(world, num_running=10, num_reserved=2)
    assert num_sequences(world) == 15
    for sequence_id in ours:
        world.answers("d0:1", sequence_id)
    says(world, num_running=10, num_reserved=5)
    assert num_sequences(world) == 15


@pytest.mark.parametrize("ends", ["refused", "released", "lost"])
async def test_who_ends_unanswered_is_not_awaited_any_more(ends: str) -> None:
    """Else others would be as many more for ever."""
    world = told_world()
    sequence_id = world.reserve(D0, is_heard=False, listener=Deaf())
    link = world.links[0]
    match ends:
        case "refused":
            world.ends("d0:1", sequence_id)
        case "released":
            link.release(sequence_id)
        case "lost":
            link._break("gone")
            world.link("d0:1")
    world.reserve(D0)
    says(world, num_running=4)
    assert (link.load.num_own, link.load.num_heard) == (1, 1)
    assert num_sequences(world) == 4


async def test_a_prompt_whose_start_a_message_crossed_is_on_its_way_still() -> None:
    world = told_world()
    for num_tokens in (500, 20):
        world.reserve(D0, num_tokens=num_tokens)
    first, second = world.sequence_ids[0]
    world.links[0].start(decode_pb2.Start(sequence_id=first))
    world.passes(0.03)
    says(world)
    assert num_sent(world) == 520
    world.links[0].start(decode_pb2.Start(sequence_id=second))
    world.passes(0.03)
    says(world, num_pending_prefill_tokens=500)
    assert num_sent(world) == 20, "that of 60 ms ago has come"
    world.passes(0.25)
    says(world, num_pending_prefill_tokens=520)
    assert num_sent(world) == 0

"""What was sent to a worker since it told how it is waits there for all who ask, and once."""

import pytest

from diptych.step_model import StepCost, StepModel
from router.placement.glance import busy_workers
from router.placement.measured import first_token_s
from router.placement.placement import DecodeOnly, Why
from router.placement.query import Query
from router.placement.spare import computes_at_once
from tests.unit.router.cluster.test_roles import BOTH, soft, soft_world, worker
from tests.unit.router.cluster.world import World
from tests.unit.router.request.dispatch_world import Deaf

MODEL = StepModel(
    StepCost(0.04, num_steps=30), StepCost(0.1, prefill_token_s=0.001, num_steps=30)
).to_proto()

pytestmark = pytest.mark.usefixtures("no_sockets")


async def test_a_prompt_that_a_decode_worker_computes_waits_there_until_it_tells() -> None:
    """Whoever is placed next finds it, as on a prefill worker."""
    world = World(decode=2)
    query = Query(num_tokens=30, num_max_tokens=50)

    def num_waiting() -> list[int]:
        return [view.num_pending_tokens for view in world.cluster.snapshot().decode]

    first, other = (view.worker for view in world.cluster.snapshot().decode)
    world.reserve(first, num_tokens=900, is_started=True, listener=Deaf())
    for _ in range(3):
        placed = world.policy.place(query, world.cluster.snapshot())
        assert isinstance(placed, DecodeOnly)
        assert placed.decode == other
        world.reserve(placed.decode, num_tokens=30, is_started=True, listener=Deaf())
    assert num_waiting() == [900, 90]
    world.passes(1.0)
    world.says("d0:1", num_running=1, num_pending_prefill_tokens=700)
    assert num_waiting() == [700, 90]


async def test_one_that_says_nothing_of_its_steps_computes_no_other_at_once() -> None:
    world = World(decode=1)
    (view,) = world.cluster.snapshot().decode
    assert computes_at_once(view)
    sequence_id = world.reserve(view.worker, num_tokens=30, is_started=True, listener=Deaf())
    assert not computes_at_once(world.cluster.snapshot().decode[0])
    world.num_changes = 0
    world.draws("d0:1", sequence_id)
    assert computes_at_once(world.cluster.snapshot().decode[0])
    assert world.num_changes == 1, "a batch may have it now"


@pytest.mark.parametrize(("num_tokens", "is_at_once"), [(15, True), (25, False)])
@pytest.mark.parametrize("is_leased", [True, False], ids=["leased", "its own"])
async def test_on_a_worker_of_both_roles_it_counts_once(
    num_tokens: int, is_at_once: bool, is_leased: bool
) -> None:
    """What takes 20 ms is hardly anything."""
    world = soft_world(a=BOTH)
    soft(world, "a", BOTH, step_model=MODEL, max_batched_tokens=512)
    assert busy_workers(world.cluster.snapshot()) == set()
    if is_leased:
        world.cluster.prefill_backlog.opened(1, worker("a"), num_tokens, b"")
    else:
        world.reserve(worker("a"), num_tokens=num_tokens, is_started=True, listener=Deaf())
    snapshot = world.cluster.snapshot()
    (prefill,), (decode,) = snapshot.prefill, snapshot.decode
    assert prefill.num_pending_tokens == decode.num_pending_tokens == num_tokens
    assert computes_at_once(decode) is is_at_once
    assert busy_workers(snapshot) == {worker("a")}


async def test_what_was_measured_tells_when_the_next_is_computed() -> None:
    world = World(prefill=1, decode=1)
    world.says("p0:1", prefill_tokens_per_s=1000.0)
    world.says("d0:1", step_model=MODEL, max_batched_tokens=512, num_pending_prefill_tokens=100)
    decode = world.cluster.snapshot().decode[0].worker
    world.reserve(decode, num_tokens=400, is_started=True, listener=Deaf())
    here, asked = DecodeOnly(decode, Why.CHOICE), Query(num_tokens=250, num_max_tokens=260)
    found_s = first_token_s(here, asked, world.cluster.snapshot(), lambda query, worker: 250)
    assert found_s == pytest.approx(0.75)

"""How long a request may be, and in which blocks it is seen, while workers come and go."""

import pytest

from diptych.v1 import common_pb2, worker_pb2
from tests.unit.router.cluster.world import World, placeable, targets

pytestmark = pytest.mark.usefixtures("no_sockets")


async def test_what_the_roomiest_worker_can_run_is_not_refused_while_it_starts_again() -> None:
    world = World(decode=2)
    world.says("d1:1", max_model_len=4000)
    assert world.cluster.max_model_len == 4000
    world.watch("d1:1")._lose("a cut line")
    assert world.cluster.max_model_len == 4000, "it is lost"
    world.says("d1:1", incarnation="again", state=worker_pb2.SERVING_STATE_STARTING)
    assert world.cluster.max_model_len == 4000, "it starts"
    world.says("d1:1", incarnation="again", max_model_len=2000)
    assert world.cluster.max_model_len == 2000, "another setting"
    world.says("d1:1", incarnation="again", max_model_len=4000)
    world.cluster.set_members(targets([], ["d0:1"]))
    world.says("d0:1", max_num_seqs=5)
    assert world.cluster.max_model_len == 1000, "it was left"


@pytest.mark.parametrize("length", [0, 1])
async def test_a_worker_that_can_run_nothing_is_not_used_and_does_not_count(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a role that no other has, it would refuse whatever comes, also once it is dead."""
    world = World(decode=3)
    both = {"roles": (1, 2), "able_roles": (1, 2), "max_num_seqs": 5}
    world.says("d2:1", **both)
    assert world.cluster.max_model_len == 1000
    state = said(world, "d2:1")
    state.max_model_len = length
    world.watch("d2:1")._update(state)
    assert placeable(world) == (set(), {"d0:1", "d1:1"})
    assert world.cluster.max_model_len == 1000
    world.watch("d2:1")._lose("gone")
    assert world.cluster.max_model_len == 1000
    errors = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert errors == ["no room for a prompt and an answer: not used"]
    world.says("d2:1", **both, max_model_len=2)
    assert world.cluster.max_model_len == 2, "a short one counts"


async def test_workers_that_can_run_nothing_do_not_say_which_model_is_served() -> None:
    world = World(decode=1)
    world.cluster.set_members(targets([], ["d0:1", "d1:1", "d2:1"]))
    for address in ("d1:1", "d2:1"):
        state = said(world, "d0:1")
        state.incarnation, state.max_model_len, state.layout.model_digest = address, 0, "new"
        world.watch(address)._update(state)
    assert world.cluster.model_digest == "m"
    assert placeable(world) == (set(), {"d0:1"})


def said(world: World, address: str) -> worker_pb2.WorkerState:
    """What it said last, to be changed."""
    state, told = worker_pb2.WorkerState(), world.watch(address).state
    assert told is not None
    state.CopyFrom(told)
    return state


def says_size(world: World, address: str, size: int) -> None:
    """It is another process."""
    layout = common_pb2.KVLayout(block_size=size)
    world.says(address, incarnation=f"{address} of {size}", layout=layout)


async def test_most_workers_say_how_long_a_block_is() -> None:
    world = World(prefill=1, decode=2)
    says_size(world, "d0:1", 32)
    assert world.cluster.block_size() == 16, "one is set otherwise"
    says_size(world, "p0:1", 32)
    assert world.cluster.block_size() == 32
    world.cluster.set_members(targets(["p0:1"], ["d1:1"]))
    assert world.cluster.block_size() == 32, "one each: what is used stays"
    world.cluster.set_members(targets([], ["d1:1"]))
    assert world.cluster.block_size() == 16


async def test_a_worker_of_both_roles_has_one_voice() -> None:
    world = World(decode=2)
    layout = common_pb2.KVLayout(block_size=32)
    both = (1, 2)
    world.says("d0:1", incarnation="again", layout=layout, roles=both, able_roles=both)
    assert world.cluster.block_size() == 16


@pytest.mark.parametrize("size", [4097, 2**32 - 1])
async def test_a_block_of_no_sensible_length_is_none(size: int) -> None:
    world = World(decode=2)
    for address in world.decode:
        says_size(world, address, size)
    assert world.cluster.block_size() == 16
    says_size(world, "d0:1", 4096)
    assert world.cluster.block_size() == 4096


async def test_of_those_that_do_not_say_how_long_a_block_is_nobody_counts() -> None:
    world = World(decode=3)
    for address in world.decode:
        state = said(world, address)
        state.incarnation, state.layout.block_size = f"{address} again", 0
        world.watch(address)._update(state)
    assert world.cluster.block_size() == 16
    says_size(world, "d0:1", 32)
    assert world.cluster.block_size() == 32


async def test_a_worker_that_is_not_used_does_not_say_how_long_a_block_is() -> None:
    world = World(decode=1)
    world.cluster.set_members(targets([], ["d0:1", "d1:1", "d2:1"]))
    layout = common_pb2.KVLayout(block_size=32)
    for address in ("d1:1", "d2:1"):
        world.says(address, layout=layout, text_digest="another")
    assert world.cluster.block_size() == 16

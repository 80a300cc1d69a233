"""How long a request may be, while workers come and go."""

import pytest

from diptych.v1 import worker_pb2
from tests.unit.router.cluster.world import World, targets

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

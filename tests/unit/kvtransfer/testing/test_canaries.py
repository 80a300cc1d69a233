"""Whether a write into a block that nobody holds is seen, whenever it comes."""

from diptych.engine.scheduling.block_pool import BlockPool, Owner
from kvtransfer.memory import HostMemory
from kvtransfer.testing.canaries import Canaries

NUM_BLOCKS, BLOCK_BYTES = 4, 24


class Rig:
    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.memory = HostMemory(bytearray(NUM_BLOCKS * BLOCK_BYTES), BLOCK_BYTES)
        self.canaries = Canaries(self.pool, self.memory)
        self.canaries.look()

    def scribble(self, block_id: int) -> None:
        self.memory.block(block_id)[-1] ^= 1


def test_a_stray_write_is_seen_at_the_next_look() -> None:
    rig = Rig()
    rig.scribble(2)
    rig.canaries.look()
    rig.canaries.look()
    assert rig.canaries.num_changed == 1


def test_a_stray_write_is_seen_although_its_block_is_handed_out_before_the_next_look() -> None:
    rig = Rig()
    rig.scribble(2)
    block_ids = rig.pool.allocate(NUM_BLOCKS, Owner.RUNNING)
    assert (rig.canaries.num_checked, rig.canaries.num_changed) == (NUM_BLOCKS, 1)
    rig.pool.free(block_ids, Owner.RUNNING)
    rig.canaries.look()
    assert rig.canaries.num_changed == 1


def test_whoever_holds_a_block_may_write_it() -> None:
    rig = Rig()
    block_ids = rig.pool.allocate(2, Owner.RUNNING)
    for block_id in block_ids:
        rig.scribble(block_id)
    rig.canaries.look()
    rig.pool.free(block_ids, Owner.RUNNING)
    rig.pool.free(rig.pool.allocate(NUM_BLOCKS, Owner.RUNNING), Owner.RUNNING)
    rig.canaries.look()
    assert rig.canaries.num_changed == 0

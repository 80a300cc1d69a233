"""Whether the pool's books agree with those who own its blocks. Pure."""

from collections.abc import Collection

from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.scheduler import Scheduler

_QUARANTINED = len(Owner)  # above every owner


def pool_mismatch(
    pool: BlockPool, scheduler: Scheduler, quarantined: Collection[int] = ()
) -> str | None:
    """What is wrong, with the numbers; None if each block is where its owner says.

    ``quarantined`` blocks are held by unfinished reads. May be asked at any time between
    two calls of the scheduler. O(held blocks).
    """
    counts = pool.counts()
    if sum(counts[1:]) != counts.total:
        return f"the blocks do not sum to {counts.total}: {_text(counts._asdict())}"
    highest: dict[int, int] = {}
    for seq, owner in scheduler.holders():
        for block_id in seq.block_table:
            if highest.get(block_id, -1) < owner:
                highest[block_id] = owner
    highest.update(dict.fromkeys(quarantined, _QUARANTINED))
    expected = [0] * (_QUARANTINED + 1)
    for place in highest.values():
        expected[place] += 1
    found = [counts.running, counts.reserved, counts.leased, counts.quarantined]
    if found != expected:
        return f"the pool holds {_named(found)}; its owners hold {_named(expected)}"
    return None


def _named(held: list[int]) -> str:
    return _text(dict(zip(("running", "reserved", "leased", "quarantined"), held, strict=True)))


def _text(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())

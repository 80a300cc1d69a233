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
            highest[block_id] = max(highest.get(block_id, 0), owner)
    highest.update(dict.fromkeys(quarantined, _QUARANTINED))
    owned = list(highest.values())
    found = {name: getattr(counts, name) for name in _CLASSES}
    expected = {name: owned.count(place) for name, place in _CLASSES.items()}
    if found != expected:
        return f"the pool holds {_text(found)}; its owners hold {_text(expected)}"
    return None


_CLASSES = {
    "running": int(Owner.RUNNING),
    "reserved": int(Owner.RESERVED),
    "leased": int(Owner.LEASED),
    "quarantined": _QUARANTINED,
}


def _text(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())

"""Workers that tell placement what their prefix caches hold."""

from collections.abc import Sequence

from diptych.block_hash import BlockKey
from diptych.cache_change import CacheChange, fold
from router.placement.policy import Policy
from router.placement.views import WorkerId


def whole(keys: Sequence[BlockKey], seq: int = 0) -> CacheChange:
    """These, and nothing else."""
    return CacheChange(0, seq, (), tuple(keys), len(keys), fold(keys), is_reset=True)


def holds(policy: Policy, worker: WorkerId, keys: Sequence[BlockKey]) -> None:
    """The worker tells that its cache has these, and nothing else."""
    assert policy.cache.told(worker.incarnation, whole(keys))

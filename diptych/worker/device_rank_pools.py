"""The pools of ranks on devices as one, of whole blocks."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from diptych.worker.device_pool import DevicePool
from kvtransfer.memory import HostMemory
from kvtransfer.rank_pools import RankPools


class DeviceRankPools(RankPools):
    """Those of ranks on devices, each on its own. Implements ``DeviceCopies``: whole blocks are
    staged."""

    parts: tuple[DevicePool, ...]

    def __init__(self, parts: Sequence[DevicePool], stretch_bytes: int) -> None:
        super().__init__(parts, stretch_bytes)

    def new_staging(self, num_blocks: int) -> HostMemory:
        """What one device reaches, all do."""
        return self.parts[0].new_staging(num_blocks, self.block_bytes)

    def copy_out(
        self,
        block_ids: Sequence[int],
        staging: HostMemory,
        slots: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        return _all_over(
            partial(pool.copy_out, block_ids, staging, slots, num_bytes, share)
            for pool, share in zip(self.parts, self.shares, strict=True)
        )

    def copy_in(
        self,
        staging: HostMemory,
        slots: Sequence[int],
        block_ids: Sequence[int],
        num_bytes: int | None = None,
    ) -> Callable[[], bool]:
        return _all_over(
            partial(pool.copy_in, staging, slots, block_ids, num_bytes, share)
            for pool, share in zip(self.parts, self.shares, strict=True)
        )


def _all_over(copies: Iterable[Callable[[], Callable[[], bool]]]) -> Callable[[], bool]:
    """Begin them; whether all are over. Raises what one does, once no other is under way."""
    at_work, wrong = list[Callable[[], bool]](), list[Exception]()
    for begin in copies:
        try:
            at_work.append(begin())
        except Exception as error:  # noqa: BLE001 - raised once nothing is written any more
            wrong.append(error)
            break

    def are_over() -> bool:
        for is_over in list(at_work):
            try:
                if is_over():
                    at_work.remove(is_over)
            except Exception as error:  # noqa: BLE001 - likewise
                at_work.remove(is_over)
                wrong.append(error)
        if not at_work and wrong:
            raise wrong[0]
        return not at_work

    return are_over

"""The scheduler's machine notices whoever forgets the holes in pulled blocks."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from diptych.block_needs import BlockNeeds, GroupExtent
from diptych.engine.scheduling.block_pool import BlockPool
from tests.unit.engine.scheduling.mutations import Patch, noticed
from tests.unit.engine.scheduling.test_scheduler_machine import SchedulerMachine


def hit_blocks_whatever_they_hold(patch: pytest.MonkeyPatch) -> None:
    insert = BlockPool.insert
    patch.setattr(BlockPool, "insert", lambda self, *named: insert(self, *named[:3]))


def see_one_token_less(patch: pytest.MonkeyPatch) -> None:
    original = BlockNeeds.__init__

    def short(self: BlockNeeds, block_size: int, groups: Sequence[GroupExtent]) -> None:
        shorter = [
            group._replace(window=group.window and max(1, group.window - 1)) for group in groups
        ]
        original(self, block_size, shorter)

    patch.setattr(BlockNeeds, "__init__", short)


def ship_what_the_next_token_alone_needs(patch: pytest.MonkeyPatch) -> None:
    """Not what the last block's own do, which may be computed again."""
    original = BlockNeeds.num_groups_of

    def few(self: BlockNeeds, block_index: int, last_block: int) -> int:
        return original(self, block_index, last_block + 1)

    patch.setattr(BlockNeeds, "num_groups_of", few)


class ShortWindow(SchedulerMachine):
    """Most of what is pulled has holes."""

    block_sizes, pool_sizes, min_longest = st.just(2), st.just(12), 16

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        return [None, 4]


@pytest.mark.parametrize(
    "patch",
    [
        hit_blocks_whatever_they_hold,
        see_one_token_less,
        ship_what_the_next_token_alone_needs,
    ],
    ids=lambda patch: str(patch.__name__),
)
def test_the_mutation_is_found(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    noticed(ShortWindow)

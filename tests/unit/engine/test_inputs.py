"""A plan laid out as tensors: rows, slots and tables."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.engine.inputs import build_inputs
from diptych.engine.scheduling.step import Chunk, StepPlan


def chunk(start: int, count: int, table: Sequence[int]) -> Chunk:
    return Chunk(
        token_ids=tuple(range(100 + start, 100 + start + count)),
        start=start,
        block_table=table,
        sample=None,
    )


def test_single_tokens_come_first() -> None:
    plan = StepPlan(chunks=(chunk(2, 3, (7, 3)), chunk(5, 1, (9, 1, 8)), chunk(0, 1, (6,))))
    inputs = build_inputs(plan, block_size=4)
    assert inputs.token_ids.tolist() == [105, 100, 102, 103, 104]
    assert inputs.positions.tolist() == [5, 0, 2, 3, 4]
    assert inputs.slots.tolist() == [1 * 4 + 1, 6 * 4, 7 * 4 + 2, 7 * 4 + 3, 3 * 4]
    assert inputs.last_rows.tolist() == [4, 0, 1]
    assert inputs.num_decodes == 2
    assert inputs.decodes is not None
    assert inputs.decodes.context_lens.tolist() == [6, 1]
    # Block 8 holds nothing yet, and the short row is padded with its own.
    assert inputs.decodes.block_tables.tolist() == [[9, 1], [6, 6]]
    (prefill,) = inputs.prefills
    assert (prefill.begin, prefill.num_tokens, prefill.start, prefill.end) == (2, 3, 2, 5)
    assert prefill.block_ids.tolist() == [7, 3]


def test_only_prefill_or_only_decode() -> None:
    prefill = build_inputs(StepPlan(chunks=(chunk(0, 4, (2,)),)), block_size=4)
    assert prefill.decodes is None
    assert prefill.num_decodes == 0
    decode = build_inputs(StepPlan(chunks=(chunk(3, 1, (2,)),)), block_size=4)
    assert decode.prefills == ()


class CountedTable(array):  # type: ignore[type-arg] # not subscriptable at run time
    """A table that counts the ids which are taken from it one by one."""

    num_taken = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).num_taken += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        for index in range(len(self)):
            yield self[index]


def test_the_ids_of_packed_tables_are_not_taken_one_by_one() -> None:
    tables = [CountedTable("q", range(n, n + 512)) for n in range(8)]
    chunks = [chunk(511 * 16, 1, table) for table in tables[:4]]
    chunks += [chunk(500 * 16, 40, table) for table in tables[4:]]
    inputs = build_inputs(StepPlan(chunks=tuple(chunks)), block_size=16)
    assert CountedTable.num_taken == 0
    assert inputs.decodes is not None
    assert inputs.decodes.block_tables[3].tolist() == list(range(3, 515))
    assert inputs.prefills[0].block_ids.tolist() == list(range(4, 4 + 503))


@pytest.mark.parametrize("bad", [(), (chunk(0, 0, (1,)),), (chunk(0, 5, (1,)),)])
def test_malformed_plans(bad: tuple[Chunk, ...]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        build_inputs(StepPlan(chunks=bad), block_size=4)

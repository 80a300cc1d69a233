"""A plan laid out as tensors: rows, slots and tables."""

import pytest

from diptych.engine.inputs import build_inputs
from diptych.engine.scheduling.step import Chunk, StepPlan


def chunk(start: int, count: int, table: tuple[int, ...]) -> Chunk:
    return Chunk(
        token_ids=tuple(range(100 + start, 100 + start + count)),
        start=start,
        block_table=table,
        sample=None,
    )


def test_single_tokens_come_first() -> None:
    plan = StepPlan(
        chunks=(chunk(2, 3, (7, 3)), chunk(5, 1, (9, 1, 8)), chunk(0, 1, (6,))), sequences=()
    )
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
    prefill = build_inputs(StepPlan(chunks=(chunk(0, 4, (2,)),), sequences=()), block_size=4)
    assert prefill.decodes is None
    assert prefill.num_decodes == 0
    decode = build_inputs(StepPlan(chunks=(chunk(3, 1, (2,)),), sequences=()), block_size=4)
    assert decode.prefills == ()


@pytest.mark.parametrize("bad", [(), (chunk(0, 0, (1,)),), (chunk(0, 5, (1,)),)])
def test_malformed_plans(bad: tuple[Chunk, ...]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        build_inputs(StepPlan(chunks=bad, sequences=()), block_size=4)

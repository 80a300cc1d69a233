"""The step by which memory is measured has all that the limits allow."""

import pytest

from diptych.engine.scheduling.largest_step import largest_step


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "max_len", "lengths"),
    [
        (512, 4, 10_000, [509, 1, 1, 1]),
        (512, 1, 512, [512]),
        (100, 4, 40, [40, 40, 19, 1]),
        (8, 8, 40, [1] * 8),
        (1000, 3, 40, [40, 40, 40]),
    ],
)
def test_tokens_and_sequences(
    max_tokens: int, max_seqs: int, max_len: int, lengths: list[int]
) -> None:
    plan = largest_step(
        max_batched_tokens=max_tokens, max_num_seqs=max_seqs, max_model_len=max_len, block_size=16
    )
    assert [len(chunk.token_ids) for chunk in plan.chunks] == lengths
    for chunk in plan.chunks:
        assert chunk.end == max_len
        assert len(chunk.block_table) == -(-max_len // 16)
        assert set(chunk.block_table) == {0}
        assert chunk.sample is not None

"""Which likeliest tokens a row is told of."""

import pytest
import torch

from diptych.engine.sampling.raw_logprobs import logprobs_of

VOCAB = 4096


def coarse(num_rows: int) -> torch.Tensor:
    """As of a head in bfloat16: many logits are equal."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, VOCAB, generator=generator).bfloat16().float()


@pytest.mark.parametrize("num_top", [1, 2, 5])
def test_a_row_is_told_the_same_whoever_is_beside_it(num_top: int) -> None:
    logits = coarse(40)
    for row in range(0, 40, 2):
        alone = logprobs_of(logits[row : row + 1], [7], [num_top])
        beside = logprobs_of(logits[row : row + 2], [7, 7], [num_top, 20])
        assert alone[0] == beside[0]
        assert len(beside[1].top_token_ids) == 20


@pytest.mark.parametrize("num_top", [1, 3])
def test_of_equal_ones_the_first_are_told(num_top: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9:16] = 1.0
    (told,) = logprobs_of(logits, [0], [num_top])
    assert told.top_token_ids == tuple(range(9, 9 + num_top))


def test_who_asks_for_none_is_told_its_own() -> None:
    (told,) = logprobs_of(torch.zeros(1, 4), [2], [0])
    assert told.top_token_ids == ()
    assert told.logprob == pytest.approx(-1.3862944)

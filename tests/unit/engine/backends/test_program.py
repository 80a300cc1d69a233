"""A program does what its calls do one by one, however many threads there are."""

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu.kernels.loop import Call
from diptych.engine.backends.cpu.kernels.program import Program
from diptych.engine.backends.cpu.layer_ops import WrittenLayerOps
from diptych.engine.backends.cpu.workspace import Workspace
from tests.attention_config import config_of

CONFIG = config_of(4, 2, 16, window=None)
SIZE = 48


def written() -> WrittenLayerOps:
    return WrittenLayerOps(CONFIG, Workspace(1))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def chain(num_rows: int, length: int) -> tuple[list[Call], Tensor]:
    """Calls of which each needs all rows of what the one before left, and their result."""
    columns = random(SIZE, num_rows)  # norms of columns mix rows
    rows = columns.t().contiguous()
    weights = random(num_rows).abs(), random(SIZE).abs()
    ops, nothing = written(), torch.empty(0)
    for _ in range(length):
        ops.norm(columns, weights[0], columns)
        ops.add_norm(rows, columns.view(num_rows, SIZE), None, weights[1], rows)
        ops.add_norm(columns, rows.view(SIZE, num_rows), None, None, nothing)
    return ops.calls, columns


def norm(x: Tensor, weight: Tensor, out: Tensor) -> Call:
    ops = written()
    ops.norm(x, weight, out)
    return ops.calls[0]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 16, 700])
def test_calls_in_order(num_threads: int, num_rows: int) -> None:
    """Again and again, and with more threads than cores."""
    calls, wanted = chain(num_rows, 15)
    others, got = chain(num_rows, 15)
    program = Program(others)
    for _ in range(3):
        for call in calls:
            call.run(1)
        program.run(num_threads)
        assert got.isfinite().all()
        assert torch.equal(got, wanted)


def test_calls_get_other_arguments() -> None:
    x, y = random(6, SIZE), random(6, SIZE)
    weight, out = torch.ones(SIZE), torch.zeros(3, 6, SIZE)
    program = Program([norm(x, weight, each) for each in out])
    rows_per_item = norm(x, weight, out[0]).arguments[0]
    assert isinstance(rows_per_item, int)
    changed = [-(-4 // rows_per_item), rows_per_item, 4, SIZE, y.data_ptr()]
    program.update(np.array([0, 2]), changed)
    program.run(2)
    want = torch.empty(6, SIZE)
    for source, target, num_rows in ((x, out[1], 6), (y, out[0], 4), (y, out[2], 4)):
        norm(source, weight, want).run(1)
        assert torch.equal(target[:num_rows], want[:num_rows])
        assert not target[num_rows:].any()


def test_what_it_works_on_stays() -> None:
    """Nobody else holds the tensors."""
    calls, wanted = chain(16, 1)
    program = Program(chain(16, 1)[0])
    result = program.calls[-1].arguments[3]
    del calls[:]
    program.run(1)
    assert isinstance(result, Tensor)
    assert result.shape == wanted.shape


def test_shares_of_the_time() -> None:
    calls = chain(16, 5)[0]
    large = random(100_000, SIZE)
    program = Program([*calls, norm(large, torch.ones(SIZE), torch.empty_like(large)), *calls])
    program.run(1)
    assert program.shares.sum() == pytest.approx(1)
    assert program.shares.argmax() == len(calls)

"""Decode attention, compiled and gathered, against float64 on what the cache holds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cpu.paged_decode import PagedDecode
from diptych.engine.backends.torch.attention import DecodeAttention
from diptych.engine.backends.torch.gather_decode import GatherDecode
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.inputs import DecodeBatch
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from tests.attention_config import SCALE, config_of
from tests.torch_threads import torch_threads

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
LENGTHS = [1, 7, 8, 128, 129, 300]
WINDOW = 150
UNIT = 2.0**-24  # largest relative error of one rounding in float32
EXP_ERROR = 3e-7  # of a weight, relative
CHANCE = 0.1  # roundings rarely add up; 0.03 of what they can was the most seen
SHAPES = [  # query heads, key-value heads, head_dim; block size
    ((9, 3, 64), 16),
    ((4, 1, 80), 50),
    ((14, 2, 16), 1),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def attended(decode: DecodeAttention, layer: int, q: Tensor) -> Tensor:
    out = torch.full_like(q, torch.nan)
    decode(layer, q, out)
    return out


class Filled:
    """A cache that holds sequences of all LENGTHS and, beside them, what spoils a result."""

    def __init__(
        self, config: ModelConfig, block_size: int, dtype: torch.dtype, spread: float = 1.0
    ) -> None:
        """spread: of the keys; values are as far apart as normal numbers."""
        torch.manual_seed(1)
        self.config = config
        columns = -(-max(LENGTHS) // block_size)
        self.cache = KVCache(config, len(LENGTHS) * columns, block_size, dtype)
        self.cache.tensor.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every type
        self.access = KVAccess(config, self.cache, torch.float32)
        order = torch.randperm(self.cache.num_blocks)
        self.batch = DecodeBatch(order.view(len(LENGTHS), columns), torch.tensor(LENGTHS))
        for length, table in zip(LENGTHS, self.batch.block_tables, strict=True):
            positions = torch.arange(length)
            slots = table[positions // block_size] * block_size + positions % block_size
            for layer in range(2):
                kv = torch.randn(length, 2, config.num_kv_heads, config.head_dim)
                kv[:, 0] *= spread
                self.access.write(layer, self.access.slot_rows(slots), kv)

    def contexts(self, layer: int) -> Iterator[Tensor]:
        """Of each row: [2, num_heads, n, head_dim] float64."""
        window = self.config.layers[layer].sliding_window
        group = self.config.num_heads // self.config.num_kv_heads
        for end, table in zip(LENGTHS, self.batch.block_tables, strict=True):
            begin = 0 if window is None else max(0, end - window)
            context = self.access.read(layer, self.access.block_rows(table))[:, :, begin:end]
            yield context.double().repeat_interleave(group, 1)

    def expected(self, layer: int, q: Tensor) -> Tensor:
        rows = []
        for row, (keys, values) in zip(q.double(), self.contexts(layer), strict=True):
            weights = torch.softmax(torch.einsum("hd,hnd->hn", row, keys) * SCALE, -1)
            rows.append(torch.einsum("hn,hnd->hd", weights, values))
        return torch.stack(rows)

    def rounding(self, layer: int, q: Tensor) -> Tensor:
        """How far float32 may be off: [num_rows, num_heads, 1].

        A score is a sum of head_dim products over at least four lanes; its absolute error
        is its weight's relative one. Errors of weights count twice, in sum and total.
        """
        bounds = []
        depth = self.config.head_dim / 4 + 4
        for row, (keys, values) in zip(q.double(), self.contexts(layer), strict=True):
            sizes = torch.einsum("hd,hnd->hn", row.abs(), keys.abs()).amax(-1) * SCALE
            of_weight = (depth + 2) * UNIT * sizes + EXP_ERROR
            of_sum = (keys.shape[1] + 4) * UNIT
            bounds.append(CHANCE * (2 * of_weight + of_sum) * values.abs().amax((1, 2)))
        return torch.stack(bounds)[:, :, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "block_size"), SHAPES, ids=str)
def test_equals_float64(shape: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    """Within 1e-5 where scores are of the order of 1; else within what float32 allows.

    With keys and queries spread threefold, scores reach 100, whose float32 neighbours
    are 8e-6 away: no order of summing is sure to be within 1e-5.
    """
    for spread in (1.0, 3.0):
        filled = Filled(config_of(*shape, window=WINDOW), block_size, dtype, spread)
        decodes = (
            PagedDecode(filled.config, filled.cache, filled.batch),
            GatherDecode(filled.config, filled.access, filled.batch),
        )
        for layer in range(2):
            q = torch.randn(len(LENGTHS), shape[0], shape[2]) * spread
            want = filled.expected(layer, q)
            bound = torch.tensor(1e-5) if spread == 1 else filled.rounding(layer, q)
            for decode in decodes:
                error = (attended(decode, layer, q).double() - want).abs()
                assert (error <= bound).all(), (spread, float(error.max()))


def test_gathered_scores_are_not_rounded_to_bfloat16() -> None:
    """Weights and results are, once each; a score of 100 would be off by a quarter."""
    filled = Filled(config_of(6, 2, 32, window=40), 8, torch.bfloat16, spread=3.0)
    access = KVAccess(filled.config, filled.cache, torch.bfloat16)
    decode = GatherDecode(filled.config, access, filled.batch)
    for layer in range(2):
        q = (torch.randn(len(LENGTHS), 6, 32) * 3).bfloat16()
        error = (attended(decode, layer, q).double() - filled.expected(layer, q)).abs()
        largest = torch.stack([values.abs().max() for _, values in filled.contexts(layer)])
        assert (error.flatten(1).amax(1) <= largest * 2**-8).all()


@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_flat_and_peaked_weights(spread: float) -> None:
    filled = Filled(config_of(6, 2, 16, window=40), 8, torch.float32)
    decode = PagedDecode(filled.config, filled.cache, filled.batch)
    for layer in range(2):
        q = torch.randn(len(LENGTHS), 6, 16) * spread
        error = (attended(decode, layer, q).double() - filled.expected(layer, q)).abs().max()
        assert error <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    filled = Filled(config_of(4, 1, 32, window=WINDOW), 16, dtype)
    q = torch.randn(len(LENGTHS), 4, 32)
    together = attended(PagedDecode(filled.config, filled.cache, filled.batch), 0, q)
    with torch_threads(2):
        decode = PagedDecode(filled.config, filled.cache, filled.batch)
        assert torch.equal(attended(decode, 0, q), together)
    for row, length in enumerate(LENGTHS):
        table = filled.batch.block_tables[row : row + 1]
        batch = DecodeBatch(table, torch.tensor([length]))
        alone = attended(PagedDecode(filled.config, filled.cache, batch), 0, q[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_is_not_a_number_spoils_its_row_only(dtype: torch.dtype) -> None:
    filled = Filled(config_of(4, 1, 32, window=WINDOW), 16, dtype)
    slot = filled.batch.block_tables[3, 0] * 16 + torch.tensor([5])
    kv = torch.full((1, 2, 1, 32), torch.nan)
    filled.access.write(0, filled.access.slot_rows(slot), kv)
    decode = PagedDecode(filled.config, filled.cache, filled.batch)
    out = attended(decode, 0, torch.randn(6, 4, 32))
    assert out.isfinite().flatten(1).all(1).tolist() == [True, True, True, False, True, True]

"""Decode attention, compiled and gathered, against float64 on what the cache holds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from diptych.engine.gather_decode import GatherDecode
from diptych.engine.inputs import DecodeBatch
from diptych.engine.kv_access import KVAccess
from diptych.engine.kv_cache import KVCache
from diptych.engine.model_config import Activation, LayerConfig, ModelConfig, RopeConfig
from diptych.engine.paged_decode import PagedDecode

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
LENGTHS = [1, 7, 8, 128, 129, 300]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def config_of(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> ModelConfig:
    rope = RopeConfig(theta=10000.0)
    return ModelConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=1024,
        rms_norm_eps=1e-5,
        activation=Activation.SILU,
        tied_embeddings=True,
        embedding_scale=1.0,
        attention_scale=0.3,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norm_offset=0.0,
        post_norms=False,
        logit_softcap=None,
        layers=(LayerConfig(rope, None), LayerConfig(rope, window)),
        checkpoint_dtype="float32",
    )


class Filled:
    """A cache that holds sequences of all LENGTHS and, beside them, what spoils a result."""

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype) -> None:
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
                self.access.write(layer, self.access.slot_rows(slots), kv)

    def expected(self, layer: int, q: Tensor) -> Tensor:
        rows = []
        window = self.config.layers[layer].sliding_window
        for row, (end, table) in enumerate(zip(LENGTHS, self.batch.block_tables, strict=True)):
            begin = 0 if window is None else max(0, end - window)
            context = self.access.read(layer, self.access.block_rows(table))[:, :, begin:end]
            group = self.config.num_heads // self.config.num_kv_heads
            keys, values = context.double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,hnd->hn", q[row].double(), keys)
            weights = torch.softmax(scores * self.config.attention_scale, -1)
            rows.append(torch.einsum("hn,hnd->hd", weights, values))
        return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 50])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 1, 80), (14, 2, 16)], ids=str)
def test_equals_float64(
    shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, num_threads: int
) -> None:
    filled = Filled(config_of(*shape, window=150), block_size, dtype)
    decodes = (
        PagedDecode(filled.config, filled.cache, filled.batch),
        GatherDecode(filled.config, filled.access, filled.batch),
    )
    for layer in range(2):
        q = torch.randn(len(LENGTHS), shape[0], shape[2])
        for decode in decodes:
            torch.testing.assert_close(
                decode(layer, q).double(), filled.expected(layer, q), atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    filled = Filled(config_of(4, 1, 32, window=150), 16, dtype)
    q = torch.randn(len(LENGTHS), 4, 32)
    together = PagedDecode(filled.config, filled.cache, filled.batch)(0, q)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        for row, length in enumerate(LENGTHS):
            table = filled.batch.block_tables[row : row + 1]
            batch = DecodeBatch(table, torch.tensor([length]))
            alone = PagedDecode(filled.config, filled.cache, batch)(0, q[row : row + 1])
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(before)

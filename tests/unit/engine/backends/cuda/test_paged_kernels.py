"""Attention by interpreted kernels against its definition, on caches whose other slots are NaN."""

from tests import triton_interpreter  # noqa: F401

# isort: split
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.backends.cuda.attention import PagedAttention, num_parts
from diptych.engine.backends.cuda.query_tiles import TileShape
from diptych.engine.backends.torch.attention import TorchAttention
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.inputs import DecodeBatch
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import HostKVMemory
from diptych.engine.model.parts import Rows
from tests.attention_config import config_of
from tests.unit.engine.backends.cuda.paged_step import Asked, Case

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

FEW, MANY = 1, 200  # processors: contexts whole, and in as many parts as they have tiles
TILE = TileShape(128, 64, 32)

SINGLE = [Asked(end - 1, 1) for end in (1, 16, 17, 32, 33, 63, 64, 65, 128, 129, 200)]
CHUNKS = [Asked(0, 2), Asked(1, 130), Asked(63, 65), Asked(40, 1)]
SHAPES = [  # query heads, key-value heads, head_dim; block size; window
    ((2, 2, 64), 16, None),
    ((4, 1, 128), 32, None),
    ((8, 1, 128), 128, 65),
    ((4, 1, 256), 64, 40),
    ((8, 1, 256), 16, 1),
    ((3, 1, 80), 50, 130),
    ((4, 1, 16), 1, 16),
]
# Enough where scores are taken otherwise: without a window, with one as long as chunks and one of a
# single token; blocks of which tiles have several, and such as do not fit into tiles.
ALSO_CHUNKS = [((2, 2, 64), 16, None), ((3, 1, 80), 50, 130), ((8, 1, 256), 16, 1)]


def attended(
    case: Case,
    layer: int,
    num_processors: int,
    rows: Rows | None = None,
    tile_shape: TileShape = TILE,
) -> Tensor:
    """Writes what the step has, then attends."""
    attention = PagedAttention(case.config, case.cache, num_processors, tile_shape)
    out = torch.full_like(case.q, torch.nan)
    attention.begin_step(case.inputs)(layer, case.q, case.kv, out, rows)
    return out


def assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).abs()
    assert bool((error < 2e-5).all()), f"off by {error.max()}, or not a number"


@pytest.mark.parametrize(("shape", "block_size", "window"), SHAPES, ids=str)
@pytest.mark.parametrize("num_processors", [FEW, MANY])
def test_single_tokens(
    shape: tuple[int, int, int], block_size: int, window: int | None, num_processors: int
) -> None:
    case = Case.of(config_of(*shape, window), SINGLE, block_size)
    got = attended(case, 1, num_processors)  # the layer with the window
    assert_close(got, case.expected(1))


@pytest.mark.parametrize(("shape", "block_size", "window"), SHAPES, ids=str)
def test_chunks_with_and_without_a_prefix(
    shape: tuple[int, int, int], block_size: int, window: int | None
) -> None:
    case = Case.of(config_of(*shape, window), CHUNKS, block_size)
    got = attended(case, 1, FEW)
    assert_close(got, case.expected(1))


# Of tiles of 16: from a tile's first row and its last, with keys that all of its rows see and
# without, up to a tile's last key and one more.
AT_TILES = [Asked(0, 16), Asked(15, 2), Asked(16, 33), Asked(30, 17), Asked(63, 18), Asked(90, 9)]


@pytest.mark.parametrize("window", [None, 1, 16, 17, 50])
@pytest.mark.parametrize("block_size", [8, 18, 64])
def test_chunks_at_the_edges_of_tiles(block_size: int, window: int | None) -> None:
    """Keys that all queries see, those at their own places and those where windows begin."""
    case = Case.of(config_of(1, 1, 16, window), AT_TILES, block_size)
    assert_close(attended(case, 1, FEW, tile_shape=TileShape(16, 16, 16)), case.expected(1))


@pytest.mark.parametrize("block_size", [32, 50])
@pytest.mark.parametrize("window", [None, 140, 300])
@pytest.mark.parametrize("shape", [TileShape(128, 128, 64), TileShape(64, 32, 32)], ids=str)
def test_chunks_in_tiles_as_devices_have_them(
    shape: TileShape, window: int | None, block_size: int
) -> None:
    config = config_of(1, 1, 32, window)
    case = Case.of(config, [Asked(310, 150), Asked(127, 130), Asked(383, 3)], block_size)
    assert_close(attended(case, 1, FEW, tile_shape=shape), case.expected(1))


@pytest.mark.parametrize("block_size", [8, 18])
def test_a_chunk_reads_no_key_that_none_of_its_rows_sees(block_size: int) -> None:
    """Neither of a tile where the first row's window begins, nor of one where the last row is."""
    case = Case.of(config_of(1, 1, 16, 20), [Asked(70, 30)], block_size)
    slots = torch.arange(51)  # the first row sees from there on
    blocks = case.cache.of_layer(1)
    blocks[case.tables[0][slots // block_size], :, :, slots % block_size] = torch.nan
    assert_close(attended(case, 1, FEW, tile_shape=TileShape(16, 16, 16)), case.expected(1))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("window", [None, 40])
def test_a_query_of_a_chunk_that_is_not_a_number_spoils_its_row_alone(window: int | None) -> None:
    case = Case.of(config_of(1, 1, 16, window), [Asked(70, 30)], 16)
    case.q[5] = torch.nan
    finite = attended(case, 1, FEW, tile_shape=TileShape(16, 16, 16)).isfinite().flatten(1).all(1)
    assert finite.logical_not().nonzero().tolist() == [[5]]


@pytest.mark.parametrize(("shape", "block_size", "window"), SHAPES, ids=str)
def test_soft_caps_of_scores(
    shape: tuple[int, int, int], block_size: int, window: int | None
) -> None:
    """Single tokens and chunks, against the definition and beside the CPU's plain backend."""
    config = config_of(*shape, window, score_softcap=1.5)
    has_chunks = (shape, block_size, window) in ALSO_CHUNKS
    case = Case.of(config, [*SINGLE, *CHUNKS] if has_chunks else SINGLE, block_size)
    assert_close(attended(case, 1, MANY), case.expected(1))
    plain = torch.full_like(case.q, torch.nan)
    attention = TorchAttention(config, case.cache, torch.float32)
    attention.begin_step(case.inputs)(1, case.q, case.kv, plain)
    assert_close(plain, case.expected(1))
    if window != 1:  # a single token has all of the weight, whatever its score
        uncapped = replace(case, config=replace(config, score_softcap=None))
        assert float((case.expected(1) - uncapped.expected(1)).abs().max()) > 0.1


def test_writes_its_own_slots_alone() -> None:
    case = Case.of(config_of(4, 2, 64, None), CHUNKS, 16)
    before, blocks = case.cache.tensor.clone(), case.cache.of_layer(1)
    attended(case, 1, FEW)
    slots = case.inputs.slots // 16, slice(None), slice(None), case.inputs.slots % 16
    assert torch.equal(blocks[slots], case.kv)
    blocks[slots] = before[:, 1][slots]
    assert torch.equal(case.cache.tensor.view(torch.int32), before.view(torch.int32))


def test_a_cache_of_other_floats_than_the_model() -> None:
    case = Case.of(config_of(4, 2, 64, 40), [Asked(33, 40), Asked(70, 1)], 16, torch.bfloat16)
    got = attended(case, 1, MANY)
    assert_close(got, case.expected(1))
    written = case.context(1, case.tables[0])[70]
    # The interpreter cuts off what a device rounds.
    torch.testing.assert_close(written, case.kv[0].double(), rtol=2**-7, atol=0)


def test_rows_that_nobody_asks_for_are_left_out() -> None:
    """As the last layer has it: each chunk's last row, of tiles that hold one."""
    case = Case.of(config_of(2, 1, 64, None), [Asked(5, 1), Asked(0, 140), Asked(9, 14)], 16)
    got = attended(case, 0, FEW, np.array([0, 140]))
    assert_close(got[[0, 140]], case.expected(0)[[0, 140]])
    assert bool(got[1:129].isnan().all())  # the first tile has 128 rows
    assert bool(got[141:].isnan().all())
    assert bool(attended(case, 0, FEW, np.array([0]))[1:].isnan().all())


def test_a_padded_table_and_a_row_without_tokens() -> None:
    """What lies behind a row's own blocks is never looked at, not even for its place."""
    case = Case.of(config_of(4, 2, 64, 20), [Asked(0, 1), Asked(17, 1), Asked(130, 1)], 16)
    want = [attended(case, layer, MANY) for layer in range(2)]
    batch = case.inputs.decodes
    assert batch is not None
    num_used = torch.tensor([1, 2, 9, 0])[:, None]
    tables = torch.cat((batch.block_tables, batch.block_tables[:1]))
    tables = torch.cat((tables, tables), 1)
    tables[torch.arange(tables.shape[1]) >= num_used] = 2**40
    lens = torch.cat((batch.context_lens, torch.tensor([0])))
    slots = torch.cat((case.inputs.slots, case.inputs.slots[:1]))
    inputs = replace(case.inputs, decodes=DecodeBatch(tables, lens), slots=slots)
    padded = replace(case, inputs=inputs, q=case.q[[0, 1, 2, 0]], kv=case.kv[[0, 1, 2, 0]])
    for layer in range(2):
        got = attended(padded, layer, MANY)
        assert_close(got[:3], want[layer].double())
        assert bool((got[3] == 0).all())


def test_a_key_that_is_not_a_number_spoils_its_row_alone() -> None:
    case = Case.of(config_of(4, 2, 64, None), [Asked(20, 1), Asked(150, 1), Asked(300, 1)], 16)
    case.cache.of_layer(0)[case.tables[1][2], 0, :, 5] = torch.nan
    for num_processors in (FEW, MANY):
        finite = attended(case, 0, num_processors).isfinite().flatten(1).all(1)
        assert finite.tolist() == [True, False, True]


def test_scores_of_any_size() -> None:
    """Softmax of scores of thousands takes the largest, and does not overflow."""
    case = Case.of(config_of(2, 1, 16, None), [Asked(200, 1), Asked(0, 70)], 16)
    case.q.mul_(1e3)
    got = attended(case, 0, MANY)
    torch.testing.assert_close(got.double(), case.expected(0), rtol=0, atol=1e-2)


class _Sparse(HostKVMemory):
    """Memory of any size, of which only what is touched exists."""

    def __init__(self, num_bytes: int, path: Path) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


def test_blocks_beyond_what_32_bits_can_count(tmp_path: Path) -> None:
    """The last blocks of a pool of 2**31 elements and some more: 4 GiB, mostly holes."""
    config, block_size = config_of(2, 1, 64, None), 16
    num_blocks = 2**31 // (2 * 2 * 64 * block_size) + 100
    cache = KVCache(
        config,
        num_blocks,
        block_size,
        torch.bfloat16,
        lambda num_bytes: _Sparse(num_bytes, tmp_path / "pool"),
    )
    asked = [Asked(70, 1), Asked(10, 40)]
    case = Case.of(config, asked, block_size, cache=cache)
    assert all(int(table.min()) * cache.tensor.stride(0) > 2**31 for table in case.tables)
    got = attended(case, 1, MANY)
    assert_close(got, case.expected(1))


def test_parts_keep_the_device_busy_and_are_never_empty() -> None:
    assert num_parts(8, 10_000, 64, 132) == 32
    assert num_parts(8, 100, 64, 132) == 2
    assert num_parts(1, 10**6, 64, 132) == 64
    assert num_parts(4096, 10**6, 64, 132) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_caches_of_one_byte_an_element(window: int | None, dtype: torch.dtype) -> None:
    """Written and read as the CPU's plain backend does it, to the bit but for sums."""
    config = config_of(4, 2, 80, window)
    case = Case.of(config, [Asked(70, 1), Asked(5, 1), Asked(33, 40), Asked(0, 70)], 18)
    filled = case.cache.tensor.clone().nan_to_num(9.0)  # garbage where nobody wrote
    caches = []
    for _ in range(2):
        cache = KVCache(config, case.cache.num_blocks, 18, dtype)
        access = KVAccess(config, cache, torch.float32)
        slots = torch.arange(cache.num_blocks * 18)
        for layer in range(2):
            tokens = filled[:, layer].permute(0, 3, 1, 2, 4).flatten(0, 1)
            access.write(layer, access.slot_rows(slots), tokens)
        caches.append(cache)
    case.kv[1, :, 0] = 0.0  # a token of zeros has a scale of zero
    outs = []
    for attention in (
        PagedAttention(config, caches[0], MANY, TILE),
        TorchAttention(config, caches[1], torch.float32),
    ):
        outs.append(torch.full_like(case.q, torch.nan))
        attention.begin_step(case.inputs)(1, case.q, case.kv, outs[-1])
    assert torch.equal(caches[0].memory.bytes, caches[1].memory.bytes)
    assert_close(outs[0], outs[1].double())


def test_every_8_bit_float() -> None:
    """Each code is read as torch reads it; what lies between two is written as torch writes it."""
    config = config_of(1, 1, 64, None)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    sorted_, _ = numbers[numbers.isfinite()].sort()
    halves = (sorted_[1:] + sorted_[:-1]) / 2
    beside = [halves.nextafter(halves + way) for way in (-1, 1)]
    beyond = torch.tensor([464.0, 465.0, 1e30, -1e30, torch.inf, -torch.inf])
    values = torch.cat((numbers, halves, *beside, beyond))
    values = torch.cat((values, torch.zeros(-len(values) % 64))).view(-1, 64)
    asked = [Asked(0, 1)] * len(values)
    case = Case.of(config, asked, 1, cache=KVCache(config, len(values) + 1, 1))
    case.kv[:, 0, 0], case.kv[:, 1, 0] = values, values
    caches = [KVCache(config, len(values) + 1, 1, torch.float8_e4m3fn) for _ in range(2)]
    out = torch.full_like(case.q, torch.nan)
    PagedAttention(config, caches[0], FEW, TILE).begin_step(case.inputs)(0, case.q, case.kv, out)
    access = KVAccess(config, caches[1], torch.float32)
    access.write(0, access.slot_rows(case.inputs.slots), case.kv)
    assert torch.equal(caches[0].memory.bytes, caches[1].memory.bytes)
    # One token has all of the weight: what comes out is its value.
    want = access.read(0, access.block_rows(case.inputs.slots))[1, 0]
    is_number = want.isfinite().all(1)
    assert torch.equal(out[is_number, 0], want[is_number])
    assert bool(out[~is_number].isnan().all())
    assert 0 < int(is_number.sum()) < len(values)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_token_that_is_not_a_number_spoils_its_row_alone(dtype: torch.dtype) -> None:
    config = config_of(2, 1, 64, None)
    cache = KVCache(config, 8, 16, dtype)
    case = Case.of(config, [Asked(0, 1), Asked(0, 1), Asked(0, 1)], 16)
    case.kv[1, 0, 0, 5], case.kv[2, 1, 0, 7] = torch.nan, torch.inf
    out = torch.zeros_like(case.q)
    PagedAttention(config, cache, FEW, TILE).begin_step(case.inputs)(0, case.q, case.kv, out)
    assert out.isfinite().flatten(1).all(1).tolist() == [True, False, False]

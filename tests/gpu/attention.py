"""Attention on a device against torch's own on copies of the same blocks: error and time."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diptych.engine.backends.base import Backend
from diptych.engine.backends.torch.kv_access import KVAccess
from diptych.engine.inputs import build_inputs
from diptych.engine.kv.cache import KV_DTYPES, KVCache
from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.formats import KVDtypeName
from tests.attention_config import SCALE, config_of

BLOCK_SIZE = 32
MAX_ERROR = 0.03  # of values that spread by 1, in bfloat16
NUM_AFTER_EACH_OTHER = 8  # of what is to be done for long
_BUSY_CYCLES = 1 << 22  # of the device: two milliseconds

Stopwatch = Callable[[Callable[[], object]], float]  # seconds that the device takes for it


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one length; of each so many last tokens attend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_seqs: int
    context: int  # tokens
    num_queries: int  # of each
    cache: Literal["auto"] | KVDtypeName = "auto"  # its elements; auto: as the model's


CASES = (
    Case(32, 8, 128, num_seqs=1, context=8192, num_queries=1),
    Case(32, 8, 128, num_seqs=64, context=1024, num_queries=1),
    Case(16, 8, 128, num_seqs=64, context=1024, num_queries=1),
    Case(8, 4, 256, num_seqs=64, context=1024, num_queries=1),
    Case(32, 8, 128, num_seqs=1, context=8192, num_queries=8192),
    Case(32, 8, 128, num_seqs=4, context=4096, num_queries=512),
    Case(32, 8, 128, num_seqs=64, context=1024, num_queries=1, cache="int8"),
    Case(32, 8, 128, num_seqs=64, context=1024, num_queries=1, cache="fp8"),
    Case(32, 8, 128, num_seqs=4, context=4096, num_queries=512, cache="fp8"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    error: float  # the largest
    seconds: float
    sdpa_seconds: float  # torch's, on copies that cost nothing
    kv_bytes_per_s: float  # of keys and values as they are kept, each read once
    holds: bool


@torch.inference_mode()
def check(case: Case, backend: Backend, dtype: torch.dtype, stopwatch: Stopwatch) -> Measured:
    """One layer's step on blocks in no order; torch's has what the cache made of the numbers."""
    config = config_of(case.num_heads, case.num_kv_heads, case.head_dim, None)
    blocks_each = -(-case.context // BLOCK_SIZE)
    num_blocks = case.num_seqs * blocks_each
    cache_dtype = dtype if case.cache == "auto" else KV_DTYPES[case.cache]
    cache = KVCache(config, num_blocks, BLOCK_SIZE, cache_dtype, backend.kv_memory)
    access = KVAccess(config, cache, dtype)
    generator = torch.Generator(backend.device).manual_seed(1)
    empty = partial(torch.empty, dtype=dtype, device=backend.device)
    slots = torch.arange(num_blocks * BLOCK_SIZE, device=backend.device)
    kept = empty(len(slots), 2, case.num_kv_heads, case.head_dim).normal_(generator=generator)
    access.write(0, access.slot_rows(slots), kept)
    tables = torch.randperm(num_blocks).view(case.num_seqs, blocks_each)
    chunks = [
        Chunk(
            token_ids=(5,) * case.num_queries,
            start=case.context - case.num_queries,
            block_table=tuple(table.tolist()),
            sample=None,
        )
        for table in tables
    ]
    inputs = build_inputs(StepPlan(chunks=tuple(chunks)), BLOCK_SIZE, backend.begin_step())
    q = empty(len(inputs.slots), case.num_heads, case.head_dim).normal_(generator=generator)
    kv = empty(len(q), 2, case.num_kv_heads, case.head_dim).normal_(generator=generator)
    out = torch.empty_like(q)
    step = backend.attention(config, cache, dtype).begin_step(inputs)
    seconds = stopwatch(lambda: step(0, q, kv, out))
    context = _gathered(access, tables, case.context)
    queries = q.view(case.num_seqs, case.num_queries, case.num_heads, -1).transpose(1, 2)
    sdpa_seconds = stopwatch(lambda: _sdpa(queries, context))
    want = _sdpa(queries.float(), context.float()).transpose(1, 2).reshape(out.shape)
    error = float((out.float() - want).abs().max())
    kv_bytes = context.numel() * cache_dtype.itemsize
    return Measured(
        repr(case), error, seconds, sdpa_seconds, kv_bytes / seconds, error <= MAX_ERROR
    )


def copy_bytes_per_s(device: torch.device, num_bytes: int, stopwatch: Stopwatch) -> float:
    """Read and written, by one copy after another: what no kernel beats for long."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = stopwatch(lambda: [target.copy_(source) for _ in range(NUM_AFTER_EACH_OTHER)])
    return NUM_AFTER_EACH_OTHER * 2 * num_bytes / seconds


def device_seconds(do: Callable[[], object]) -> float:
    """The median of twenty, after three that are not counted.

    Each is asked for while the device is at something else, so that the host is ahead.
    """
    for _ in range(3):
        do()
    taken: list[float] = []
    for _ in range(20):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        taken.append(between_events(do))
    return statistics.median(taken)


def between_events(do: Callable[[], object]) -> float:
    """Seconds of the device for what ``do`` asks of it."""
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    do()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _gathered(access: KVAccess, tables: Tensor, num_tokens: int) -> Tensor:
    """[2, num_seqs, num_kv_heads, num_tokens, head_dim]."""
    rows = [access.block_rows(table) for table in tables.to(access.runs.device)]
    contexts = [access.read(0, each)[:, :, :num_tokens] for each in rows]
    return torch.stack(contexts, 1)


def _sdpa(q: Tensor, context: Tensor) -> Tensor:
    """q: [num_seqs, num_heads, num_queries, head_dim]."""
    num_queries, num_keys = q.shape[2], context.shape[3]
    mask = None
    if 1 < num_queries < num_keys:
        last = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        mask = torch.arange(num_keys, device=q.device) <= last[:, None]
    return F.scaled_dot_product_attention(
        q,
        context[0],
        context[1],
        attn_mask=mask,
        is_causal=num_queries == num_keys and num_keys > 1,
        scale=SCALE,
        enable_gqa=True,
    )

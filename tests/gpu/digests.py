"""Digests of KV blocks on a device against the host's of copies: bits and time."""

from dataclasses import dataclass

import torch

from diptych.engine.backends.cuda.kv_memory import CudaKVMemory, add_up
from diptych.engine.kv.cache import KVCache
from diptych.word_sums import Sums
from diptych.worker.device_pool import DevicePool
from kvtransfer.digest import Coverage, block_digest, words_of
from tests.attention_config import config_of
from tests.gpu.attention import Stopwatch

_NUM_COMPARED = 4  # blocks
_BUSY_CYCLES = 1 << 32  # of the device: seconds


@dataclass(frozen=True, slots=True)
class Case:
    """Blocks of one sequence."""

    block_bytes: int
    num_blocks: int
    is_sampled: bool


CASES = (  # 8192 tokens in blocks of 32: Llama-3.1-8B's in bfloat16, Qwen3-0.6B's
    Case(4 << 20, 256, is_sampled=False),
    Case(4 << 20, 256, is_sampled=True),
    Case(3670016, 256, is_sampled=False),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case."""

    case: str
    seconds: float  # of the device, for all blocks
    bytes_per_s: float  # of the blocks, looked at or not
    holds: bool


def check(case: Case, device: torch.device, stopwatch: Stopwatch) -> Measured:
    """On blocks of random bytes in no order."""
    generator = torch.Generator(device).manual_seed(1)
    num_words = case.num_blocks * case.block_bytes // 8
    memory = torch.randint(-(2**62), 2**62, (num_words,), generator=generator, device=device)
    ids = torch.randperm(case.num_blocks).tolist()
    seed = 7 if case.is_sampled else 0
    coverages = [Coverage(seed, place) for place in range(case.num_blocks)]
    sizes = [case.block_bytes] * case.num_blocks
    asked = words_of([block_id * case.block_bytes for block_id in ids], sizes, coverages)
    seconds = stopwatch(lambda: add_up(memory, asked))
    found = add_up(memory, asked).cpu().numpy().view("uint64").tolist()
    holds = all(
        Sums(*found[place]).digest(case.block_bytes)
        == block_digest(
            memory.view(case.num_blocks, -1)[block_id].cpu().numpy().tobytes(), coverages[place]
        )
        for place, block_id in enumerate(ids[:_NUM_COMPARED])
    )
    return Measured(repr(case), seconds, case.num_blocks * case.block_bytes / seconds, holds)


@dataclass(frozen=True, slots=True)
class Beside:
    """Whether a pool's digests are there before what the device was asked for earlier is done."""

    case: str
    holds: bool


def check_beside(device: torch.device) -> Beside:
    """As a step in flight: the current stream is busy for longer than a digest can take."""
    config = config_of(2, 1, 16, None)
    cache = KVCache(config, 6, 8, torch.float32, lambda size: CudaKVMemory(size, device))
    pool = DevicePool(cache)
    wanted = block_digest(bytes(cache.block_bytes), Coverage(0, 0))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    step = torch.cuda.Event()  # type: ignore[no-untyped-call]
    step.record()
    found = pool.digests([2], [Coverage(0, 0)])
    is_beside = not step.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    return Beside("beside a step", is_beside and found == (wanted,))

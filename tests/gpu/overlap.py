"""Graphs and two steps in flight on a device: the same tokens as without, and what they save."""

import tempfile
import time
from dataclasses import dataclass

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.sampling_params import SamplingParams
from tests.engines import load_decoder
from tests.gpu.golden import BLOCK_SIZE, Shape
from tests.step_rig import StepRig


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one shape; seconds of a step of single tokens, on average."""

    shape: str
    dtype: str
    eager_s: float  # without graphs, one step at a time
    one_step_s: float  # with graphs
    two_steps_s: float  # and two in flight
    num_ahead: int  # steps that were launched while another was in flight
    num_seqs: int
    num_equal: int  # sequences that had the same tokens each way
    holds: bool


def check(
    shape: Shape,
    eager: Backend,
    graphed: Backend,
    dtype: torch.dtype,
    *,
    num_seqs: int = 8,
    num_tokens: int = 64,
    num_rounds: int = 2,
) -> Overlap:
    """Greedy and drawn sequences at once; each way in each round, of which the last one counts.

    Rows are added up in another order in other batches, so that a token at a margin may be
    another one: in float32 of one sequence in four at the most. Of bfloat16 nothing is held.
    """
    with tempfile.TemporaryDirectory() as name:
        model = load_decoder(shape.write(name), dtype, backend=eager)
    num_blocks = num_seqs * (2 + -(-num_tokens // BLOCK_SIZE)) + 1
    cache = KVCache(model.config, num_blocks, BLOCK_SIZE, dtype, eager.kv_memory)
    tokens, seconds, num_ahead = [], [], 0
    ways = ((Runner(model, cache, eager), 1), *((Runner(model, cache, graphed), n) for n in (1, 2)))
    for runner, max_steps in ways * num_rounds:
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        rig = StepRig(runner, pool, num_tokens + 2 * BLOCK_SIZE, max_steps)
        seqs = [
            rig.add(
                number,
                [5 + number] * (3 + number),
                SamplingParams(temperature=number % 2, seed=number, max_tokens=num_tokens),
            )
            for number in range(num_seqs)
        ]
        begin_s = time.perf_counter()
        rig.run()
        seconds.append((time.perf_counter() - begin_s) / rig.num_steps)
        tokens.append([tuple(seq.token_ids) for seq in seqs])
        num_ahead = rig.num_ahead
    num_equal = sum(len(set(found)) == 1 for found in zip(*tokens, strict=True))
    is_equal = dtype is not torch.float32 or 4 * num_equal >= 3 * num_seqs
    holds = is_equal and num_ahead > num_tokens // 2
    return Overlap(
        shape=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        eager_s=seconds[-3],
        one_step_s=seconds[-2],
        two_steps_s=seconds[-1],
        num_ahead=num_ahead,
        num_seqs=num_seqs,
        num_equal=num_equal,
        holds=holds,
    )

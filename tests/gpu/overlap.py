"""Two steps in flight on a device: the same tokens as one at a time, and what that saves."""

import tempfile
import time
from dataclasses import dataclass

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.weights import load_weights
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.sampling_params import SamplingParams
from tests.gpu.golden import BLOCK_SIZE, Shape
from tests.step_rig import StepRig
from tests.tiny_model import write_tiny_model


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one shape; seconds of a step of single tokens, on average."""

    shape: str
    num_ahead: int  # steps that were launched while another was in flight
    one_step_s: float
    two_steps_s: float
    holds: bool  # the same tokens


def check(
    shape: Shape,
    backend: Backend,
    dtype: torch.dtype,
    *,
    num_seqs: int = 8,
    num_tokens: int = 128,
    num_rounds: int = 2,
) -> Overlap:
    """Greedy and drawn sequences at once; each way in each round, of which the last one counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(
            name,
            shape.family,
            vocab_size=shape.vocab_size,
            num_layers=shape.num_layers,
            shape=shape.sizes,
        )
        config = ModelConfig.from_folder(folder)
        weights = load_weights(folder, config, backend.weights(dtype, "none"))
    model = Decoder(config, weights, backend.layer_ops(config, dtype))
    num_blocks = num_seqs * (2 + -(-num_tokens // BLOCK_SIZE)) + 1
    cache = KVCache(config, num_blocks + 1, BLOCK_SIZE, dtype, backend.kv_memory)
    runner = Runner(model, cache, backend)
    tokens, seconds, num_ahead = [], [], 0
    for max_steps in (1, 2) * num_rounds:
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
        tokens.append([seq.token_ids for seq in seqs])
        num_ahead = rig.num_ahead
    holds = all(found == tokens[0] for found in tokens) and num_ahead > num_tokens // 2
    return Overlap(shape.name, num_ahead, seconds[-2], seconds[-1], holds)

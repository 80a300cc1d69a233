"""Chunks of prompts attended by FlashInfer's kernels, which read our blocks where they lie.

Of a layer's strided view it takes keys and values as two tensors of [num_blocks, num_kv_heads,
block_size, head_dim], its layout HND. What it plans for a step it copies to the device from memory
of its own, so as many steps as may be in flight each have their wrappers.
"""

from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from diptych.engine.backends.cuda.layer_place import LayerPlace
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.parts import Rows
from diptych.errors import ConfigurationError

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16,)
_WORKSPACE_BYTES = 128 << 20  # of partial results, one step after another


class FlashInferPrefill:
    """Of one model on one cache."""

    def __init__(
        self,
        library: Any,
        config: ModelConfig,
        kv_cache: KVCache,
        dtype: torch.dtype,
        steps_in_flight: int,
    ) -> None:
        """library: the module flashinfer. dtype: of queries.

        Raises ConfigurationError: it has no kernels for that.
        """
        _check(config, dtype, kv_cache.dtype)
        self._config, self._kv_cache, self._dtype = config, kv_cache, dtype
        device = kv_cache.tensor.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        windows = {layer.sliding_window or 0 for layer in config.layers}
        self._wrappers_of_steps = cycle(  # for each step that may be in flight, by window
            [
                {
                    window: library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
                    for window in windows
                }
                for _ in range(steps_in_flight)
            ]
        )

    def begin_step(self, inputs: StepInputs) -> "PlannedPrefill":
        """Plan for its chunks, of which there is one at least."""
        config, size = self._config, self._kv_cache.block_size
        chunks, wrappers = inputs.prefills, next(self._wrappers_of_steps)
        begin, end = chunks[0].begin, chunks[-1].begin + chunks[-1].num_tokens
        for window, wrapper in wrappers.items():
            wrapper.plan(
                torch.tensor([*(c.begin - begin for c in chunks), end - begin], dtype=torch.int32),
                torch.tensor([0, *(len(c.block_ids) for c in chunks)]).cumsum(0).int(),
                torch.cat([chunk.block_ids for chunk in chunks]).int(),
                torch.tensor([(c.end - 1) % size + 1 for c in chunks], dtype=torch.int32),
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                size,
                causal=True,
                sm_scale=config.attention_scale,
                window_left=window - 1,  # without the token itself; -1: none
                q_data_type=self._dtype,
                kv_data_type=self._kv_cache.dtype,
            )
        return PlannedPrefill(wrappers, begin, end)


class PlannedPrefill:
    """A step's chunks: the other rows than single tokens, in one run for each layer."""

    def __init__(self, wrappers: dict[int, Any], begin: int, end: int) -> None:
        self._wrappers, self._begin, self._end = wrappers, begin, end

    def attend(
        self, place: LayerPlace, window: int, q: Tensor, out: Tensor, rows: Rows | None
    ) -> None:
        """All rows of chunks, whichever are wanted."""
        blocks = place.blocks  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        own = slice(self._begin, self._end)
        self._wrappers[window].run(q[own], (blocks[:, 0], blocks[:, 1]), out=out[own])


def _check(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises ConfigurationError: it has no kernels for that."""
    if config.head_dim not in _HEAD_DIMS:
        raise ConfigurationError(
            f"prefill_attention flashinfer needs heads of {_HEAD_DIMS} (the model's have "
            f"{config.head_dim})"
        )
    if config.score_softcap is not None:
        raise ConfigurationError(
            "prefill_attention flashinfer serves no model with attn_logit_softcapping "
            f"(got {config.score_softcap})"
        )
    for name, each in (("dtype", dtype), ("kv_cache_dtype", kv_dtype)):
        if each not in _DTYPES:
            got = str(each).removeprefix("torch.")
            raise ConfigurationError(
                f"prefill_attention flashinfer needs {name} bfloat16 (got {got})"
            )

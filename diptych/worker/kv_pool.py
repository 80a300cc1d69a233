"""The memory of a worker's KV: how much of it, and when it is taken. On the model thread."""

import logging
from typing import NamedTuple

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KV_DTYPES, KVCache, block_bytes
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.runner import Runner
from diptych.engine.scheduling.largest_step import largest_step
from diptych.errors import ConfigurationError, DeviceMemoryError
from diptych.worker.config import WorkerConfig
from diptych.worker.pool_size import device_share, pool_size

logger = logging.getLogger(__name__)

_HOST_POOL_BYTES = 2**30  # where nothing says how many


class KVPool(NamedTuple):
    """``cache`` holds ``num_blocks`` and, behind them, scratch blocks."""

    cache: KVCache
    num_blocks: int
    max_model_len: int  # tokens, of the longest sequence that it allows


class KVPools:
    """Makes the pool of a worker's rank 0: before weights are loaded, or from what they leave."""

    def __init__(
        self,
        config: WorkerConfig,
        model_config: ModelConfig,
        own_config: ModelConfig,
        dtype: torch.dtype,
        num_scratch_blocks: int,
        backend: Backend,
    ) -> None:
        """dtype: of weights and arithmetic, and of the cache where no setting names another.

        own_config: of what is computed in this process, whose pool has no other heads; how
        many blocks there are is by what whole ones take, in all ranks together.
        """
        name = config.kv_cache_dtype
        self._dtype = dtype if name == "auto" else KV_DTYPES[name]
        self._config, self._model_config, self._backend = config, model_config, backend
        self._num_scratch_blocks, self._own_config = num_scratch_blocks, own_config

    def before_weights(self) -> KVPool | None:
        """None: how large it may be has to be measured. Raises ConfigurationError."""
        said_bytes = self._config.kv_cache_memory
        is_said = said_bytes is not None or self._config.num_blocks is not None
        if self._backend.memory is not None and not is_said:
            return None
        return self._allocate(said_bytes or _HOST_POOL_BYTES, "kv_cache_memory")

    def beside(self, decoder: Decoder) -> KVPool:
        """From what the largest step leaves of this worker's share of the device.

        Beside that step is what steps of single tokens keep once they have been run: their graphs.

        Raises ConfigurationError: too little, or that step has no room itself.
        """
        memory = self._backend.memory
        assert memory is not None, "the host's memory is not shared out"
        memory.release_unused()
        self._run_largest_step(decoder)
        peak_bytes = memory.usage().peak_bytes
        memory.release_unused()
        usage = memory.usage()._replace(peak_bytes=peak_bytes)
        logger.info("device memory", extra=usage._asdict())
        left = device_share(self._config.gpu_memory_utilization, **usage._asdict())
        return self._allocate(left, "gpu_memory_utilization")

    def _run_largest_step(self, decoder: Decoder) -> None:
        context_len = self._model_config.max_position
        plan = largest_step(
            max_batched_tokens=self._config.max_batched_tokens,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=min(self._config.max_model_len or context_len, context_len),
            block_size=self._config.block_size,
        )
        try:
            runner = Runner(decoder, self._cache(1), self._backend)
            runner.warm_up(max_rows=self._config.max_num_seqs)
            for step in [runner.launch(plan) for _ in range(runner.steps_in_flight)]:
                step.wait()
        except DeviceMemoryError as error:
            raise ConfigurationError(
                f"max_batched_tokens: no memory for a step of {plan.num_tokens} tokens: {error}"
            ) from None

    def _allocate(self, memory_bytes: int, memory_setting: str) -> KVPool:
        config, model_config = self._config, self._model_config
        size = pool_size(
            num_blocks=config.num_blocks,
            memory_bytes=memory_bytes,
            block_bytes=block_bytes(model_config, config.block_size, self._dtype),
            block_size=config.block_size,
            context_len=model_config.max_position,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_scratch_blocks=self._num_scratch_blocks,
            memory_setting=memory_setting,
        )
        if size.clipped:
            logger.warning(
                "the KV pool cannot hold the longest sequence: sequences are limited",
                extra={"max_model_len": size.max_model_len, "num_blocks": size.num_blocks},
            )
        cache = self._cache(size.num_blocks + self._num_scratch_blocks)
        logger.info(
            "KV pool",
            extra={
                "num_blocks": size.num_blocks,
                "num_scratch_blocks": self._num_scratch_blocks,
                "num_bytes": cache.num_bytes,
                "dtype": str(self._dtype).removeprefix("torch."),
                "max_model_len": size.max_model_len,
            },
        )
        return KVPool(cache, size.num_blocks, size.max_model_len)

    def _cache(self, num_blocks: int) -> KVCache:
        config = self._config
        return KVCache(
            self._own_config,
            num_blocks,
            config.block_size,
            self._dtype,
            self._backend.kv_memory,
        )

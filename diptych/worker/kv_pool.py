"""The memory of a worker's KV: how much of it, and when it is taken. On the model thread."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.kv.cache import KV_DTYPES, KVCache, block_bytes
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.config import ModelConfig
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
    others: tuple[KVMemory, ...]  # of the same size, of the other ranks, where they are taken here
    num_blocks: int
    max_model_len: int  # tokens, of the longest sequence that it allows


NewRunner = Callable[[KVCache, Sequence[KVMemory]], Runner]
"""Over rank 0's cache and the other ranks' pools."""


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
        self._num_ranks = config.tensor_parallel
        name = config.kv_cache_dtype
        self.dtype = dtype if name == "auto" else KV_DTYPES[name]
        self._config, self._model_config, self._backend = config, model_config, backend
        self._num_scratch_blocks, self._own_config = num_scratch_blocks, own_config

    @property
    def is_taken_here(self) -> bool:
        """Whether this process takes the memory of all ranks' pools: that of devices.

        Another process's could neither be registered here nor be handed on to who reads it.
        """
        return self._backend.memory is not None

    def before_weights(self) -> KVPool | None:
        """None: how large it may be has to be measured. Raises ConfigurationError."""
        said_bytes = self._config.kv_cache_memory
        is_said = said_bytes is not None or self._config.num_blocks is not None
        if self._backend.memory is not None and not is_said:
            return None
        return self._allocate(said_bytes or _HOST_POOL_BYTES, "kv_cache_memory")

    def beside(self, new_runner: NewRunner) -> KVPool:
        """From what the largest step leaves of this worker's share of the device.

        Beside that step is what steps of single tokens keep once they have been run: their graphs.
        Of several ranks the first one has the largest: the others' pools are as large as its own.

        Raises ConfigurationError: too little, or that step has no room itself.
        """
        memory = self._backend.memory
        assert memory is not None, "the host's memory is not shared out"
        memory.release_unused()
        self._run_largest_step(new_runner)
        peak_bytes = memory.usage().peak_bytes
        memory.release_unused()
        usage = memory.usage()._replace(peak_bytes=peak_bytes)
        logger.info("device memory", extra=usage._asdict())
        left = device_share(self._config.gpu_memory_utilization, **usage._asdict())
        return self._allocate(left * self._num_ranks, "gpu_memory_utilization")

    def _run_largest_step(self, new_runner: NewRunner) -> None:
        context_len = self._model_config.max_position
        plan = largest_step(
            max_batched_tokens=self._config.max_batched_tokens,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=min(self._config.max_model_len or context_len, context_len),
            block_size=self._config.block_size,
        )
        try:
            runner = new_runner(*self._take(1))
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
            block_bytes=block_bytes(model_config, config.block_size, self.dtype),
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
        cache, others = self._take(size.num_blocks + self._num_scratch_blocks)
        logger.info(
            "KV pool",
            extra={
                "num_blocks": size.num_blocks,
                "num_scratch_blocks": self._num_scratch_blocks,
                "num_bytes": cache.num_bytes,
                "dtype": str(self.dtype).removeprefix("torch."),
                "max_model_len": size.max_model_len,
            },
        )
        return KVPool(cache, tuple(others), size.num_blocks, size.max_model_len)

    def _take(self, num_blocks: int) -> tuple[KVCache, list[KVMemory]]:
        """Rank 0's cache, and the other ranks' pools if they are taken here."""
        cache = KVCache(
            self._own_config,
            num_blocks,
            self._config.block_size,
            self.dtype,
            self._backend.kv_memory,
        )
        others = list[KVMemory]()
        for rank in range(1, self._num_ranks) if self.is_taken_here else ():
            try:
                others.append(self._backend.kv_memory(cache.num_bytes, rank))
            except RuntimeError as error:
                raise ConfigurationError(
                    f"gpu_memory_utilization, num_blocks or kv_cache_memory: rank {rank}'s GPU has "
                    f"no memory for {cache.num_bytes} bytes of KV blocks: {error}"
                ) from None
        return cache, others

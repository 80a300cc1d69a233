"""From ``--model`` to something that can run steps. Blocking; on the model thread.

The model thread loads as well as runs, because torch's thread pool belongs to
the thread that calls it.
"""

import logging
import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.kv.cache import KV_DTYPES, KVCache, block_bytes
from diptych.engine.kv.fingerprint import kv_layout, model_digest
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.weights import load_weights, resolve_dtype
from diptych.engine.runner import Runner
from diptych.engine.scheduling.largest_step import largest_step
from diptych.engine.scheduling.step_timing import MeasuredStep
from diptych.errors import ConfigurationError, DeviceMemoryError
from diptych.models import source as model_source
from diptych.progress import Progress
from diptych.text.identity import text_digest
from diptych.v1 import common_pb2
from diptych.worker.config import WorkerConfig, parse_cpus
from diptych.worker.pool_size import PoolSize, device_share, pool_size

logger = logging.getLogger(__name__)

_HOST_POOL_BYTES = 2**30  # where nothing says how many
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # quota and period of this container, microseconds


class LoadAbandonedError(Exception):
    """The process stops; loading ended between two tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run, and the memory of its KV."""

    config: ModelConfig
    kv_cache: KVCache
    num_blocks: int  # of the pool; those behind them are scratch
    runner: Runner
    measured: MeasuredStep  # one of the warmed-up runner
    layout: common_pb2.KVLayout
    text_digest: str  # of tokenizer and config, see :mod:`diptych.text.identity`
    max_model_len: int  # tokens: min(model's context, configured, what the pool holds)


def load_model(
    config: WorkerConfig,
    digest_level: str,
    num_scratch_blocks: int,
    progress: Progress,
    abandoned: threading.Event,
) -> LoadedModel:
    """Resolve, read, allocate, warm up.

    ``progress`` is called on this thread. Raises ConfigurationError;
    LoadAbandonedError soon after ``abandoned`` was set.
    """

    def report(stage: str, done_ratio: float) -> None:
        if abandoned.is_set():
            raise LoadAbandonedError
        progress(stage, done_ratio)

    torch.set_num_threads(config.num_threads or num_usable_cores())
    cache_dir = config.cache_dir or model_source.DEFAULT_CACHE_DIR
    source = model_source.resolve(config.model, cache_dir, report)
    model_config = ModelConfig.from_folder(source.folder)
    backend = make_backend(config.device)
    dtype = resolve_dtype(config.dtype, model_config, backend.auto_dtype)
    _log_model(source.name, model_config, backend, dtype)
    store = backend.weights(dtype, config.quantization)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype]
    allocate = partial(_allocate, config, model_config, kv_dtype, num_scratch_blocks, backend)
    is_measured = backend.memory is not None and _is_unsaid(config)
    # First where it can be: what does not fit fails before the weights are read.
    pool = None if is_measured else allocate(config.kv_cache_memory or _HOST_POOL_BYTES)
    weights = load_weights(
        source.folder, model_config, store, lambda ratio: report("loading weights", ratio)
    )
    decoder = Decoder(model_config, weights, backend.layer_ops(model_config, dtype))
    if pool is None:
        left_bytes = _bytes_left_by_steps(config, decoder, kv_dtype, backend)
        pool = allocate(left_bytes, memory_setting="gpu_memory_utilization")
    kv_cache, size = pool
    runner = Runner(decoder, kv_cache, backend)
    measured = runner.warm_up(lambda ratio: report("warming up", ratio))
    layout = kv_layout(
        model_config,
        kv_cache,
        model_digest(source.folder),
        dtype,
        digest_level=digest_level,
        quantization=config.quantization,
    )
    return LoadedModel(
        config=model_config,
        kv_cache=kv_cache,
        num_blocks=size.num_blocks,
        runner=runner,
        measured=measured,
        layout=layout,
        text_digest=text_digest(source.folder),
        max_model_len=size.max_model_len,
    )


def _log_model(name: str, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> None:
    logger.info(
        "model",
        extra={
            "model": name,
            "family": config.model_type,
            "stored_dtype": config.checkpoint_dtype if config.fp8 is None else "8-bit floats",
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(backend.device),
        },
    )


def num_usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores this process may run on, and no more than its container's share of time is worth.

    More threads than that are stopped together whenever the share is used up.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(num_cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such limit ("max"), or not Linux
        return num_cores


def confine_to(cpus: str) -> None:
    """Keep every thread of this process, present and future, on these cores.

    Raises ConfigurationError: there are no such cores, or no way to do it here.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("cpus: this system cannot confine a process to cores")
    try:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), parse_cpus(cpus))
    except OSError as error:
        usable = sorted(os.sched_getaffinity(0))
        raise ConfigurationError(f"cpus: {cpus}: {error.strerror}; usable: {usable}") from None


class _Pool(NamedTuple):
    cache: KVCache  # of the pool and the scratch blocks
    size: PoolSize


def _is_unsaid(config: WorkerConfig) -> bool:
    """Whether no setting says how large the pool is."""
    return config.num_blocks is None and config.kv_cache_memory is None


def _bytes_left_by_steps(
    config: WorkerConfig, decoder: Decoder, kv_dtype: torch.dtype, backend: Backend
) -> int:
    """What the largest step leaves of this worker's share of the device; it is run for that."""
    memory = backend.memory
    assert memory is not None, "the host's memory is not shared out"
    plan = largest_step(
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(
            config.max_model_len or decoder.config.max_position, decoder.config.max_position
        ),
        block_size=config.block_size,
    )
    memory.release_unused()
    try:
        cache = KVCache(decoder.config, 1, config.block_size, kv_dtype, backend.kv_memory)
        Runner(decoder, cache, backend).execute(plan)
    except DeviceMemoryError as error:
        raise ConfigurationError(
            f"max_batched_tokens: no memory for a step of {plan.num_tokens} tokens: {error}"
        ) from None
    peak_bytes = memory.usage().peak_bytes
    del cache
    memory.release_unused()
    usage = memory.usage()._replace(peak_bytes=peak_bytes)
    logger.info("device memory", extra=usage._asdict())
    return device_share(config.gpu_memory_utilization, **usage._asdict())


def _allocate(
    config: WorkerConfig,
    model_config: ModelConfig,
    kv_dtype: torch.dtype,
    num_scratch_blocks: int,
    backend: Backend,
    memory_bytes: int,
    memory_setting: str = "kv_cache_memory",
) -> _Pool:
    bytes_of_block = block_bytes(model_config, config.block_size, kv_dtype)
    size = pool_size(
        num_blocks=config.num_blocks,
        memory_bytes=memory_bytes,
        block_bytes=bytes_of_block,
        block_size=config.block_size,
        context_len=model_config.max_position,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_scratch_blocks=num_scratch_blocks,
        memory_setting=memory_setting,
    )
    if size.clipped:
        logger.warning(
            "the KV pool cannot hold the longest sequence: sequences are limited",
            extra={"max_model_len": size.max_model_len, "num_blocks": size.num_blocks},
        )
    num_blocks = size.num_blocks + num_scratch_blocks
    logger.info(
        "KV pool",
        extra={
            "num_blocks": size.num_blocks,
            "num_scratch_blocks": num_scratch_blocks,
            "num_bytes": num_blocks * bytes_of_block,
            "dtype": str(kv_dtype).removeprefix("torch."),
            "max_model_len": size.max_model_len,
        },
    )
    cache = KVCache(model_config, num_blocks, config.block_size, kv_dtype, backend.kv_memory)
    return _Pool(cache, size)

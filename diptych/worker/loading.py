"""From ``--model`` to something that can run steps. Blocking; on the model thread.

The model thread loads as well as runs, because torch's thread pool belongs to
the thread that calls it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from diptych.engine.backends.base import Backend
from diptych.engine.backends.choice import make_backend
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.fingerprint import kv_layout, model_digest
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.ranks import ONE_RANK
from diptych.engine.model.weights import load_weights, resolve_dtype
from diptych.engine.parallel.leader import Leader
from diptych.engine.runner import Runner
from diptych.engine.trial_runner import TrialRunner
from diptych.errors import ConfigurationError, DeviceMemoryError
from diptych.models import source as model_source
from diptych.models.source import ResolvedModel
from diptych.progress import Progress
from diptych.step_model import MeasuredStep
from diptych.text.grammars import NO_TOKENIZER, Grammars, NoGrammars
from diptych.text.identity import read_config, text_digest
from diptych.v1 import common_pb2
from diptych.worker.config import WorkerConfig
from diptych.worker.cores import num_usable_cores
from diptych.worker.kv_pool import KVPool, KVPools
from diptych.worker.pool_memory import pool_memory, rank_pools
from diptych.worker.rank_setup import RankSetup
from diptych.worker.rank_team import RankTeam
from kvtransfer.memory import PoolMemory
from kvtransfer.rank_pools import RankPools

logger = logging.getLogger(__name__)

_CHANGED = "changed while it was read: start again"
_NO_ROOM_FOR_STEPS = "kv_cache_memory or gpu_memory_utilization: no room for steps beside the pool"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run, and the memory of its KV."""

    config: ModelConfig
    kv_cache: KVCache  # of this rank
    memory: PoolMemory | RankPools  # of all
    num_blocks: int  # of the pool; those behind them are scratch
    runner: Runner
    measured: list[MeasuredStep]  # of the warmed-up runner
    layout: common_pb2.KVLayout
    text_digest: str  # of tokenizer and config, see :mod:`diptych.text.identity`
    max_model_len: int  # tokens: min(model's context, configured, what the pool holds)
    team: RankTeam | None = None  # the other ranks, to be closed after the last step


class _Texts(NamedTuple):
    """What a model's folder has besides weights, at one moment."""

    config: Mapping[str, Any]
    digest: str  # of tokenizer and config

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises ConfigurationError."""
        return cls(read_config(folder / "config.json"), text_digest(folder))


class _FoundModel(NamedTuple):
    """The model that is asked for, and how it is to run here."""

    source: ResolvedModel
    texts: _Texts  # before anything else of the folder was read
    model_config: ModelConfig
    own_config: ModelConfig  # of what is computed in this process
    share: RankShare
    num_threads: int  # of each rank
    backend: Backend
    dtype: torch.dtype  # of weights and arithmetic


def load_model(
    config: WorkerConfig,
    digest_level: str,
    num_scratch_blocks: int,
    report: Progress,
) -> LoadedModel:
    """Resolve, read, allocate, warm up, time steps.

    ``report`` is called on this thread. Raises ConfigurationError, and what ``report`` raises.
    """
    found = _find(config, report)
    model_config = found.model_config
    pools = KVPools(
        config, model_config, found.own_config, found.dtype, num_scratch_blocks, found.backend
    )
    pool = pools.before_weights()  # what does not fit fails before they are read
    with ExitStack() as started:
        team = None
        if found.share.size > 1:
            team = started.enter_context(closing(_team(found, config, pools, pool, report)))
        decoder = _decoder(found, config, team, report)
        if team is not None:
            _wait_for_weights(team, decoder, report)
        pool = pool or pools.beside(partial(_runner, decoder, found.backend, team, NO_TOKENIZER))
        grammars = _load_grammars(found.source.folder, model_config.vocab_size)
        if _Texts.of(found.source.folder) != found.texts:
            raise ConfigurationError(f"{found.source.folder} {_CHANGED}")
        with _fitting(_NO_ROOM_FOR_STEPS):
            runner = _runner(decoder, found.backend, team, grammars, pool.cache, pool.others)
            runner.warm_up(lambda ratio: report("warming up", ratio), config.max_num_seqs)
            measured = _measured(runner, config, report)
        loaded = LoadedModel(
            config=model_config,
            kv_cache=pool.cache,
            memory=_memory(pool, team),
            num_blocks=pool.num_blocks,
            runner=runner,
            measured=measured,
            layout=kv_layout(
                model_config,
                pool.cache,
                model_digest(found.texts.config, decoder.weights.source.digest),
                found.dtype,
                digest_level=digest_level,
                quantization=config.quantization,
                num_ranks=found.share.size,
            ),
            text_digest=found.texts.digest,
            max_model_len=pool.max_model_len,
            team=team,
        )
        started.pop_all()
    return loaded


def _measured(runner: Runner, config: WorkerConfig, report: Progress) -> list[MeasuredStep]:
    """What steps take, of a runner that is warmed up; none if that is not to be tried."""
    if not config.step_trials_s:
        return []
    trials = TrialRunner(
        runner,
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        most_s=config.step_trials_s,
    )
    return trials.run(lambda ratio: report("timing steps", ratio))


def _find(config: WorkerConfig, report: Progress) -> _FoundModel:
    """Finds the model. From here on torch has the threads of one rank."""
    share = RankShare(0, config.tensor_parallel)
    num_threads = max(1, (config.num_threads or num_usable_cores()) // share.size)
    torch.set_num_threads(num_threads)
    backend = make_backend(config.device, share, config.prefill_attention)
    cache_dir = config.cache_dir or model_source.DEFAULT_CACHE_DIR
    source = model_source.resolve(config.model, cache_dir, report)
    texts = _Texts.of(source.folder)
    model_config = ModelConfig.from_folder(source.folder)
    own_config = share.of(model_config)
    dtype = resolve_dtype(config.dtype, model_config, backend.auto_dtype)
    _log_model(source.name, model_config, backend, dtype)
    return _FoundModel(source, texts, model_config, own_config, share, num_threads, backend, dtype)


def _decoder(
    found: _FoundModel, config: WorkerConfig, team: RankTeam | None, report: Progress
) -> Decoder:
    """This rank's, with its weights."""
    backend, dtype = found.backend, found.dtype
    with _fitting(f"model: no memory for the weights of {found.source.name}"):
        weights = load_weights(
            found.source.folder,
            found.model_config,
            backend.weights(dtype, config.quantization, compact=config.dtype == "auto"),
            lambda ratio: report("loading weights", ratio),
            ONE_RANK if team is None else team.ranks,
        )
    return Decoder(found.own_config, weights, backend.layer_ops(found.own_config, dtype))


def _team(
    found: _FoundModel,
    config: WorkerConfig,
    pools: KVPools,
    pool: KVPool | None,
    report: Progress,
) -> RankTeam:
    """The other ranks, which have begun to load; on hosts they have their pools."""
    own = None if pools.is_taken_here or pool is None else pool.cache
    setup = RankSetup.of(
        config,
        folder=found.source.folder,
        model_config=found.model_config,
        dtype=found.dtype,
        kv_dtype=pools.dtype,
        device="cuda" if found.backend.device.type == "cuda" else "cpu",
        num_blocks=None if own is None else own.num_blocks,
        num_threads=found.num_threads,
    )
    with ExitStack() as started:
        team = started.enter_context(closing(RankTeam(setup)))
        team.join(
            lambda: report("starting ranks", 0.0),
            None if own is None else own.num_bytes,
            found.backend.device,
        )
        started.pop_all()
    return team


def _wait_for_weights(team: RankTeam, decoder: Decoder, report: Progress) -> None:
    """Until all ranks have theirs, which must be of the files that this one has read."""
    words = team.wait(lambda: report("loading weights", 1.0))
    if any(word.files != decoder.weights.source.files for word in words):
        raise ConfigurationError(f"model: its folder {_CHANGED}")


def _memory(pool: KVPool, team: RankTeam | None) -> PoolMemory | RankPools:
    if team is None:
        return pool_memory(pool.cache)
    return rank_pools(pool.cache, pool.others or team.pools)


def _runner(
    decoder: Decoder,
    backend: Backend,
    team: RankTeam | None,
    grammars: Grammars | NoGrammars,
    cache: KVCache,
    others: Sequence[KVMemory],
) -> Runner:
    """Over this process alone, or all ranks. others: pools that they get here."""
    if team is None:
        return Runner(decoder, cache, backend, grammars)
    return Leader(decoder, cache, backend, team.ranks, team.links, grammars, others)


def _load_grammars(folder: Path, vocab_size: int) -> Grammars | NoGrammars:
    """Without them requests that want a constraint are told why."""
    try:
        return Grammars.from_folder(folder, vocab_size)
    except ConfigurationError as error:
        logger.warning("no constraints are served", extra={"reason": error.message})
        if not (folder / "tokenizer.json").is_file():
            return NO_TOKENIZER
        reason = error.message.removeprefix(f"{folder}/")
        return NoGrammars(f"this worker holds to none: {reason}")


@contextmanager
def _fitting(otherwise: str) -> Iterator[None]:
    """What does not fit into the device's memory is a wrong setting, and ``otherwise`` its line."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, DeviceMemoryError) as error:
        raise ConfigurationError(f"{otherwise}: {error}") from None


def _log_model(name: str, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> None:
    logger.info(
        "model",
        extra={
            "model": name,
            "family": config.model_type,
            "stored_dtype": str(config.storage or config.checkpoint_dtype),
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(backend.device),
        },
    )

"""What a rank's process does: it gives the worker its pool, and writes its heads there."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.weights import load_weights
from diptych.engine.parallel.leader import Leader
from diptych.engine.runner import Runner
from diptych.worker.pool_memory import pool_memory, rank_pools
from diptych.worker.rank_setup import RankSetup
from diptych.worker.rank_team import RankTeam
from kvtransfer.digest import Coverage
from tests.engine_logits import chunk_logits
from tests.engines import CPU, load_decoder
from tests.ranks_in_threads import ranks_in_threads
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads

NUM_BLOCKS, BLOCK_SIZE = 6, 16
TABLE = (4, 1, 3)
IDS = [(7 * i * i + 11 * i) % 500 + 5 for i in range(40)]


def unconcerned() -> None:
    """Loading goes on."""


@pytest.fixture(autouse=True)
def in_threads() -> Iterator[None]:
    with ranks_in_threads():
        yield


def setup_of(folder: Path) -> RankSetup:
    return RankSetup(
        share=RankShare(0, 2),
        folder=folder,
        model_config=ModelConfig.from_folder(folder),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        block_size=BLOCK_SIZE,
        device="cpu",
        prefill_attention="own",
        num_blocks=NUM_BLOCKS,
        num_threads=1,
        service="test",
        log_level="INFO",
    )


def test_the_pools_of_both_are_what_one_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, temporary = write_tiny_model(tmp_path / "model"), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    config = ModelConfig.from_folder(folder)
    with torch_threads(1):
        whole = KVCache(config, NUM_BLOCKS, BLOCK_SIZE)
        want = list(chunk_logits(Runner(load_decoder(folder), whole, CPU), IDS, (11, 29), TABLE))
        own = RankShare(0, 2).of(config)
        cache = KVCache(own, NUM_BLOCKS, BLOCK_SIZE)
        team = RankTeam(setup_of(folder))
        try:
            team.join(unconcerned, cache.num_bytes)
            store = CPU.weights(torch.float32, "none")
            weights = load_weights(folder, config, store, ranks=team.ranks)
            (word,) = team.wait(unconcerned)
            assert word.files == weights.source.files
            assert not list(temporary.iterdir()), "they have met"
            decoder = Decoder(own, weights, CPU.layer_ops(own, torch.float32))
            leader = Leader(decoder, cache, CPU, team.ranks, team.links)
            got = list(chunk_logits(leader, IDS, (11, 29), TABLE))
            pools = rank_pools(cache, team.pools)
        finally:
            team.close()
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    written = torch.frombuffer(
        bytearray(pools.read(range(NUM_BLOCKS), 0, whole.num_bytes)), dtype=torch.float32
    )
    assert whole.tensor.any()
    assert (written - whole.tensor.view(-1)).abs().max() <= 1e-5 * whole.tensor.abs().max()
    one = pool_memory(whole)
    one.write(range(NUM_BLOCKS), 0, written.numpy().tobytes())
    everything = [Coverage()] * NUM_BLOCKS
    assert pools.digests(range(NUM_BLOCKS), everything) == one.digests(
        range(NUM_BLOCKS), everything
    )

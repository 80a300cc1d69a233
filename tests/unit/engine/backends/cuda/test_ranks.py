"""Two ranks on devices, their kernels interpreted, say what one does; all but nccl itself."""

from tests.triton_interpreter import INTERPRETED, one_kernel_at_a_time

# isort: split
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.config import ModelConfig
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.sampling_params import SamplingParams
from tests.engine_logits import chunk_logits
from tests.engines import CPU, load_decoder
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads
from tests.two_ranks import rank_caches, two_ranks
from tests.unit.engine.backends.cuda.recorded_graphs import RecordedGraphs

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

NUM_BLOCKS, BLOCK_SIZE, TABLE = 6, 8, (4, 1, 3, 0, 5)
IDS = [(7 * i * i + 11 * i) % 500 + 5 for i in range(25)]
GREEDY = SampleSpec(params=SamplingParams(temperature=0.0), allow_stop=True)
SEEDED = SampleSpec(params=SamplingParams(temperature=0.9, top_p=0.9, seed=5), allow_stop=True)


@pytest.fixture(autouse=True, scope="module")
def rules() -> Iterator[None]:
    with torch_threads(1), one_kernel_at_a_time():
        yield


def drawn(runner: Runner) -> list[list[int]]:
    """What two sequences with one prompt go on with, one of them greedily, in steps of both."""
    tables = [TABLE, (2, 6, 7, 8, 9)]
    chunks = [
        Chunk(token_ids=tuple(IDS), start=0, block_table=table, sample=spec)
        for table, spec in zip(tables, (GREEDY, SEEDED), strict=True)
    ]
    texts: list[list[int]] = [[], []]
    for _ in range(4):
        said = runner.execute(StepPlan(chunks=tuple(chunks))).tokens
        for place, token in enumerate(said):
            assert isinstance(token, SampledToken)
            texts[place].append(token.token_id)
            before = chunks[place]
            chunks[place] = Chunk(
                token_ids=(token.token_id,),
                start=before.end,
                block_table=before.block_table,
                sample=before.sample,
            )
    return texts


def test_logits_keys_and_values(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gemma3", sliding_window=16)
    whole = KVCache(ModelConfig.from_folder(folder), NUM_BLOCKS, BLOCK_SIZE)
    shares = rank_caches(folder, NUM_BLOCKS, BLOCK_SIZE)
    one = Runner(load_decoder(folder), whole, CPU)
    with two_ranks(folder, shares, tmp_path / "meeting", INTERPRETED) as leader:
        got, want = (list(chunk_logits(each, IDS, (11, 1, 13), TABLE)) for each in (leader, one))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    joined = torch.cat([cache.tensor for cache in shares], 3)
    assert whole.tensor.any()
    assert (joined - whole.tensor).abs().max() <= 1e-4 * whole.tensor.abs().max()


@pytest.mark.parametrize("with_graphs", [False, True])
def test_tokens_with_graphs_and_without(with_graphs: bool, tmp_path: Path) -> None:
    """Sums of all ranks are within a graph, what comes behind the layers is not."""
    folder = write_tiny_model(tmp_path, "qwen3", num_layers=1)
    graphs = RecordedGraphs() if with_graphs else None
    backend = CudaBackend(torch.device("cpu"), graphs)
    cache = KVCache(ModelConfig.from_folder(folder), 10, BLOCK_SIZE)
    want = drawn(Runner(load_decoder(folder), cache, CPU))
    shares = rank_caches(folder, 10, BLOCK_SIZE)
    with two_ranks(folder, shares, tmp_path / "meeting", backend) as leader:
        assert drawn(leader) == want
        assert leader.steps_in_flight == 2
    if graphs is not None:
        assert graphs.runs == [2] * 6, "three steps of single tokens, of each rank"

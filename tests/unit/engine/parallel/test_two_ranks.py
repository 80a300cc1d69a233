"""Two ranks compute what one does, write the same keys and values, and each has its part."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from diptych.engine.backends.base import Mark
from diptych.engine.kv.cache import KVCache
from diptych.engine.model.checkpoint import mapped_shards
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.parallel import leader as leader_module
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.parallel.step_link import RankClear, RankMessage, tell
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.report import LogprobsPart, StatesPart, SummedStates, Told
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.errors import ConfigurationError, DeviceLostError
from diptych.sampling_params import SamplingParams
from tests.engine_logits import chunk_logits
from tests.engines import CPU, PLAIN, AheadBackend, load_decoder
from tests.step_rig import StepRig
from tests.tiny_model import ARCHITECTURES, write_tiny_model
from tests.torch_threads import torch_threads
from tests.two_ranks import rank_caches, two_ranks

NUM_BLOCKS, BLOCK_SIZE = 12, 8
TABLE = (7, 2, 11, 3, 9, 0, 5)
TOLERANCE = 1e-5
IDS = [(7 * i * i + 11 * i) % 500 + 5 for i in range(40)]
GREEDY = SampleSpec(params=SamplingParams(temperature=0.0), allow_stop=True)
SEEDED = SampleSpec(params=SamplingParams(temperature=0.9, top_p=0.9, seed=5), allow_stop=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def cache_of(folder: Path, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(ModelConfig.from_folder(folder), NUM_BLOCKS, BLOCK_SIZE, dtype)


def shares_of(folder: Path, dtype: torch.dtype = torch.float32) -> list[KVCache]:
    return rank_caches(folder, NUM_BLOCKS, BLOCK_SIZE, dtype)


def joined(caches: Sequence[KVCache]) -> torch.Tensor:
    """As one process has them: the heads of all ranks beside each other."""
    return torch.cat([cache.tensor for cache in caches], 3)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def drawn(runner: Runner, spec: SampleSpec, num_tokens: int) -> list[int]:
    """A prompt in two steps, then token by token."""
    plans = [Chunk(token_ids=tuple(IDS[:11]), start=0, block_table=TABLE, sample=None)]
    plans += [Chunk(token_ids=tuple(IDS[11:]), start=11, block_table=TABLE, sample=spec)]
    assert runner.execute(StepPlan(chunks=(plans[0],))).tokens == (None,)
    chunk, token_ids = plans[1], list[int]()
    while True:
        (token,) = runner.execute(StepPlan(chunks=(chunk,))).tokens
        assert isinstance(token, SampledToken)
        token_ids.append(token.token_id)
        if len(token_ids) == num_tokens:
            return token_ids
        chunk = Chunk(token_ids=(token.token_id,), start=chunk.end, block_table=TABLE, sample=spec)


def with_biases(folder: Path) -> Path:
    """A model with a bias on every linear layer but the head."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"attention_bias": True, "mlp_bias": True})
    )
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(3)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bias = random.standard_normal(len(tensors[name])).astype(np.float32)
        tensors[name.removesuffix("weight") + "bias"] = bias
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check(folder: Path, meeting_file: Path) -> None:
    """Logits, texts, keys and values of two ranks against one."""
    whole, shares = cache_of(folder), shares_of(folder)
    one = Runner(load_decoder(folder), whole, CPU)
    with two_ranks(folder, shares, meeting_file, CPU) as leader:
        steps = [chunk_logits(runner, IDS, (11, 1, 28), TABLE) for runner in (leader, one)]
        for got, want in zip(*steps, strict=True):
            assert_close(got, want)
        assert_close(joined(shares), whole.tensor)
        for spec in (GREEDY, SEEDED):
            assert drawn(leader, spec, 12) == drawn(one, spec, 12)


@pytest.mark.timeout(400)  # the first one may have all kernels to compile
@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_family(family: str, tmp_path: Path) -> None:
    check(write_tiny_model(tmp_path, family, sliding_window=16), tmp_path / "meeting")


def test_a_bias_is_added_once(tmp_path: Path) -> None:
    check(with_biases(tmp_path), tmp_path / "meeting")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_each_rank_has_its_heads_in_caches_of_other_types(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path)
    whole, shares = cache_of(folder, dtype), shares_of(folder, dtype)
    one = Runner(load_decoder(folder), whole, CPU)
    with two_ranks(folder, shares, tmp_path / "meeting", CPU) as leader:
        steps = [chunk_logits(runner, IDS, (11, 1, 28), TABLE) for runner in (leader, one)]
        for got, want in zip(*steps, strict=True):  # an element may be rounded to its neighbour
            assert_close(got, want, 0.02)
    bits = {1: torch.int8, 2: torch.int16}[dtype.itemsize]  # torch compares no 8-bit floats
    same = joined(shares).view(bits) == whole.tensor.view(bits)
    assert same.float().mean() > 0.98


def test_what_is_told_of_a_prompt_and_the_steps_after_it(tmp_path: Path) -> None:
    """The head may be asked several times in a step, or not at all."""
    folder = write_tiny_model(tmp_path)
    ids, logprobs = tuple(IDS[:20]), LogprobsPart(2, tuple(IDS[3:20]), 3, 2)
    told = [
        Chunk(token_ids=ids, start=0, block_table=TABLE, sample=None, report=StatesPart(0, 20)),
        Chunk(token_ids=ids, start=0, block_table=TABLE, sample=GREEDY, report=logprobs),
    ]
    one = Runner(load_decoder(folder), cache_of(folder), CPU)
    with two_ranks(folder, shares_of(folder), tmp_path / "meeting", CPU) as leader:
        for chunk in told:
            got, want = (runner.execute(StepPlan(chunks=(chunk,))) for runner in (leader, one))
            assert_close(numbers_of(got.reports[0]), numbers_of(want.reports[0]))
        assert drawn(leader, GREEDY, 4) == drawn(one, GREEDY, 4)


def numbers_of(told: Told) -> torch.Tensor:
    """All that a report says."""
    if isinstance(told, SummedStates):
        return torch.tensor(told.values)
    return torch.tensor([[each.logprob, *each.top_logprobs] for each in told.logprobs])


def test_a_backend_of_plain_torch(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3")
    whole, shares = cache_of(folder), shares_of(folder)
    one = Runner(load_decoder(folder, backend=PLAIN), whole, PLAIN)
    with two_ranks(folder, shares, tmp_path / "meeting", PLAIN) as leader:
        assert drawn(leader, GREEDY, 6) == drawn(one, GREEDY, 6)


class LoggedMark:
    """A moment behind a step, whose wait is remembered."""

    def __init__(self, log: "Log", number: int) -> None:
        self._log, self._number = log, number

    def wait(self) -> None:
        self._log.add(f"done {self._number}")

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()


class Log:
    """What each thread did."""

    def __init__(self) -> None:
        self.by_thread = defaultdict[int, list[str]](list)

    def add(self, what: str) -> None:
        self.by_thread[threading.get_ident()].append(what)


class LoggedAheadBackend(AheadBackend):
    """Remembers for each rank what it was asked for and what was waited for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def mark(self) -> Mark:
        done = self._log.by_thread[threading.get_ident()]
        number = sum(what.startswith("asked") for what in done)
        self._log.add(f"asked {number}")
        return LoggedMark(self._log, number)


AHEAD_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=12),
    SamplingParams(seed=3, top_k=40, max_tokens=12),
    SamplingParams(temperature=0.0, return_margins=True, max_tokens=3),  # of the host's draws
]


def test_two_steps_in_flight_draw_what_one_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks go on from tokens that no host knows yet; each waits for its own part of a step."""
    log = Log()
    meet = ProcessRanks.meet

    def logged(ranks: ProcessRanks) -> None:
        log.add("met")
        meet(ranks)

    monkeypatch.setattr(ProcessRanks, "meet", logged)
    folder, backend = write_tiny_model(tmp_path, "qwen3"), LoggedAheadBackend(log)
    one = Runner(load_decoder(folder, backend=PLAIN), cache_of(folder), PLAIN)

    def tokens_of(runner: Runner, max_steps: int) -> tuple[list[Sequence[int]], int]:
        rig = StepRig(runner, BlockPool(NUM_BLOCKS, BLOCK_SIZE), 96, max_steps)
        seqs = [rig.add(at, IDS[at : at + 6], params) for at, params in enumerate(AHEAD_PARAMS)]
        rig.run()
        return [seq.token_ids for seq in seqs], rig.num_ahead

    want, _ = tokens_of(one, 1)
    with two_ranks(folder, shares_of(folder), tmp_path / "meeting", backend) as leader:
        got, num_ahead = tokens_of(leader, leader.steps_in_flight)
    assert got == want
    assert num_ahead > 5
    other = log.by_thread[next(each for each in log.by_thread if each != threading.get_ident())]
    met = [place for place, what in enumerate(other) if what == "met"]
    assert [other[place - 1] for place in met] == [f"done {step}" for step in range(len(met))]
    ahead = [
        sum(what.startswith("asked") for what in other[:place]) - number
        for number, place in enumerate(met)
    ]
    assert max(ahead) == 2, "the next step was asked for before the last was waited for"


def test_warming_up_leaves_the_pool_zero(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    shares = shares_of(folder)
    with two_ranks(folder, shares, tmp_path / "meeting", CPU) as leader:
        leader.warm_up()
    assert not joined(shares).any()


def test_a_step_that_fails_in_the_leader_ends_the_engine(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with two_ranks(folder, shares_of(folder), tmp_path / "meeting", CPU) as leader:
        no_blocks = Chunk(token_ids=(5, 6), start=0, block_table=(), sample=None)
        with pytest.raises(DeviceLostError, match="out of step"):
            leader.execute(StepPlan(chunks=(no_blocks,)))


def test_a_rank_that_ends_amid_warming_up_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(links: Sequence[Connection], message: RankMessage) -> None:
        if isinstance(message, RankClear):
            raise BrokenPipeError
        tell(links, message)

    monkeypatch.setattr(leader_module, "tell", told)
    folder = write_tiny_model(tmp_path)
    with (
        two_ranks(folder, shares_of(folder), tmp_path / "meeting", CPU) as leader,
        pytest.raises(DeviceLostError, match=r"out of step.*BrokenPipe"),
    ):
        leader.warm_up()


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "num_attention_heads=3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "num_key_value_heads=1"),
        ({"intermediate_size": 127}, "intermediate_size=127"),
        ({"vocab_size": 511}, "vocab_size=511"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(
    shape: dict[str, object], field: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, shape=shape)
    with pytest.raises(ConfigurationError, match=f"tensor_parallel: 2 ranks.*{field}"):
        RankShare(0, 2).of(ModelConfig.from_folder(folder))


def test_a_rank_has_and_reads_its_part_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with two_ranks(folder, shares_of(folder), tmp_path / "meeting", CPU) as leader:
        weights, whole = leader.model.weights, load_decoder(folder).weights
    assert isinstance(weights.embedding, torch.Tensor)
    assert isinstance(whole.embedding, torch.Tensor)
    assert torch.equal(weights.embedding, whole.embedding[:256])
    layer, want = weights.layers[0], whole.layers[0]
    assert 2 * layer.qkv.out_features == want.qkv.out_features
    assert 2 * layer.gate_up.out_features == want.gate_up.out_features
    assert 2 * layer.output.in_features == want.output.in_features
    assert 2 * layer.down.in_features == want.down.in_features
    assert weights.head.out_features == 512
    (shard,) = mapped_shards(folder).values()
    location = dict(shard.index())["model.embed_tokens.weight"]
    part = location.rows(range(256, 512))
    assert (part.shape, 2 * part.num_bytes) == ((256, 64), location.num_bytes)
    assert torch.equal(shard.tensor(part), whole.embedding[256:])


def test_parts_are_all_there_is_and_overlap_nowhere() -> None:
    parts = [RankShare(rank, 4).part(12) for rank in range(4)]
    assert [*parts[0], *parts[1], *parts[2], *parts[3]] == list(range(12))

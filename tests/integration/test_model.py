"""The decoder, on paged memory and in any mixture of chunks, equals transformers."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.block_needs import BlockNeeds
from diptych.engine.backends.cpu.workspace import StepMemory
from diptych.engine.inputs import build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.fingerprint import kv_layout
from diptych.engine.model.decoder import Decoder
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampledToken, SampleSpec, StepPlan
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams
from tests import hf_reference
from tests.engines import CPU, PLAIN, load_decoder
from tests.tiny_model import ARCHITECTURES, write_tiny_model
from tests.torch_threads import torch_threads

BLOCK_SIZE = 8
NUM_BLOCKS = 120
TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GREEDY = SampleSpec(params=SamplingParams(temperature=0.0, return_margins=True), allow_stop=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Case:
    """A tiny model, here and in transformers, on a cache full of NaN."""

    def __init__(self, folder: Path, family: str) -> None:
        write_tiny_model(folder, family)
        self.model = load_decoder(folder)
        self.plain = load_decoder(folder, backend=PLAIN)
        self.config = self.model.config
        self.folder = folder

    def runner(self, *, compiled: bool = True) -> Runner:
        """Every slot that nobody wrote would spoil a result that it reached."""
        kv_cache = KVCache(self.config, NUM_BLOCKS, BLOCK_SIZE)
        kv_cache.tensor.fill_(float("nan"))
        if compiled:
            return Runner(self.model, kv_cache, CPU)
        return Runner(self.plain, kv_cache, PLAIN)

    def expected(self, token_ids: Sequence[int]) -> Tensor:
        return hf_reference.logits(self.folder, token_ids)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("model"), request.param)


def tokens_of(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, 512, (count,), generator=generator).tolist()
    return ids


def scattered_table(seed: int, num_tokens: int, begin: int = 0) -> tuple[int, ...]:
    """Blocks in no order, drawn from 30 of the pool's, beginning at ``begin``."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(30, generator=generator) + begin
    return tuple(order[: -(-num_tokens // BLOCK_SIZE)].tolist())


def chunk(
    ids: Sequence[int], start: int, end: int, table: tuple[int, ...], sample: bool = False
) -> Chunk:
    return Chunk(
        token_ids=tuple(ids[start:end]),
        start=start,
        block_table=table,
        sample=GREEDY if sample else None,
    )


def runner_of(model: Decoder) -> Runner:
    return Runner(model, KVCache(model.config, NUM_BLOCKS, BLOCK_SIZE), CPU)


def plan_of(*chunks: Chunk) -> StepPlan:
    return StepPlan(chunks=chunks)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert (got - want).abs().max().item() <= TOLERANCE


def test_one_chunk(case: Case) -> None:
    ids = tokens_of(1, 100)
    table = scattered_table(1, 100)
    assert_close(case.runner().logits(plan_of(chunk(ids, 0, 100, table))), case.expected(ids))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [[], [39], [38, 39], [0, 47, 12]])
@pytest.mark.parametrize("compiled", [True, False])
def test_only_the_rows_that_are_wanted(case: Case, rows: list[int], compiled: bool) -> None:
    kv_cache = KVCache(case.config, NUM_BLOCKS, BLOCK_SIZE)
    backend, model = (CPU, case.model) if compiled else (PLAIN, case.plain)
    attention = backend.attention(case.config, kv_cache, torch.float32)
    ids, table = tokens_of(7, 60), scattered_table(1, 50)
    before = build_inputs(plan_of(chunk(ids, 0, 10, table)), BLOCK_SIZE)
    model.forward(before, attention)
    inputs = build_inputs(
        plan_of(chunk(ids, 10, 50, table), chunk(ids, 0, 10, (40, 41))), BLOCK_SIZE
    )
    every = model.forward(inputs, attention)
    wanted = np.array(rows, np.int64)
    some = model.forward(inputs, attention, wanted)
    torch.testing.assert_close(some, every[wanted])


@torch.inference_mode()
def test_steps_have_the_same_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's buffers are those of the step before, and none of what it returned."""
    taken: list[tuple[str, int]] = []
    take = StepMemory.take

    def noted(memory: StepMemory, name: str, num_rows: int, size: int) -> torch.Tensor:
        buffer = take(memory, name, num_rows, size)
        taken.append((name, buffer.data_ptr()))
        return buffer

    monkeypatch.setattr(StepMemory, "take", noted)
    caches = [KVCache(case.config, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)]
    forward = CPU.forward_pass(case.model, caches[0])
    ids, table, rows = tokens_of(7, 60), scattered_table(1, 60), np.arange(20)
    plans = plan_of(chunk(ids, 0, 40, table)), plan_of(chunk(ids, 40, 60, table))
    first, second = (forward(build_inputs(plan, BLOCK_SIZE), rows) for plan in plans)
    assert len(taken) == 2 * len(set(taken)) > 0
    attention = CPU.attention(case.config, caches[1], torch.float32)
    for plan, hidden in zip(plans, (first, second), strict=True):
        inputs = build_inputs(plan, BLOCK_SIZE)
        assert torch.equal(hidden, case.model.forward(inputs, attention, rows))


@pytest.mark.parametrize("sizes", [(1,) * 50, (7, 1, 13, 29), (8, 8, 34), (33, 17), (49, 1)])
@pytest.mark.parametrize("compiled", [True, False])
def test_chunks_of_odd_sizes(case: Case, sizes: tuple[int, ...], compiled: bool) -> None:
    ids = tokens_of(2, 50)
    table = scattered_table(2, 50)
    runner = case.runner(compiled=compiled)
    rows, start = [], 0
    for size in sizes:
        rows.append(runner.logits(plan_of(chunk(ids, start, start + size, table))))
        start += size
    assert_close(torch.cat(rows), case.expected(ids))


def test_longest_sequence(case: Case) -> None:
    length = case.config.max_position
    ids = tokens_of(3, length)
    table = tuple(reversed(range(NUM_BLOCKS - -(-length // BLOCK_SIZE), NUM_BLOCKS)))
    runner = case.runner()
    rows = [
        runner.logits(plan_of(chunk(ids, start, min(start + 200, length), table)))
        for start in range(0, length, 200)
    ]
    assert_close(torch.cat(rows), case.expected(ids))


@pytest.mark.parametrize("compiled", [True, False])
def test_mixed_batch(case: Case, compiled: bool) -> None:
    """Four sequences: two decode, one begins, one goes on; the plan in no special order."""
    lengths = (90, 41, 40, 77)
    ids = [tokens_of(10 + i, length) for i, length in enumerate(lengths)]
    tables = [scattered_table(i, length, 30 * i) for i, length in enumerate(lengths)]
    runner = case.runner(compiled=compiled)
    for i, computed in ((0, 89), (1, 40), (3, 50)):
        runner.logits(plan_of(chunk(ids[i], 0, computed, tables[i])))
    got = runner.logits(
        plan_of(
            chunk(ids[3], 50, 77, tables[3]),
            chunk(ids[0], 89, 90, tables[0]),
            chunk(ids[2], 0, 40, tables[2]),
            chunk(ids[1], 40, 41, tables[1]),
        )
    )
    expected = [case.expected(token_ids) for token_ids in ids]
    want = (expected[3][50:], expected[0][89:], expected[2], expected[1][40:])
    assert_close(got, torch.cat(want))


@pytest.mark.parametrize("compiled", [True, False])
def test_neighbours_do_not_matter(case: Case, compiled: bool) -> None:
    """A row alone and among many longer rows."""
    count = 4
    ids = [tokens_of(20 + i, 5 + 25 * i) for i in range(count)]
    tables = [scattered_table(i, len(token_ids), 30 * i) for i, token_ids in enumerate(ids)]
    runner = case.runner(compiled=compiled)
    for token_ids, table in zip(ids, tables, strict=True):
        runner.logits(plan_of(chunk(token_ids, 0, len(token_ids) - 1, table)))
    lasts = [
        chunk(token_ids, len(token_ids) - 1, len(token_ids), table)
        for token_ids, table in zip(ids, tables, strict=True)
    ]
    together = runner.logits(plan_of(*lasts))
    for index, last in enumerate(lasts):
        assert_close(runner.logits(plan_of(last)), together[index : index + 1])


@given(data=st.data())
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_way_of_cutting(case: Case, data: st.DataObject) -> None:
    """Three sequences advance by random chunks in the same steps."""
    ids = [tokens_of(30 + i, length) for i, length in enumerate((23, 40, 61))]
    tables = [scattered_table(i, len(token_ids), 30 * i) for i, token_ids in enumerate(ids)]
    runner = case.runner()
    done = [0, 0, 0]
    rows: list[list[Tensor]] = [[], [], []]
    while any(done[i] < len(ids[i]) for i in range(3)):
        sizes = [data.draw(st.sampled_from((0, 1, 1, 5, 8, 16, 30))) for _ in range(3)]
        if not any(sizes):
            sizes = [1, 1, 1]
        ends = [min(done[i] + sizes[i], len(ids[i])) for i in range(3)]
        active = [i for i in range(3) if ends[i] > done[i]]
        if not active:
            continue
        got = runner.logits(plan_of(*(chunk(ids[i], done[i], ends[i], tables[i]) for i in active)))
        for i, part in zip(
            active, torch.split(got, [ends[i] - done[i] for i in active]), strict=True
        ):
            rows[i].append(part)
            done[i] = ends[i]
    for i in range(3):
        assert_close(torch.cat(rows[i]), case.expected(ids[i]))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("length", [33, 40, 47, 48, 49, 72])
def test_what_is_not_needed_of_a_block_reaches_no_result(
    case: Case, length: int, dtype: torch.dtype, compiled: bool
) -> None:
    """The windows are 32 tokens, so 40, 48 and 72 have blocks with holes; here, full of NaN.

    One goes on behind the last token, with a chunk or token by token; or from the first token
    of the last block on, as where that is computed once more.
    """
    ids, table = tokens_of(80 + length, 90), scattered_table(length, 90)
    backend, model = (CPU, case.model) if compiled else (PLAIN, case.plain)
    whole, holed = (KVCache(case.config, 30, BLOCK_SIZE, dtype) for _ in range(2))
    runners = [Runner(model, kv_cache, backend) for kv_cache in (whole, holed)]
    runners[0].logits(plan_of(chunk(ids, 0, length, table)))
    layout = kv_layout(case.config, whole, "", torch.float32)
    needs, holes = BlockNeeds.of(layout), 0
    blocks = [kv_cache.memory.bytes.view(30, -1) for kv_cache in (whole, holed)]
    last_block = (length - 1) // BLOCK_SIZE
    again = last_block * BLOCK_SIZE
    for ends in ([length, 90], [*range(length, length + 9)], [again, length], [again, again + 1]):
        blocks[1].fill_(0xFF)  # NaN in every type, and int8's scales
        for index in range(last_block + 1):
            num_bytes = needs.num_bytes_of(index, length)
            blocks[1][table[index], :num_bytes] = blocks[0][table[index], :num_bytes]
            holes += num_bytes < whole.block_bytes
        for start, end in pairwise(ends):
            plan = plan_of(chunk(ids, start, end, table))
            want, got = (runner.logits(plan) for runner in runners)
            assert torch.isfinite(got).all()
            assert torch.equal(got, want)
    slides = any(layer.sliding_window for layer in case.config.layers)
    assert bool(holes) == (slides and length > 32 + BLOCK_SIZE)


def test_execute_draws_what_is_asked_for(case: Case) -> None:
    ids = [tokens_of(40 + i, length) for i, length in enumerate((30, 12, 20))]
    tables = [scattered_table(i, 31, 30 * i) for i in range(3)]
    runner = case.runner()
    runner.execute(plan_of(chunk(ids[1], 0, 11, tables[1])))
    output = runner.execute(
        plan_of(
            chunk(ids[0], 0, 30, tables[0], sample=True),
            chunk(ids[2], 0, 10, tables[2]),
            chunk(ids[1], 11, 12, tables[1], sample=True),
        )
    )
    assert output.duration_s > 0
    assert output.tokens[1] is None
    for index, sequence in ((0, 0), (2, 1)):
        token = output.tokens[index]
        assert isinstance(token, SampledToken)
        top = torch.topk(case.expected(ids[sequence])[-1], 2)
        assert token.token_id == top.indices[0]
        assert token.margin == pytest.approx(float(top.values[0] - top.values[1]), abs=2e-4)


def test_a_token_that_is_not_numbers_spoils_its_own_sequence_only(case: Case) -> None:
    ids = [tokens_of(60 + i, 40) for i in range(2)]
    tables = [scattered_table(i, 40, 30 * i) for i in range(2)]
    ids[1][39] = broken_id = 511
    ids[0] = [token_id if token_id != broken_id else 5 for token_id in ids[0]]
    runner = case.runner()
    alone = runner.execute(plan_of(chunk(ids[0], 0, 40, tables[0], sample=True)))
    weights = case.model.weights
    assert isinstance(weights.embedding, torch.Tensor)
    embedding = weights.embedding.clone()  # the head may share the model's own
    embedding[broken_id] = float("nan")
    case.model.weights = replace(weights, embedding=embedding)
    try:
        for begin in (0, 39):  # both prefilled, then both decode
            got = runner.execute(
                plan_of(*(chunk(ids[i], begin, 40, tables[i], sample=True) for i in range(2)))
            )
            token, error = got.tokens
            assert isinstance(error, LogitsError)
            assert isinstance(token, SampledToken)
            assert isinstance(alone.tokens[0], SampledToken)
            assert token.token_id == alone.tokens[0].token_id
    finally:
        case.model.weights = weights


def test_warm_up_leaves_zeros(case: Case) -> None:
    kv_cache = KVCache(case.config, 4, BLOCK_SIZE)
    ratios: list[float] = []
    Runner(case.model, kv_cache, CPU).warm_up(ratios.append)
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    assert not kv_cache.tensor.any()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sizes", [(31, 28, 1), (1,) * 60], ids=["chunks", "decode"])
def test_bfloat16_is_as_near_as_transformers(
    case: Case, compiled: bool, sizes: tuple[int, ...]
) -> None:
    """To float32: what is rounded in one place is not in another."""
    backend = CPU if compiled else PLAIN
    kv_cache = KVCache(case.config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
    model = load_decoder(case.folder, torch.bfloat16, backend=backend)
    runner = Runner(model, kv_cache, backend)
    ids, table = tokens_of(50, 60), scattered_table(1, 60)
    ends = list(accumulate(sizes))
    rows = [
        runner.logits(plan_of(chunk(ids, end - size, end, table)))
        for size, end in zip(sizes, ends, strict=True)
    ]
    want = case.expected(ids)
    error = (torch.cat(rows) - want).abs().mean()
    own = (hf_reference.logits(case.folder, ids, torch.bfloat16) - want).abs().mean()
    assert error < 1.05 * own


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sizes", [(200,), (7, 1, 60, 33, 1, 98)], ids=["one chunk", "chunks"])
def test_mistral_with_types_of_layers(
    tmp_path: Path, sizes: tuple[int, ...], compiled: bool
) -> None:
    """As Ministral has them: far behind the windows only the full layer's keys are needed."""
    types = {"layer_types": ["full_attention", *["sliding_attention"] * 3]}
    write_tiny_model(tmp_path, "mistral", num_layers=4, shape=types)
    backend = CPU if compiled else PLAIN
    model = load_decoder(tmp_path, backend=backend)
    kv_cache = KVCache(model.config, NUM_BLOCKS, BLOCK_SIZE)
    runner = Runner(model, kv_cache, backend)
    ids, table, ends = tokens_of(90, 200), scattered_table(90, 200), list(accumulate(sizes))
    rows = [
        runner.logits(plan_of(chunk(ids, end - size, end, table)))
        for size, end in zip(sizes, ends, strict=True)
    ]
    assert_close(torch.cat(rows), hf_reference.logits(tmp_path, ids))
    needs = BlockNeeds.of(kv_layout(model.config, kv_cache, "", torch.float32))
    behind, last = needs.num_bytes_of(0, 200), needs.num_bytes_of(24, 200)
    assert 4 * behind == last == kv_cache.block_bytes


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_with_images(tmp_path: Path, prefix: str) -> None:
    """A folder as the larger Gemma 3 have it: other tensors beside the decoder's.

    Full layers' rotary frequencies are scaled, in the spelling of either transformers.
    """
    hf_reference.write_gemma3_with_images(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ropes = config["text_config"]["rope_parameters"]
    assert ropes["full_attention"]["factor"] == 8.0
    if prefix == "language_model.model.":
        del config["text_config"]["rope_parameters"]
        config["text_config"]["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("language_model.model.", prefix): t for name, t in tensors.items()}
    assert any(name.startswith("vision_tower.") for name in renamed)
    ids = tokens_of(70, 100)
    want = hf_reference.logits(tmp_path, ids)
    save_file(renamed, path)
    runner = runner_of(load_decoder(tmp_path))
    assert_close(runner.logits(plan_of(chunk(ids, 0, 100, scattered_table(1, 100)))), want)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        YARN | {"beta_fast": 6, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.9},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"mscale": 0.7},
        YARN | {"factor": None, "attention_factor": None},
    ],
    ids=lambda scaling: "-".join([str(scaling["rope_type"]), *list(scaling)[3:]]),
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters", "both"])
def test_scaled_rope(tmp_path: Path, scaling: dict[str, object], spelling: str) -> None:
    write_tiny_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    theta = content["rope_theta"]
    if spelling == "rope_parameters":
        scaling = scaling | {"rope_theta": content.pop("rope_theta")}
    spellings = ("rope_scaling", "rope_parameters") if spelling == "both" else (spelling,)
    path.write_text(json.dumps(content | dict.fromkeys(spellings, scaling)))
    assert theta == 10000.0
    runner = runner_of(load_decoder(tmp_path))
    ids = tokens_of(60, 200)
    want = hf_reference.logits(tmp_path, ids)
    assert_close(runner.logits(plan_of(chunk(ids, 0, 200, scattered_table(1, 200)))), want)

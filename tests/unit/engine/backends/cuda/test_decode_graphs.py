"""Steps of single tokens as graphs: which one, what it reads, and that rows it lacks are nobody's.

Graphs are recorded here, not a device's: what was captured is run again on the same memory.
"""

from tests.triton_interpreter import INTERPRETED

# isort: split
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.backends.cuda.attention import _Decodes
from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.backends.cuda.device_tables import DeviceTables
from diptych.engine.backends.cuda.graphed_pass import BUCKETS, GraphedPass
from diptych.engine.backends.cuda.grouped_linear import _TILINGS, GroupedLinear
from diptych.engine.inputs import StepInputs, build_inputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.sampling_params import SamplingParams
from tests.engines import PLAIN, load_decoder
from tests.tiny_model import write_tiny_model
from tests.unit.engine.backends.cuda.recorded_graphs import RecordedGraphs

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_COLUMNS = 4, 6
SPEC = SampleSpec(params=SamplingParams(temperature=0.0), allow_stop=True)


class Row(NamedTuple):
    """One sequence's part of a step."""

    token_id: int
    num_tokens: int  # its own included
    table: list[int]


def rows_of(num_blocks: int) -> st.SearchStrategy[Row]:
    blocks = st.integers(0, 40)
    tables = st.lists(blocks, min_size=num_blocks, max_size=num_blocks)
    lengths = st.integers((num_blocks - 1) * BLOCK_SIZE + 1, num_blocks * BLOCK_SIZE)
    return st.builds(Row, st.integers(0, 99), lengths, tables)


ROWS = st.integers(1, NUM_COLUMNS).flatmap(rows_of)
STEPS = st.lists(st.lists(ROWS, min_size=1, max_size=9), min_size=1, max_size=6)


def plan_of(rows: list[Row]) -> StepPlan:
    return StepPlan(
        chunks=tuple(
            Chunk(
                token_ids=(row.token_id,),
                start=row.num_tokens - 1,
                block_table=tuple(row.table),
                sample=SPEC,
            )
            for row in rows
        )
    )


def padded(rows: list[Row]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    num_blocks = np.array([len(row.table) for row in rows])
    tables = np.zeros((len(rows), num_blocks.max()), np.int64)
    for at, row in enumerate(rows):
        tables[at, : len(row.table)] = row.table
    return tables, num_blocks


@given(STEPS)
@settings(deadline=None)
def test_tables_sent_by_differences_are_whole(steps: list[list[Row]]) -> None:
    device = DeviceTables(9, NUM_COLUMNS, CPU)
    sent: dict[tuple[int, int], int] = {}  # all that the device was ever told
    for rows in steps:
        before, num_new = device.num_sent, 0
        device.update(*padded(rows))
        for at, row in enumerate(rows):
            assert device.tensor[at, : len(row.table)].tolist() == row.table
            for column, block_id in enumerate(row.table):
                num_new += sent.get((at, column)) != block_id
                sent[at, column] = block_id
        assert device.num_sent - before == num_new, "no more than what is other than before"


def test_what_may_not_have_been_sent_is_sent_again() -> None:
    device = DeviceTables(2, 3, CPU)
    first = np.array([[7, 8]])
    device.update(first, np.array([2]))
    whole, device.tensor = device.tensor, torch.zeros(1, 1)  # no such place: it breaks off
    with pytest.raises((IndexError, RuntimeError)):
        device.update(np.array([[7, 9]]), np.array([2]))
    whole[0, 1] = 9  # it may have got so far
    device.tensor = whole
    device.update(first, np.array([2]))
    assert device.tensor[0].tolist() == [7, 8, 0]


class CheckSums:
    """A model whose hidden state is a sum over all that its inputs say of a row."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_position=NUM_COLUMNS * BLOCK_SIZE)
        self.weights = SimpleNamespace(embedding=torch.zeros(1))
        self.seen: list[StepInputs] = []

    def forward(self, inputs: StepInputs, attention: object) -> Tensor:
        batch = inputs.decodes
        assert batch is not None
        self.seen.append(inputs)
        places = torch.arange(batch.block_tables.shape[1])
        is_own = places[None] * BLOCK_SIZE < batch.context_lens[:, None]
        tables = (batch.block_tables * is_own * (places + 1)).sum(1)
        parts = (inputs.token_ids, inputs.positions, inputs.slots, batch.context_lens, tables)
        return torch.stack(parts, dim=1).double()


def not_asked(inputs: StepInputs, rows: object) -> Tensor:
    return torch.full((1, 1), -5.0)


def graphed(model: Any, graphs: RecordedGraphs) -> GraphedPass:
    cache: Any = SimpleNamespace(block_size=BLOCK_SIZE, num_blocks=99)
    return GraphedPass(model, cache, SimpleNamespace(), not_asked, graphs)


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_a_graph_reads_this_steps_inputs_and_no_others(steps: list[list[Row]]) -> None:
    model, graphs = CheckSums(), RecordedGraphs()
    run = graphed(model, graphs)
    for rows in steps:
        inputs = build_inputs(plan_of(rows), BLOCK_SIZE)
        got = run(inputs, inputs.last_rows)
        assert torch.equal(got, CheckSums().forward(inputs, None))
        bucket = min(size for size in BUCKETS if size >= len(rows))
        assert graphs.runs[-1] == bucket
        own = model.seen[-1]
        assert own.decodes is not None
        assert len(own.token_ids) == bucket
        assert (own.slots[len(rows) :] < 0).all(), "a row that nobody has writes nothing"
        assert not own.decodes.context_lens[len(rows) :].any(), "and reads nothing"
    assert graphs.num_captured == len(set(graphs.runs)), "each once"


def test_prompts_and_larger_batches_are_launched_as_ever() -> None:
    run = graphed(CheckSums(), RecordedGraphs())
    prompt = Chunk(token_ids=(1, 2), start=0, block_table=(3,), sample=SPEC)
    single = plan_of([Row(1, 5, [2, 3])]).chunks
    for chunks in ((prompt,), (prompt, *single), single * (BUCKETS[-1] + 1)):
        inputs = build_inputs(StepPlan(chunks=chunks), BLOCK_SIZE)
        assert run(inputs, inputs.last_rows).item() == -5
    assert (
        run(build_inputs(StepPlan(chunks=single), BLOCK_SIZE), np.zeros(1, np.int64)).shape[1] > 1
    )


def test_three_rows_in_a_graph_of_four_leave_the_pool_as_without(tmp_path: Path) -> None:
    """The same tokens and the same KV: of the row that nobody has, nothing is written."""
    write_tiny_model(tmp_path, "gemma3", num_layers=1)
    graphs = RecordedGraphs()
    found = []
    for backend in (INTERPRETED, CudaBackend(CPU, graphs)):
        model = load_decoder(tmp_path, backend=backend)
        cache = KVCache(model.config, 5, 8, model.dtype, backend.kv_memory)
        cache.memory.bytes.fill_(0xFF)  # NaN, whatever is read that nobody wrote
        runner = Runner(model, cache, backend)
        rows = [Row(7, 1, [4]), Row(9, 1, [2]), Row(11, 1, [0])]
        later = [Row(5, 2, [2]), Row(6, 2, [4])]
        tokens = [runner.execute(plan_of(step)).tokens for step in (rows, later)]
        found.append((str(tokens), cache.memory.bytes.clone()))
    assert graphs.runs == [4, 2]
    assert found[1][0] == found[0][0]
    eager, padded_pool = (pool.view(torch.float32) for _, pool in found)
    assert torch.equal(padded_pool.isnan(), eager.isnan())
    assert torch.allclose(padded_pool, eager, atol=1e-5, equal_nan=True)


def test_warming_up_captures_every_graph(tmp_path: Path) -> None:
    assert CudaBackend(CPU, RecordedGraphs()).decode_sizes == BUCKETS
    write_tiny_model(tmp_path, "llama", num_layers=1)
    sizes: list[int] = []

    class Counting(type(PLAIN)):  # type: ignore[misc]
        decode_sizes = (3, 20, 64)
        mixed_sizes = (33,)

        def forward_pass(self, model: Any, kv_cache: Any) -> Any:
            made = super().forward_pass(model, kv_cache)

            def forward(inputs: StepInputs, rows: Any) -> Tensor:
                sizes.append(len(inputs.token_ids))
                return made(inputs, rows)  # type: ignore[no-any-return]

            return forward

    backend = Counting(CPU)
    decoder = load_decoder(tmp_path, backend=backend)
    told: list[float] = []
    Runner(decoder, KVCache(decoder.config, 4, 8), backend).warm_up(told.append, 40)
    assert {3, 20, 40, 33} < set(sizes)
    assert 64 not in sizes, "there may be no memory for more than ever come"
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize("max_rows", [1, 64])
def test_warming_up_compiles_products_of_any_number_of_rows(
    max_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attention of single tokens in one part, as short contexts have it."""
    write_tiny_model(tmp_path, "llama", num_layers=1)
    sizes: set[int] = set()
    nums_parts: set[int] = set()
    multiply, attend = GroupedLinear.__call__, _Decodes.attend

    def multiplied(self: GroupedLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        sizes.add(len(x))
        return multiply(self, x, out)

    def attended(self: _Decodes, *arguments: Any) -> None:
        nums_parts.add(self._num_parts)
        attend(self, *arguments)

    monkeypatch.setattr(GroupedLinear, "__call__", multiplied)
    monkeypatch.setattr(_Decodes, "attend", attended)
    backend = CudaBackend(CPU)
    decoder = load_decoder(tmp_path, quantization="int8-weights", backend=backend)
    Runner(decoder, KVCache(decoder.config, 4, 8), backend).warm_up(max_rows=max_rows)
    few, some = (tiling.max_rows for tiling in _TILINGS)
    assert 1 in sizes
    assert any(1 < size <= few for size in sizes)
    assert any(few < size <= some for size in sizes)
    assert any(size > some for size in sizes)
    assert 1 in nums_parts


def test_what_a_host_would_have_to_see_is_refused_where_graphs_are_recorded() -> None:
    size = torch.ones((), dtype=torch.int64)
    with pytest.raises(AssertionError, match="within a graph"):
        RecordedGraphs().capture(lambda: torch.zeros(int(size)))

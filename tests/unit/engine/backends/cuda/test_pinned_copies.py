"""What a step is sent goes through memory that stays, and is not written over while it is read."""

from tests.triton_interpreter import INTERPRETED

# isort: split
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.engine.backends.base import Mark
from diptych.engine.backends.cuda.backend import CudaBackend
from diptych.engine.backends.cuda.pinned_copies import PinnedCopies
from diptych.engine.backends.torch.marks import HostMark
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.errors import DeviceLostError
from diptych.sampling_params import SamplingParams
from tests.engines import PLAIN, load_decoder
from tests.step_rig import StepRig
from tests.tiny_model import write_tiny_model
from tests.unit.engine.backends.cuda.recorded_graphs import RecordedGraphs

# Numbers that are none are asked of a part without tokens, and not used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

BLOCK_SIZE = 8


class CountedMemory:
    """Implements ``CopyMemory``; its device copies when a mark is waited for, and not before."""

    def __init__(self) -> None:
        self.allocated: list[int] = []  # bytes, of the host
        self.said: list[str] = []
        self.num_marks = 0
        self.error: Exception | None = None

    def on_host(self, num_bytes: int) -> Tensor:
        self.allocated.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def on_device(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        self.num_marks += 1
        return _Said(self, self.num_marks)


class _Said(HostMark):
    def __init__(self, memory: CountedMemory, number: int) -> None:
        self._memory, self._number = memory, number

    def wait(self) -> None:
        self._memory.said.append(f"waited for {self._number}")
        if self._memory.error is not None:
            raise self._memory.error


def test_what_is_sent_is_there_in_any_shape() -> None:
    copies = PinnedCopies(CountedMemory(), 2)
    copies.begin_step()
    sent = [
        np.arange(5),
        np.arange(6).reshape(2, 3).T,
        np.zeros(0, np.int64),
        np.linspace(0, 1, 7),
        np.arange(40_000),  # more than there was room for
        np.array([True, False]),
    ]
    got = [copies.send(values) for values in sent]
    for values, tensor in zip(sent, got, strict=True):
        assert np.array_equal(tensor.numpy(), values)
        assert tensor.numpy().dtype == values.dtype


def test_a_buffer_is_filled_anew_when_the_device_has_done_what_had_it() -> None:
    memory = CountedMemory()
    copies = PinnedCopies(memory, 2)
    sent = []
    for step in range(5):
        copies.begin_step()
        sent.append(copies.send(np.full(3, step)))
        assert memory.said == [f"waited for {at}" for at in range(1, step)], "no more, no less"
        for before in sent[-2:-1]:
            assert before.tolist() == [step - 1] * 3, "the step in flight has its own"
    assert memory.num_marks == 4
    assert len({tensor.data_ptr() for tensor in sent}) == len(memory.allocated) == 2


def test_a_lost_device_is_told_before_anything_is_written_over() -> None:
    memory = CountedMemory()
    copies = PinnedCopies(memory, 1)
    copies.begin_step()
    sent = copies.send(np.array([7]))
    memory.error = DeviceLostError("lost")
    with pytest.raises(DeviceLostError):
        copies.begin_step()
    assert sent.tolist() == [7]


def test_steps_allocate_nothing_and_draw_the_same(tmp_path: Path) -> None:
    """Prompts, graphs of single tokens, and tokens that the device alone has."""
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    memory = CountedMemory()
    on_device = CudaBackend(INTERPRETED.device, RecordedGraphs(), PinnedCopies(memory, 2))
    answers = []
    for backend in (PLAIN, on_device):
        decoder = load_decoder(tmp_path, backend=backend)
        cache = KVCache(decoder.config, 32, BLOCK_SIZE, decoder.dtype)
        runner = Runner(decoder, cache, backend)
        rig = StepRig(runner, BlockPool(32, BLOCK_SIZE), 96, backend.steps_in_flight)
        seqs = [
            rig.add(at, range(3, 3 + length), SamplingParams(temperature=0.0, max_tokens=count))
            for at, (length, count) in enumerate([(9, 7), (30, 4)])
        ]
        rig.step()
        num_allocated = len(memory.allocated)
        rig.run()
        answers.append([seq.token_ids for seq in seqs])
    assert answers[1] == answers[0]
    assert num_allocated == len(memory.allocated) == 2
    assert rig.num_ahead > 3
    assert memory.num_marks >= rig.num_steps - 1

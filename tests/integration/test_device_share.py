"""How large a pool a worker takes of a device's own memory: what its largest step leaves."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from decode_worker.config import DecodeWorkerConfig
from diptych.engine.backends.base import DeviceMemory, ForwardPass, MemoryUsage
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.inputs import StepInputs
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.decoder import Decoder
from diptych.engine.model.parts import Rows
from diptych.engine.scheduling.step import SampledToken, SampleSpec
from diptych.errors import ConfigurationError, LogitsError
from diptych.progress import silent
from diptych.worker import loading
from diptych.worker.loading import LoadedModel
from tests.tiny_model import write_tiny_model

NUM_SCRATCH = 3
WEIGHTS, BYTES_A_ROW, BYTES_A_GRAPH, TOTAL = 40_000, 1000, 3000, 10_000_000


class CountedBackend(TorchBackend):
    """A device that counts its weights, 1,000 bytes for each row of a step while it runs, and 3,000

    for each size of steps of single tokens that it has run, as long as there is who would run it
    again: that of one is the next of its ``decode_sizes``, as graphs have it.
    """

    def __init__(self, max_rows: int = 10_000) -> None:
        super().__init__(torch.device("cpu"))
        self.memory: DeviceMemory | None = self
        self.done: list[str] = []
        self._max_rows = max_rows
        self._num_graphs, self._peak = 0, WEIGHTS

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        self.done.append(f"pool of {num_bytes}")
        return super().kv_memory(num_bytes)

    def forward_pass(self, model: Decoder, kv_cache: KVCache) -> ForwardPass:
        made = super().forward_pass(model, kv_cache)
        graphs: set[int] = set()

        def forward(inputs: StepInputs, rows: Rows) -> Tensor:
            num_rows = len(inputs.token_ids)
            if num_rows > self._max_rows:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            size = next((each for each in self.decode_sizes if each >= num_rows), None)
            if not inputs.prefills and size is not None and size not in graphs:
                graphs.add(size)
                self._num_graphs += 1
            self._peak = max(self._peak, self._held + BYTES_A_ROW * num_rows)
            return made(inputs, rows)

        weakref.finalize(forward, self._drop, graphs)
        return forward

    def _drop(self, graphs: set[int]) -> None:
        self._num_graphs -= len(graphs)

    @property
    def _held(self) -> int:
        return WEIGHTS + BYTES_A_GRAPH * self._num_graphs

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[SampledToken | LogitsError]:
        self.done.append(f"{len(logits)} drawn")
        return super().sample(logits, specs, positions)

    def release_unused(self) -> None:
        self.done.append("released")
        self._peak = self._held

    def usage(self) -> MemoryUsage:
        return MemoryUsage(TOTAL, TOTAL - self._held, self._held, self._peak)


def load(backend: CountedBackend, folder: Path, **settings: object) -> LoadedModel:
    config = DecodeWorkerConfig.model_validate(
        {
            "model": str(write_tiny_model(folder)),
            "max_batched_tokens": 200,
            "max_num_seqs": 50,
            "num_threads": torch.get_num_threads(),
            **settings,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "make_backend", lambda device, share, attention: backend)
        return loading.load_model(config, "full", NUM_SCRATCH, silent)


def test_the_pool_is_what_the_largest_step_leaves(tmp_path: Path) -> None:
    backend = CountedBackend()
    model = load(backend, tmp_path, gpu_memory_utilization=0.5)
    block_bytes = model.kv_cache.block_bytes
    num_graphs = len(backend.decode_sizes)
    left = TOTAL // 2 - WEIGHTS - num_graphs * BYTES_A_GRAPH - 200 * BYTES_A_ROW
    want = left // block_bytes
    assert model.kv_cache.num_blocks == want == model.num_blocks + NUM_SCRATCH
    assert backend.done[:9] == [
        "released",
        f"pool of {block_bytes}",
        *("1 drawn", "1 drawn", "2 drawn", "16 drawn"),
        "50 drawn",
        "released",
        f"pool of {want * block_bytes}",
    ]
    assert backend.usage().held_bytes == WEIGHTS + num_graphs * BYTES_A_GRAPH, "anew, on the pool"
    assert not model.kv_cache.tensor.any()


@pytest.mark.parametrize("setting", [{"num_blocks": 20}, {"kv_cache_memory": 200_000}])
def test_a_pool_that_is_said_needs_no_measuring(tmp_path: Path, setting: dict[str, object]) -> None:
    backend = CountedBackend()
    model = load(backend, tmp_path, gpu_memory_utilization=0.001, **setting)
    want = 20 + NUM_SCRATCH if "num_blocks" in setting else 200_000 // model.kv_cache.block_bytes
    assert model.kv_cache.num_blocks == want
    assert backend.done[0] == f"pool of {want * model.kv_cache.block_bytes}"


@pytest.mark.parametrize(
    ("max_rows", "utilization", "says"),
    [
        (10_000, 0.02, "^gpu_memory_utilization: 0.02 .* no more than the 249000 "),
        (10_000, 0.0254, "^gpu_memory_utilization: 5000 bytes hold 0 blocks"),
        (199, 0.9, "^max_batched_tokens: .* 200 tokens: tried to allocate 20 GiB"),
    ],
)
def test_a_device_that_is_too_small_is_told_by_the_setting(
    tmp_path: Path, max_rows: int, utilization: float, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load(CountedBackend(max_rows), tmp_path, gpu_memory_utilization=utilization)


def test_no_room_for_weights_or_steps_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"^kv_cache_memory or gpu_memory.*20 GiB"):
        load(CountedBackend(max_rows=3), tmp_path, num_blocks=20)

    def full(*asked: object) -> NoReturn:
        raise torch.OutOfMemoryError("tried to allocate 16 GiB")

    monkeypatch.setattr(loading, "load_weights", full)
    with pytest.raises(ConfigurationError, match=rf"^model: .* {tmp_path.name}: .*16 GiB"):
        load(CountedBackend(), tmp_path)

"""A worker whose ranks have a device each: it takes their pools' memory and gives it to them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decode_worker.config import DecodeWorkerConfig
from diptych.engine.backends.base import DeviceMemory, MemoryUsage
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv import device_handle
from diptych.engine.kv.cache import KVCache
from diptych.engine.kv.memory import KVMemory
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.parallel import leader
from diptych.engine.parallel.process_ranks import ProcessRanks
from diptych.engine.runner import Runner
from diptych.errors import ConfigurationError
from diptych.formats import DeviceName, PrefillAttentionName
from diptych.progress import silent
from diptych.worker import loading, rank
from diptych.worker.device_rank_pools import DeviceRankPools
from diptych.worker.loading import LoadedModel
from diptych.worker.pool_memory import pool_memory
from kvtransfer.digest import Coverage
from tests.device_on_host import DeviceOnHost
from tests.engine_logits import chunk_logits
from tests.engines import PLAIN, load_decoder
from tests.ranks_in_threads import ranks_in_threads
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads

NUM_SCRATCH, TABLE = 3, (4, 1, 3)
IDS = [(7 * i * i + 11 * i) % 500 + 5 for i in range(40)]
TOTAL, HELD = 4_000_000, 1_000_000


class DeviceBackend(TorchBackend):
    """Has as many devices as it is asked for, and says that weights and steps take one MB."""

    def __init__(self, num_devices: int = 2) -> None:
        super().__init__(torch.device("cpu"))
        self.memory: DeviceMemory | None = self
        self.taken: list[tuple[int, int]] = []  # bytes, of the device of a rank
        self.log: list[tuple[int, str]] = []  # what threads have waited for
        self._num_devices = num_devices

    def kv_memory(self, num_bytes: int, rank: int = 0) -> KVMemory:
        if rank >= self._num_devices:
            raise RuntimeError("no room")
        self.taken.append((num_bytes, rank))
        memory = DeviceOnHost(num_bytes)
        memory.device_id = rank
        return memory

    def synchronise(self) -> None:
        self.log.append((threading.get_ident(), "device"))
        super().synchronise()

    def release_unused(self) -> None: ...

    def usage(self) -> MemoryUsage:
        return MemoryUsage(TOTAL, TOTAL - HELD, HELD, HELD)


class Rig:
    """Loads a worker of two ranks; handles are places in a list."""

    def __init__(self, folder: Path, backend: DeviceBackend) -> None:
        self.made: list[tuple[RankShare, PrefillAttentionName]] = []  # backends, for whom
        self._folder, self._backend = folder, backend

    def load(self, **settings: object) -> LoadedModel:
        config = DecodeWorkerConfig.model_validate(
            {
                "model": str(self._folder),
                "device": "cuda",
                "tensor_parallel": 2,
                "max_num_seqs": 4,
                "max_batched_tokens": 64,
                "num_threads": 1,
                **settings,
            }
        )
        handed: list[torch.Tensor] = []

        def handle_of(memory: torch.Tensor) -> bytes:
            handed.append(memory)
            return bytes([len(handed) - 1])

        def made(
            device: DeviceName, share: RankShare, prefill_attention: PrefillAttentionName
        ) -> DeviceBackend:
            self.made.append((share, prefill_attention))
            return self._backend

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader, "handle_of", handle_of)
            patch.setattr(device_handle, "opened", lambda handle: handed[handle[0]])
            patch.setattr(loading, "make_backend", made)
            patch.setattr(rank, "make_backend", made)
            return loading.load_model(config, "full", NUM_SCRATCH, silent)


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    with torch_threads(1), ranks_in_threads():
        yield


def test_ranks_write_into_what_the_worker_has_taken_on_their_devices(tmp_path: Path) -> None:
    folder, backend = write_tiny_model(tmp_path / "model"), DeviceBackend()
    rig = Rig(folder, backend)
    model = rig.load(num_blocks=5, prefill_attention="flashinfer")
    try:
        assert sorted(rig.made) == [(RankShare(rank, 2), "flashinfer") for rank in (0, 1)]
        num_bytes = model.kv_cache.num_bytes
        assert backend.taken == [(num_bytes, 0), (num_bytes, 1)]
        assert isinstance(model.memory, DeviceRankPools)
        assert [part.device_id for part in model.memory.parts] == [0, 1]
        assert [part.shared_fd for part in model.memory.parts] == [None, None]
        assert model.layout.tensor_parallel_size == 2
        whole = KVCache(ModelConfig.from_folder(folder), 8, model.kv_cache.block_size)
        one = Runner(load_decoder(folder, backend=PLAIN), whole, PLAIN)
        got, want = (list(chunk_logits(each, IDS, (11, 29), TABLE)) for each in (model.runner, one))
        for ours, theirs in zip(got, want, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        content = model.memory.read(range(8), 0, whole.num_bytes)
        written = torch.frombuffer(bytearray(content), dtype=torch.float32)
        assert whole.tensor.any()
        assert (written - whole.tensor.view(-1)).abs().max() <= 1e-5 * whole.tensor.abs().max()
        pool_memory(whole).write(range(8), 0, content)
        covered = [Coverage()] * 8
        assert model.memory.digests(range(8), covered) == pool_memory(whole).digests(
            range(8), covered
        )
    finally:
        assert model.team is not None
        model.team.close()


def test_a_rank_meets_the_others_when_its_device_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are announced from then on: those of all ranks."""
    backend, meet = DeviceBackend(), ProcessRanks.meet

    def logged(ranks: ProcessRanks) -> None:
        backend.log.append((threading.get_ident(), "others"))
        meet(ranks)

    monkeypatch.setattr(ProcessRanks, "meet", logged)
    model = Rig(write_tiny_model(tmp_path / "model"), backend).load(num_blocks=5)
    assert model.team is not None
    model.team.close()
    here = threading.get_ident()
    waits = [what for thread, what in backend.log if thread != here]
    meetings = [place for place, what in enumerate(waits) if what == "others"]
    assert meetings
    assert all(place and waits[place - 1] == "device" for place in meetings)


def test_pools_are_what_rank_0s_largest_step_leaves_of_each_device(tmp_path: Path) -> None:
    """It has the largest step: it draws. All that is measured runs in all ranks."""
    backend = DeviceBackend()
    model = Rig(write_tiny_model(tmp_path / "model"), backend).load(gpu_memory_utilization=0.4)
    assert model.team is not None
    model.team.close()
    own_bytes = model.kv_cache.block_bytes
    num_blocks = (TOTAL * 2 // 5 - HELD) // own_bytes
    assert model.kv_cache.num_blocks == num_blocks
    assert backend.taken == [
        *((own_bytes, rank) for rank in (0, 1)),  # of the step that is measured
        *((num_blocks * own_bytes, rank) for rank in (0, 1)),
    ]


def test_a_device_without_room_is_told_by_its_rank(tmp_path: Path) -> None:
    rig = Rig(write_tiny_model(tmp_path / "model"), DeviceBackend(num_devices=1))
    with pytest.raises(
        ConfigurationError, match=r"^gpu_memory_utilization, .* rank 1's GPU has no"
    ):
        rig.load(num_blocks=5)

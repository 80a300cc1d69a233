"""The digest that a worker tells is of what it has loaded, whatever its folder has by then."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from decode_worker.config import DecodeWorkerConfig
from diptych.engine.model.weights import DecoderWeights, load_weights
from diptych.errors import ConfigurationError
from diptych.progress import Progress, silent
from diptych.rpc.channel import open_channel
from diptych.v1 import worker_pb2, worker_pb2_grpc
from diptych.worker import loading, rank
from diptych.worker.loading import LoadedModel
from tests.cluster import Process, as_args
from tests.ranks_in_threads import ranks_in_threads
from tests.tiny_model import write_tiny_model

WITHIN_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def load(folder: Path, report: Progress = silent, **settings: object) -> LoadedModel:
    config = DecodeWorkerConfig.model_validate(
        {
            "model": str(folder),
            "max_batched_tokens": 200,
            "num_blocks": 20,
            "num_threads": torch.get_num_threads(),
            "step_trials_s": 0.0,
            **settings,
        }
    )
    return loading.load_model(config, "full", 3, report)


def digest(folder: Path) -> str:
    return load(folder).layout.model_digest


def replace(folder: Path, name: str = "model.safetensors") -> None:
    """As a rollout does, by a file of another model, at one moment."""
    other = write_tiny_model(folder.parent / "other", seed=1, vocab_size=500)
    if name == "model.safetensors":
        write_tiny_model(other, seed=1)
    (other / name).rename(folder / name)


def at(awaited: str, act: Callable[[], None]) -> Progress:
    """Once, when loading has come to this."""
    todo = [act]

    def report(stage: str, done_ratio: float) -> None:
        if stage == awaited and todo:
            todo.pop()()

    return report


def test_weights_that_come_after_others_were_read_are_not_told_of(folder: Path) -> None:
    old = digest(folder)
    loaded = load(folder, at("warming up", lambda: replace(folder)))
    assert loaded.layout.model_digest == old
    assert digest(folder) not in ("", old)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_changes_while_it_is_read_is_refused(folder: Path, name: str) -> None:
    report = at("loading weights", lambda: replace(folder, name))
    with pytest.raises(ConfigurationError, match=r"changed while .* read: start again"):
        load(folder, report)


@pytest.fixture
def in_threads() -> Iterator[None]:
    with ranks_in_threads():
        yield


@pytest.mark.usefixtures("in_threads")
def test_ranks_have_one_digest_with_a_process_that_has_all(folder: Path) -> None:
    loaded = load(folder, tensor_parallel=2, num_threads=2)
    assert loaded.team is not None
    loaded.team.close()
    assert loaded.layout.model_digest == digest(folder)


@pytest.mark.usefixtures("in_threads")
def test_a_rank_that_reads_other_files_than_the_first_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_is_done = threading.Event()

    def of_first(*args: object, **kwargs: object) -> DecoderWeights:
        weights = load_weights(*args, **kwargs)  # type: ignore[arg-type]
        first_is_done.set()
        return weights

    def of_other(*args: object, **kwargs: object) -> DecoderWeights:
        assert first_is_done.wait(WITHIN_S)
        replace(folder)
        return load_weights(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_weights", of_first)
    monkeypatch.setattr(rank, "load_weights", of_other)
    with pytest.raises(ConfigurationError, match=r"^model: its folder changed while .*: start"):
        load(folder, tensor_parallel=2, num_threads=2)


@pytest.mark.asyncio
async def test_a_process_tells_the_digest_of_the_weights_with_which_it_answers(
    folder: Path, tmp_path: Path
) -> None:
    old, new = digest(folder), write_tiny_model(tmp_path / "new", seed=1) / "model.safetensors"
    flags = as_args({"model": str(folder), "num-threads": "1", "num-blocks": "200"})
    worker = Process("prefill_worker", "prefill", tmp_path, flags)
    worker.start()
    try:
        worker.wait_listening()
        async for state in states(worker):
            if state.message.startswith(("warming up", "timing steps")):
                new.rename(folder / "model.safetensors")
                break
        async for state in states(worker):
            if state.state == worker_pb2.SERVING_STATE_READY:
                assert state.layout.model_digest == old
                break
    finally:
        worker.kill()
    assert digest(folder) != old


async def states(worker: Process) -> AsyncIterator[worker_pb2.WorkerState]:
    async with open_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async for state in stub.Watch(worker_pb2.WatchRequest(), timeout=WITHIN_S):
            yield state

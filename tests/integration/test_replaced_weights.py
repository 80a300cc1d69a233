"""While weights are replaced worker by worker, no answer is of both."""

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from diptych.client import Chunk, DiptychClient, SamplingOptions, build_request
from diptych.errors import InvalidRequestError, ModelChangedError
from diptych.v1 import inference_pb2
from tests.cluster import Cluster, Process, running_cluster
from tests.tiny_model import write_tiny_model

MAX_TOKENS = 3000  # many times longer than it takes to find out where they are made
WITHIN_S = 60.0
PATIENCE_S = 120  # longer than processes take to start on a busy machine
PROMPT = list(range(40, 60))


def asked(emitted: Sequence[int] = (), model_digest: str = "") -> inference_pb2.GenerateRequest:
    return build_request(
        token_ids=PROMPT,
        options=SamplingOptions(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0),
        emitted_token_ids=emitted,
        model_digest=model_digest,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", max_position=4096)


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Processes may take their time to start: nobody is lost who only stands still meanwhile."""
    flags = {"max-model-len": "4096", "num-blocks": "600"}
    patient = ("no-worker-s", "lost-peer-s", "keepalive-answer-s", "sequence-progress-s")
    with running_cluster(
        tmp_path / "run",
        str(model),
        num_decode=2,
        worker_flags=flags,
        router_flags={f"timers.{name}": str(PATIENCE_S) for name in patient},
    ) as up:
        yield up


def replace_weights(model: Path) -> None:
    """As another version of the same model has them."""
    other = write_tiny_model(model.parent / "other", seed=1, max_position=4096)
    shutil.copy(other / "model.safetensors", model / "model.safetensors")


def start_anew(*processes: Process) -> None:
    """With what the model's folder has now."""
    for process in processes:
        process.kill()
        process.start(process.address)
    for process in processes:
        process.wait_listening()


async def serve_new(cluster: Cluster, model: Path, *processes: Process) -> None:
    """These have the new weights, and are the most that are ready."""
    replace_weights(model)
    start_anew(*processes)
    await cluster.eventually(lambda: num_models(cluster) == 2, WITHIN_S, "the new are served")


def num_models(cluster: Cluster) -> int:
    """That the router has served, one after another."""
    return cluster.router.log_path.read_text().count("model served")


def num_waiting(cluster: Cluster) -> float:
    return cluster.router.metric("diptych_router_requests_waiting")


async def kill_seen(cluster: Cluster, *processes: Process, num_left: int) -> None:
    """Until the router has seen it: it tries nobody who is dead already."""
    for process in processes:
        process.kill()
    ready = "diptych_router_workers_ready"
    what = f"{num_left} workers are left"
    await cluster.eventually(lambda: cluster.router.metric(ready) == num_left, WITHIN_S, what)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("waits", [False, True])
async def test_an_answer_does_not_go_on_with_other_weights(
    cluster: Cluster, model: Path, waits: bool
) -> None:
    """Neither one whose worker dies when others are served, nor one that waits for them."""
    await cluster.wait_ready()
    begun: list[Chunk] = []
    async with cluster.client() as client:
        stream = client.stream(asked())
        begun.append(await anext(stream))
        (at_work,) = [each for each in cluster.decode if each.metric("diptych_sequences_running")]
        (idle,) = [each for each in cluster.decode if each is not at_work]
        at_work.stand_still()
        if waits:
            await kill_seen(cluster, idle, *cluster.prefill, num_left=1)
            await kill_seen(cluster, at_work, num_left=0)
            await cluster.eventually(lambda: num_waiting(cluster) == 1, WITHIN_S, "it waits")
            await serve_new(cluster, model, idle, *cluster.prefill)
        else:
            await serve_new(cluster, model, idle, *cluster.prefill)
            assert cluster.router.metric("diptych_router_requests_placed") == 1
            at_work.kill()
        with pytest.raises(ModelChangedError, match="began with a model of digest"):
            await read_on(stream, begun)
        await check_resumed(client, begun)
    start_anew(at_work)
    await cluster.wait_ready()
    await cluster.wait_baseline(WITHIN_S)


async def read_on(stream: AsyncIterator[Chunk], read: list[Chunk]) -> None:
    async for chunk in stream:
        read.append(chunk)  # noqa: PERF401 - what came before it raises counts


async def check_resumed(client: DiptychClient, begun: list[Chunk]) -> None:
    """Only who does not say what began the answer gets the other weights' tokens behind it."""
    token_ids = [token_id for chunk in begun for token_id in chunk.token_ids]
    digest = begun[0].model_digest
    assert len(token_ids) < MAX_TOKENS
    assert digest
    with pytest.raises(ModelChangedError):
        await anext(client.stream(asked(token_ids, digest)))
    with pytest.raises(InvalidRequestError, match="model_digest: goes with emitted_token_ids"):
        await anext(client.stream(asked(model_digest=digest)))
    anew = await anext(client.stream(asked()))
    assert anew.model_digest not in ("", digest)
    behind = await anext(client.stream(asked(token_ids)))
    assert behind.model_digest == anew.model_digest
    assert behind.position == len(token_ids)

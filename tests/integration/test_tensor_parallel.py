"""Workers of one rank and of two hand over to each other; a rank that is gone takes its worker."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from kvtransfer.config import TransferConfig
from tests.call import Answer, generate, token_request
from tests.cluster import START_TIMEOUT_S, Cluster, Process, running_cluster
from tests.engines import load_decoder
from tests.integration.conftest import BLOCK_SIZE, TINY_MAX_LEN
from tests.integration.one_process import MAX_BATCHED_TOKENS, NUM_BLOCKS, OneProcess
from tests.integration.worker_rig import (
    Router,
    Worker,
    decode_worker,
    leased,
    peer_of,
    prefill_worker,
)
from tests.prompts import prompt
from tests.ranks import is_there, ranks_of
from tests.tiny_model import write_tiny_model
from tests.torch_threads import torch_threads
from tests.waiting import until

NUM_TOKENS = 8
PROMPTS = [prompt(length, seed=length) for length in (16, 33, 70, 101)]
SIZES = {
    "num_blocks": NUM_BLOCKS,
    "max_model_len": TINY_MAX_LEN,
    "block_size": BLOCK_SIZE,
    "max_batched_tokens": MAX_BATCHED_TOKENS,
}
FLAGS = {name.replace("_", "-"): str(value) for name, value in SIZES.items()}
GONE_S = Timers().lost_peer_s + 15.0


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def want(tiny_llama: Path) -> list[list[int]]:
    """What one process says to each prompt."""
    model = load_decoder(tiny_llama)
    return [OneProcess(model, "float32").greedy([p], NUM_TOKENS)[0].token_ids for p in PROMPTS]


async def handed_over(prefill: Worker, decode: Worker, token_ids: list[int]) -> list[int]:
    """The tokens of a prompt that one worker computes and the other one goes on with."""
    router, source = Router(decode), await peer_of(prefill)
    await router.open([source])
    sequence_id, num_cached = await router.reserve(token_ids, max_tokens=NUM_TOKENS)
    lease, ticket, first = await leased(prefill, token_ids, router.worker_incarnation)
    await router.bind(sequence_id, source, ticket, num_cached)
    assert (await router.next("proven")).proven.stats.num_tokens == len(token_ids)
    await lease.close()
    await router.start(sequence_id, [first])
    (said,) = await router.until_ended(sequence_id)
    await router.close()
    return [first, *said.token_ids]


@pytest.mark.asyncio
async def test_workers_of_any_degree_are_pairs(
    tiny_llama: Path, tmp_path: Path, want: list[list[int]]
) -> None:
    """Each rank has a pool of its heads, and reads them of whoever has them."""
    settings = {**SIZES, "transfer": TransferConfig(transports=("nixl",))}
    async with AsyncExitStack() as started:
        prefills, decodes = list[Worker](), list[Worker]()
        for size in (1, 2):
            prefill = prefill_worker(tiny_llama, tmp_path, settings, tensor_parallel=size)
            decode = decode_worker(tiny_llama, tmp_path, settings, tensor_parallel=size)
            prefills.append(await started.enter_async_context(prefill))
            decodes.append(await started.enter_async_context(decode))
            for worker in (prefills[-1], decodes[-1]):
                assert (await worker.state()).layout.tensor_parallel_size == size
        pairs = [(p, d) for p in prefills for d in decodes]
        for pair, token_ids, tokens in zip(pairs, PROMPTS, want, strict=True):
            assert await handed_over(*pair, token_ids) == tokens
        for worker in (*prefills, *decodes):
            await worker.wait_baseline()
    assert not ranks_of(os.getpid())


@pytest.fixture
def cluster(tiny_llama: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Of each test its own: both end a worker."""
    with running_cluster(
        tmp_path,
        str(tiny_llama),
        worker_flags={**FLAGS, "tensor-parallel": "2"},
        router_flags={"local-prefill-below-tokens": "0"},
    ) as cluster:
        yield cluster


async def ask_all(cluster: Cluster, salt: str) -> list[Answer]:
    """Every prompt at once, all of them computed anew."""
    async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(
                generate(channel, token_request(token_ids, max_tokens=NUM_TOKENS, salt=salt))
            )
            for token_ids in PROMPTS
        ]
    return [task.result() for task in asked]


@pytest.mark.asyncio
async def test_a_lost_rank_ends_its_worker_and_no_request(
    cluster: Cluster, want: list[list[int]]
) -> None:
    await cluster.wait_ready()
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    answers = await ask_all(cluster, "before")
    assert [list(answer.token_ids) for answer in answers] == want
    assert all(answer.timing.transfer.num_tokens for answer in answers)

    (rank,) = ranks_of(prefill.pid)
    rounds = list[list[Answer]]()

    async def ask_on() -> None:
        while prefill.alive:
            rounds.append(await ask_all(cluster, f"round {len(rounds)}"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask_on())
        await until(lambda: rounds, GONE_S, "a first round is answered")
        prefill.was_ended = True
        rank.kill()
        await until(lambda: not prefill.alive, GONE_S, "the worker has gone")
    for answers in rounds:
        assert [list(answer.token_ids) for answer in answers] == want
    assert prefill.stop() == 1, prefill.log_tail()
    assert "rank" in prefill.log_tail()
    await cluster.wait_baseline(GONE_S)
    assert decode.alive


@pytest.mark.asyncio
async def test_a_rank_that_hangs_ends_its_worker(cluster: Cluster) -> None:
    """Together with what was hung: no process is left."""
    await cluster.wait_ready()
    (decode,) = cluster.decode
    (rank,) = ranks_of(decode.pid)
    rank.suspend()
    decode.was_ended = True
    async with open_channel(cluster.router.address) as channel, asyncio.TaskGroup() as tasks:
        request = token_request(PROMPTS[0], max_tokens=NUM_TOKENS, salt="hangs")
        asked = tasks.create_task(generate(channel, request))
        await until(lambda: not decode.alive, GONE_S, "the worker has gone")
        asked.cancel()
    assert decode.stop() == 1, decode.log_tail()
    assert "the model thread is stuck" in decode.log_tail()
    await until(lambda: not is_there(rank), what="the rank has gone")


@pytest.mark.asyncio
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
async def test_no_rank_outlives_a_worker(
    tiny_llama: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    """Not even of one that ends while it loads."""
    flags = ["--model", str(tiny_llama), "--tensor-parallel", "2"]
    worker = Process("decode_worker", "ends", tmp_path, flags)
    worker.start()
    worker.wait_listening()
    await until(lambda: ranks_of(worker.pid), START_TIMEOUT_S, "a rank starts")
    (rank,) = ranks_of(worker.pid)
    worker.signal(signum)
    await until(lambda: not worker.alive, GONE_S, "the worker has gone")
    assert worker.stop() == code, worker.log_tail()
    await until(lambda: not is_there(rank), GONE_S, "the rank has gone")


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", shape={"num_key_value_heads": 1})
    with pytest.raises(ExceptionGroup) as caught:
        async with decode_worker(folder, tmp_path, SIZES, tensor_parallel=2):
            pass
    assert caught.group_contains(ConfigurationError, match="2 ranks.*num_key_value_heads=1")

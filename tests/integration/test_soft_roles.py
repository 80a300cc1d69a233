"""Workers whose roles change while requests run: nothing is lost, and no block stays held."""

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest

from diptych.cli import admin
from diptych.errors import InvalidRequestError, WorkerDrainingError
from diptych.process import EXIT_FAILED
from diptych.rpc.channel import open_channel
from diptych.rpc.status import from_rpc_error
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvtransfer.config import TransferConfig
from prefill_worker.app import KV_SOURCE, PREFILL
from router.app import serve
from router.config import RouterConfig
from tests.call import Answer, generate, token_request
from tests.golden_rule import MARGIN, check_exact
from tests.integration.worker_rig import (
    INLINE,
    Lease,
    Settings,
    Worker,
    prefill_worker,
    soft_worker,
)
from tests.notes import Note
from tests.waiting import until, within

PREFILL_ROLE, DECODE_ROLE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
BOTH = (PREFILL_ROLE, DECODE_ROLE)
SETTINGS = {"transfer": INLINE, "num_blocks": 128, "max_model_len": 256}
LONG_SETTINGS = {**SETTINGS, "transfer": TransferConfig()}  # over nixl, both ways at once
# None is replaced because a busy machine kept it from answering.
PATIENT_SETTINGS = {**SETTINGS, "transfer": TransferConfig(agent_answer_s=30.0)}
NUM_CLIENTS = 4
EVENTUALLY_S = 30.0
NUM_TELLING = 8  # at a time, each of which needs two workers
RINGS_S = 2.0  # without new agents, while both workers read


class Roles(NamedTuple):
    """Of the two workers."""

    first: Sequence[worker_pb2.WorkerRole]
    second: Sequence[worker_pb2.WorkerRole]


# From (prefill, decode) on and back to it; each time somebody gets a role that it had not.
FLIPS = (
    Roles([DECODE_ROLE], [PREFILL_ROLE]),
    Roles(BOTH, [DECODE_ROLE]),
    Roles([DECODE_ROLE], BOTH),
    Roles([PREFILL_ROLE], [DECODE_ROLE]),
)


class Served(NamedTuple):
    """Who served an answer, and when it was sent (monotonic, s) and begun."""

    prefill: str
    decode: str
    sent_s: float
    first_token_s: float


@dataclass
class Load:
    """Clients that ask without a pause, and compare what they hear."""

    channel: grpc.aio.Channel
    expected: dict[int, Answer]  # by the prompt's number
    served: list[Served] = field(default_factory=list)
    is_over: bool = False

    async def run(self, number: int) -> None:
        numbers = itertools.cycle(self.expected)
        for each in itertools.islice(numbers, number, None):
            if self.is_over:
                return
            want, answer = self.expected[each], await ask(self.channel, each)
            assert answer.error is None, answer.error
            check_exact(answer.token_ids, want.token_ids, want.margins, f"prompt {each}")
            timing = answer.timing
            prefill = timing.prefill_worker or timing.decode_worker  # or both were one worker
            self.served.append(
                Served(prefill, timing.decode_worker, answer.sent_at, answer.times[0])
            )


async def ask(channel: grpc.aio.Channel, number: int) -> Answer:
    """The answer to a prompt that shares no block with others."""
    return await generate(channel, token_request(range(3 + number, 43 + number), max_tokens=24))


async def set_roles(
    worker: Worker, roles: Sequence[worker_pb2.WorkerRole]
) -> worker_pb2.SetRolesResponse:
    """As an operator does. Raises DiptychError."""
    stub: worker_pb2_grpc.WorkerAdminAsyncStub = worker_pb2_grpc.WorkerAdminStub(worker.channel)
    try:
        return await stub.SetRoles(worker_pb2.SetRolesRequest(roles=roles), timeout=10)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


@asynccontextmanager
async def routed(model: Path, workers: Sequence[Worker]) -> AsyncIterator[grpc.aio.Channel]:
    """A router that knows the workers' addresses, and of no role of theirs."""
    config = RouterConfig(
        listen="127.0.0.1:0",
        model=str(model),
        decode=tuple(worker.address for worker in workers),
        local_prefill_below_tokens=0,
        http=False,
    )
    stop, ports = asyncio.Event(), asyncio.Queue[int]()

    async def run() -> None:
        await serve(config, stop, ports.put_nowait)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(), name="router")
        async with open_channel(f"127.0.0.1:{await ports.get()}") as channel:
            yield channel
        stop.set()


@asynccontextmanager
async def cluster(
    model: Path,
    tmp_path: Path,
    *roles: Sequence[str],
    settings: Settings = SETTINGS,
) -> AsyncIterator[tuple[list[Worker], grpc.aio.Channel]]:
    """A router and workers that begin with these roles; at the end no block is held."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(soft_worker(model, tmp_path, settings, *each))
            for each in roles
        ]
        async with routed(model, workers) as channel:
            yield workers, channel
        for worker in workers:
            await worker.wait_baseline()
            samples = await worker.metrics()
            assert samples["diptych_kv_block_mismatches_total"] == 0
            assert samples["diptych_leases_open"] == 0


async def proven(workers: Sequence[Worker]) -> None:
    """Wait until each can pull from all others, whatever their roles are; from itself none can."""
    for worker in workers:
        wanted = {other.address for other in workers if other is not worker}

        def is_proven(state: worker_pb2.WorkerState, wanted: set[str] = wanted) -> bool:
            proven = [p for p in state.pairs if p.state == worker_pb2.PAIR_STATE_PROVEN]
            return {pair.source_address for pair in proven} == wanted

        state = await worker.watch_until(is_proven, EVENTUALLY_S)
        assert len(state.pairs) == len(wanted)


def has_served(load: Load, flip: Roles, workers: Sequence[Worker], since_s: float) -> list[float]:
    """When first tokens came that only the new roles could bring; s after ``since_s``."""
    first, second = (worker.address for worker in workers)
    prefill = {
        a for a, roles in ((first, flip.first), (second, flip.second)) if PREFILL_ROLE in roles
    }
    decode = {
        a for a, roles in ((first, flip.first), (second, flip.second)) if DECODE_ROLE in roles
    }
    return [
        each.first_token_s - since_s
        for each in load.served
        if each.sent_s >= since_s and each.prefill in prefill and each.decode in decode
    ]


@pytest.mark.timeout(900)
async def test_roles_flip_under_load_and_no_request_notices(
    tiny_llama: Path, tmp_path: Path, chaos_long: bool, note: Note
) -> None:
    num_flips = 50 if chaos_long else len(FLIPS)
    settings = LONG_SETTINGS if chaos_long else SETTINGS
    async with cluster(tiny_llama, tmp_path, ["prefill"], ["decode"], settings=settings) as (
        workers,
        channel,
    ):
        await proven(workers)
        calm = {number: await ask(channel, number) for number in range(24)}
        assert [answer.error for answer in calm.values()] == [None] * len(calm)
        paths = {answer.timing.kv_path for answer in calm.values()}
        assert paths == {inference_pb2.KV_PATH_DISAGGREGATED}
        clear = {number: a for number, a in calm.items() if min(a.margins) >= MARGIN}
        assert len(clear) >= NUM_CLIENTS, "answers that rounding cannot change"
        load = Load(channel, clear)
        waits_s = []
        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(load.run(number), name="client")
            for flip in itertools.islice(itertools.cycle(FLIPS), num_flips):
                at_s = time.monotonic()
                for worker, roles in zip(workers, flip, strict=True):
                    assert (await set_roles(worker, roles)).roles == list(roles)
                await until(
                    lambda flip=flip, at_s=at_s: has_served(load, flip, workers, at_s),  # type: ignore[misc]
                    EVENTUALLY_S,
                    f"new roles serve: {flip}",
                )
                waits_s.append(min(has_served(load, flip, workers, at_s)))
            load.is_over = True
        note(
            f"{num_flips} flips, {len(load.served)} answers, the first token by new roles at the "
            f"most {max(waits_s):.2f} s after a flip"
        )


async def test_one_worker_of_both_roles_serves_alone_and_loses_one(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its health tells of each role; what it cannot be is refused, and nothing changes."""
    serving, not_serving = 1, 2
    async with cluster(tiny_llama, tmp_path, ["prefill", "decode"]) as ((worker,), channel):
        answer = await ask(channel, 0)
        assert answer.error is None
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL
        state = await worker.state()
        assert not state.pairs, "it pulls nothing from itself"
        assert [await worker.health(each) for each in (PREFILL, worker.service)] == [serving] * 2
        with pytest.raises(InvalidRequestError, match="at least one"):
            await set_roles(worker, [])
        assert list((await worker.state()).roles) == list(BOTH)
        flags = ["roles", worker.address, "--roles", "decode"]
        assert await asyncio.to_thread(admin.run, flags) == 0
        assert capsys.readouterr().out == "prefill,decode -> decode\n"
        async with within(EVENTUALLY_S):
            while await worker.health(PREFILL) == serving:
                await asyncio.sleep(0.01)
        health = [await worker.health(each) for each in (PREFILL, KV_SOURCE, worker.service, "")]
        assert health == [not_serving, not_serving, serving, serving]
        lease = Lease(worker)
        await lease.start(range(3, 43))
        with pytest.raises(WorkerDrainingError, match="not the role prefill"):
            await lease.error()
        assert (await ask(channel, 0)).token_ids == answer.token_ids


async def test_a_worker_of_one_role_says_why_it_takes_no_other(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with prefill_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        flags = ["roles", worker.address, "--roles", "decode,prefill"]
        assert await asyncio.to_thread(admin.run, flags) == EXIT_FAILED
        assert "serves prefill alone, not decode" in capsys.readouterr().err
        assert list((await worker.state()).roles) == [PREFILL_ROLE]


async def test_what_prefill_workers_tell_waits_while_none_has_that_role(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Of two operators one takes the role away, and the other gives it to another worker."""
    async with cluster(tiny_llama, tmp_path, ["prefill"], ["decode"]) as (workers, channel):
        await proven(workers)
        router: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        text = inference_pb2.EmbedRequest(inputs=[inference_pb2.Input(text="hello")])
        want, vector = await tell(channel, 0), await router.Embed(text)
        assert want.error is None
        await set_roles(workers[0], [DECODE_ROLE])
        look = inference_pb2.DescribeClusterRequest()
        async with within(EVENTUALLY_S), asyncio.TaskGroup() as tasks:
            while (await router.DescribeCluster(look)).num_prefill:
                await asyncio.sleep(0.01)
            told = tasks.create_task(tell(channel, 0))
            embedded = tasks.create_task(_embed(router, text))
            while (await router.DescribeCluster(look)).num_waiting < 2:
                assert not told.done(), told.result().error
                assert not embedded.done(), "refused"
                await asyncio.sleep(0.01)
            await set_roles(workers[1], [PREFILL_ROLE])
        answer = told.result()
        assert answer.error is None
        assert (answer.token_ids, len(answer.prompt_logprobs)) == (
            want.token_ids,
            len(want.prompt_logprobs),
        )
        assert len(embedded.result().embeddings) == len(vector.embeddings)


async def _embed(
    router: "inference_pb2_grpc.InferenceAsyncStub", request: inference_pb2.EmbedRequest
) -> inference_pb2.EmbedResponse:
    return await router.Embed(request)


def agents() -> set[psutil.Process]:
    """The processes of all agents of this process' workers."""
    return {
        child
        for child in psutil.Process().children()
        if "kvtransfer.agents.main" in child.cmdline()
    }


async def tell(channel: grpc.aio.Channel, number: int) -> Answer:
    """The answer to a request that no worker serves alone."""
    request = token_request(
        range(3 + number % 64, 43 + number % 64), max_tokens=4, salt=str(number)
    )
    request.sampling.prompt_logprobs = 0
    return await generate(channel, request)


async def test_an_agent_that_dies_takes_its_readers_agents_and_no_other(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two workers read from each other all the while: none is replaced because of that."""
    caplog.set_level(logging.WARNING, "kvtransfer")
    is_over = False
    numbers = itertools.count()
    num_answered = 0

    async def ask_on() -> None:
        nonlocal num_answered
        while not is_over:
            answer = await tell(channel, next(numbers))
            assert answer.error is None, answer.error
            num_answered += 1

    def num_replaced() -> int:
        return sum("its agent is replaced" in each.message for each in caplog.records)

    both = ["prefill", "decode"]
    async with cluster(tiny_llama, tmp_path, both, both, settings=PATIENT_SETTINGS) as (
        workers,
        channel,
    ):
        await proven(workers)
        before = agents()
        assert len(before) == 2 * len(workers), "one that is read from and one that reads, each"
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_TELLING):
                clients.create_task(ask_on(), name="client")
            await until(lambda: num_answered > NUM_TELLING, EVENTUALLY_S, "requests are served")
            victim = next(each for each in before if "--read-only=1" in each.cmdline())
            victim.send_signal(signal.SIGKILL)
            await asyncio.sleep(RINGS_S)
            is_over = True
        await proven(workers)
        replaced = before - agents()
        assert victim in replaced
        assert len(replaced) <= 2, "it, and the one that read from it"
        assert num_replaced() <= 1

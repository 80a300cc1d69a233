"""Workers die or freeze under load, in the middle of a prompt or of an answer.

Every request still ends with the right tokens.

One cluster of two workers of each role. The first of each is the victim; the router and the
second ones live through all of it.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from diptych.rpc.channel import open_channel
from diptych.v1 import worker_pb2, worker_pb2_grpc
from tests.call import Answer
from tests.chaos.expected import Expected
from tests.chaos.load import FLAGS, ROUTER_FLAGS, ask_until, jobs, run_all
from tests.chaos.survivors import Survivors
from tests.cluster import Cluster, Process, running_cluster
from tests.notes import Note
from tests.waiting import until

WORK = jobs(60, seed=11)
# A prompt takes many steps: there is a middle to be hit in.
SMALL_STEPS = {"max-batched-tokens": "16", "max-num-seqs": "16"}
AT_ONCE = 8
NOTICED_S = 5.0
NUM_ROUNDS, NUM_ROUNDS_LONG = 3, 20
REQUESTS_A_ROUND, REQUESTS_A_ROUND_LONG = 60, 500
DEADLINE_S = 30.0  # far more than a fail-over takes: it allows every request to complete
MIN_COMPLETED_RATIO = 0.999
USED_AGAIN_S = 5.0
MAX_MORE_FDS = 3
RETRIES = "diptych_retries_total"
MAX_GROWTH_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        str(tiny_model),
        num_prefill=2,
        num_decode=2,
        worker_flags={**FLAGS, **SMALL_STEPS},
        # What the router remembers of prompts is full after a few requests: memory is flat then.
        router_flags={**ROUTER_FLAGS, "prefix-memory-blocks": "256"},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """See ``undisturbed``."""
    return []


class Footprint(NamedTuple):
    num_fds: int
    rss_bytes: int


@dataclass
class Tally:
    """The answers of one round's load, checked as they come."""

    expected: Expected
    num_completed: int = 0
    failures: list[str] = field(default_factory=list)
    last_by: dict[str, float] = field(default_factory=dict)  # worker address: its newest answer

    def add(self, index: int, answer: Answer) -> None:
        if answer.error is not None:
            self.failures.append(str(answer.error))
            self.expected.check_cut_short(index, answer)
            return
        self.num_completed += 1
        self.expected.check(index, answer)
        now = time.monotonic()
        self.last_by[answer.timing.prefill_worker] = now
        self.last_by[answer.timing.decode_worker] = now

    @property
    def num_asked(self) -> int:
        return self.num_completed + len(self.failures)


@pytest.mark.timeout(3600)
async def test_rounds_of_sigkill_under_load(
    cluster: Cluster,
    answers: list[Answer],
    step_s: float,
    chaos_long: bool,
    chaos_demo: bool,
    note: Note,
) -> None:
    """The long form has 10,000 requests of the tiny model.

    Of SmolLM2 so many would take hours: there its rounds have the short form's number.
    """
    num_rounds = NUM_ROUNDS_LONG if chaos_long else NUM_ROUNDS
    is_large = chaos_long and not chaos_demo
    num_requests = REQUESTS_A_ROUND_LONG if is_large else REQUESTS_A_ROUND
    await cluster.wait_ready()
    expected = await undisturbed(cluster, answers, step_s)
    survivors = [cluster.router, cluster.prefill[1], cluster.decode[1]]
    still_there = Survivors(survivors)
    incarnations = [await incarnation(worker) for worker in survivors[1:]]
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    footprints: list[list[Footprint]] = []  # after the first round, and after the last one
    tallies: list[Tally] = []
    for number in range(num_rounds):
        victims = ([prefill], [decode], [prefill, decode])[number % 3]
        tallies.append(Tally(expected))
        await kill_once(cluster, victims, tallies[-1], num_requests, is_slow=chaos_demo, note=note)
        await cluster.wait_ready()
        await cluster.wait_baseline(within_s=1 + step_s)
        if number in (0, num_rounds - 1):
            footprints.append(await footprints_of(survivors))

    still_there.check()
    assert [await incarnation(worker) for worker in survivors[1:]] == incarnations
    first, last = footprints
    num_asked = sum(tally.num_asked for tally in tallies)
    num_completed = sum(tally.num_completed for tally in tallies)
    note(f"{num_completed} of {num_asked} requests completed; {first} -> {last}")
    assert num_completed >= MIN_COMPLETED_RATIO * num_asked, [t.failures for t in tallies]
    await expected.settle(cluster)
    check_growth(survivors, first, last)


async def kill_once(
    cluster: Cluster,
    victims: Sequence[Process],
    tally: Tally,
    num_requests: int,
    *,
    is_slow: bool,
    note: Note,
) -> None:
    """A round: load, SIGKILL of the victims at work, and the rest of the load with them back."""
    num_retries = cluster.router.metric(RETRIES)
    async with load(cluster, tally):
        await asyncio.sleep(0.3)
        for victim in victims:
            await when_computing(victim)
            victim.kill()
        for victim in victims:
            victim.start(listen=victim.address)
        async with asyncio.TaskGroup() as tasks:
            for victim in victims:
                tasks.create_task(used_again(cluster, victim, tally, is_slow=is_slow, note=note))
        while tally.num_asked < num_requests:
            await asyncio.sleep(0.05)
    assert cluster.router.metric(RETRIES) > num_retries, "no request was hit"


def check_growth(
    survivors: Sequence[Process], first: Sequence[Footprint], last: Sequence[Footprint]
) -> None:
    """They are about as large as before."""
    for process, before, after in zip(survivors, first, last, strict=True):
        assert after.num_fds <= before.num_fds + MAX_MORE_FDS, process.name
        assert after.rss_bytes <= before.rss_bytes + MAX_GROWTH_BYTES, process.name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stopped_worker_is_noticed_and_failed_over(
    cluster: Cluster, answers: list[Answer], role: str, step_s: float, note: Note
) -> None:
    await cluster.wait_ready()
    expected = await undisturbed(cluster, answers, step_s)
    victim = getattr(cluster, role)[0]
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(run_all(cluster, WORK))
        await asyncio.sleep(0.3)
        await when_computing(victim)
        victim.signal(signal.SIGSTOP)
    answered = load.result()
    expected.check_all(answered)
    longest_s = max(answer.longest_gap_s for answer in answered)
    note(f"{role} stopped: longest silence of a stream {longest_s:.2f} s")
    assert longest_s <= NOTICED_S + 2 * step_s
    victim.signal(signal.SIGCONT)
    await cluster.wait_ready()
    await cluster.wait_baseline(within_s=NOTICED_S + step_s)
    expected.check_all(await run_all(cluster, WORK))
    await expected.settle(cluster)


async def undisturbed(cluster: Cluster, answers: list[Answer], step_s: float) -> Expected:
    """What ``WORK`` is to answer. Asked once: ``answers`` are the module's from then on."""
    if not answers:
        answers += (await Expected.learn(cluster, WORK)).answers
        await cluster.wait_baseline(within_s=1 + step_s)
    return Expected(WORK, answers)


@asynccontextmanager
async def load(cluster: Cluster, tally: Tally) -> AsyncIterator[None]:
    """Requests that no cache knows, until the end of the block."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        address = cluster.router.address
        asked = ask_until(
            stop, address, WORK, tally.add, at_once=AT_ONCE, fresh=True, timeout_s=DEADLINE_S
        )
        tasks.create_task(asked, name="load")
        yield
        stop.set()


async def used_again(
    cluster: Cluster, worker: Process, tally: Tally, *, is_slow: bool, note: Note
) -> None:
    """Wait until it listens, and no longer than allowed from there to its first good answer.

    ``is_slow``: a large model is loaded after that; from when it is ready.
    """
    await asyncio.to_thread(worker.wait_listening)
    if is_slow:
        await ready(worker)
    since_s = time.monotonic()
    await cluster.eventually(
        lambda: tally.last_by.get(worker.address, 0) > since_s,
        USED_AGAIN_S,
        f"{worker.name} answers again",
    )
    after_s = time.monotonic() - since_s
    note(f"{worker.name} answers {after_s:.2f} s after it is there")


async def when_computing(worker: Process) -> None:
    """Wait until ``worker`` is in the middle of a prompt or an answer: a held block is not enough.

    A lease whose prompt is computed is in no batch any more.
    """
    await until(
        lambda: worker.metric("diptych_sequences_running") > 0, 30, f"{worker.name} computes"
    )


async def ready(worker: Process) -> None:
    async with open_channel(worker.address) as channel:
        async for state in worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()):
            if state.state == worker_pb2.SERVING_STATE_READY:
                return
    raise AssertionError(f"{worker.name} ends before it is ready")


async def incarnation(worker: Process) -> str:
    async with open_channel(worker.address) as channel:
        async for state in worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()):
            return state.incarnation
    raise AssertionError(f"{worker.name} says nothing")


async def footprints_of(processes: Sequence[Process]) -> list[Footprint]:
    async with asyncio.TaskGroup() as tasks:
        taken = [tasks.create_task(footprint(process)) for process in processes]
    return [task.result() for task in taken]


async def footprint(process: Process) -> Footprint:
    """The least number of fds during a second: a reconnection under way has one more."""
    num_fds = []
    for _ in range(5):
        await asyncio.sleep(0.2)
        num_fds.append(process.num_fds())
    return Footprint(min(num_fds), process.rss_bytes())

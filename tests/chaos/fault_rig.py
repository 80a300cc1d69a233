"""Driving a running cluster through faults: scripts, exact counters, canaries."""

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from diptych.v1 import faults_pb2, faults_pb2_grpc
from tests.call import Answer, generate, token_request
from tests.chaos.load import FLAGS, ROUTER_FLAGS
from tests.cluster import Cluster, Process, running_cluster
from tests.golden_rule import check_exact

# What waits for a lost message is short. What would end a hand-off that is only slow, on a
# machine with other work, is long: each fault is counted exactly.
SHORT_TIMERS = {
    "timers.heartbeat-s": "0.2",
    "timers.confirm-s": "1",
    "timers.read-progress-s": "1.5",
    "timers.unbound-lease-s": "5",
}
FAILED = 'diptych_kv_pulls_failed_total{reason="'
PATIENT_ROUTER = {**ROUTER_FLAGS, "timers.accept-s": "3"}
PULLED = 'diptych_kv_pulls_total{transport="'
REFUSED = 'diptych_kv_fetches_refused{reason="'
RETRIED = 'diptych_retries_total{action="'
COMPUTED = 'diptych_local_prefills_total{why="'
MAX_OUTPUT = 4
SMOLLM2_BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4  # and a multiple of the tiny model's

Rule = dict[str, object]


@contextmanager
def breakable_cluster(
    work: Path, model: Path, transport: str, **flags: dict[str, str]
) -> Iterator[Cluster]:
    """One prefill and one decode worker that allow faults."""
    allowed = {
        "transfer.transports": transport,
        "transfer.allow-faults": "",
        # Whole blocks of either model: what a fault does to a part of a block, the message
        # with its other part may undo.
        "transfer.inline-message-bytes": str(SMOLLM2_BLOCK_BYTES),
    }
    worker_flags = {**FLAGS, **SHORT_TIMERS, **allowed, **flags.get("worker_flags", {})}
    with running_cluster(
        work,
        str(model),
        worker_flags=worker_flags,
        prefill_flags=flags.get("prefill_flags"),
        decode_flags=flags.get("decode_flags"),
        router_flags=PATIENT_ROUTER,
    ) as cluster:
        yield cluster


async def set_rules(worker: Process, rules: Sequence[Rule]) -> faults_pb2.FaultsReport:
    """Put this script in force."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: faults_pb2_grpc.FaultsAsyncStub = faults_pb2_grpc.FaultsStub(channel)
        return await stub.SetRules(faults_pb2.SetRulesRequest(rules=json.dumps(rules)))


async def report(worker: Process) -> faults_pb2.FaultsReport:
    """What its script did so far."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: faults_pb2_grpc.FaultsAsyncStub = faults_pb2_grpc.FaultsStub(channel)
        return await stub.Report(faults_pb2.ReportRequest())


async def check_untouched(cluster: Cluster, step_s: float) -> None:
    """Idle within 1 s and a step: nothing is held, no canary changed, no foreign block written."""
    await cluster.wait_baseline(within_s=1 + step_s)
    assert (await report(cluster.decode[0])).num_canaries > 0  # a prefill worker may cache them all
    for worker in cluster.workers:
        state = await report(worker)
        assert state.num_canaries_checked > 0, worker.name
        assert state.num_canaries_changed == 0, worker.name
        assert state.num_foreign_writes == 0, worker.name
        assert state.num_reads_unfinished == 0, worker.name


@dataclass
class Counters:
    """Counters at one moment, each summed over all processes of a cluster."""

    samples: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster) -> "Counters":
        samples: dict[str, float] = {}
        for process in cluster.processes:
            for key, value in process.metrics().items():
                samples[key] = samples.get(key, 0.0) + value
        return cls(samples)

    def grown(self, earlier: "Counters", prefix: str) -> dict[str, int]:
        """By label value: how much each counter of a family grew, where it did."""
        grown = {
            key.removeprefix(prefix).split('"')[0]: int(value - earlier.samples.get(key, 0))
            for key, value in self.samples.items()
            if key.startswith(prefix)
        }
        return {label: num for label, num in grown.items() if num}


class Prompts:
    """Requests whose prompts have all different lengths, so that rules can name each one.

    Also when a new attempt has a token more, the first one, which was emitted. Or all
    the same, so that only their tokens tell them apart.
    """

    def __init__(self, num: int, *, equally_long: bool = False) -> None:
        self.token_ids = [
            [3 + (17 * number + 31 * position + position * position) % 470 for position in range(n)]
            for number, n in enumerate([80] * num if equally_long else range(80, 80 + 2 * num, 2))
        ]
        self._answers: list[Answer] = []

    async def learn(self, channel: grpc.aio.Channel) -> None:
        """What each of them answers when nothing goes wrong."""
        self._answers = await self.ask(channel)
        assert all(answer.error is None for answer in self._answers)

    async def ask(
        self, channel: grpc.aio.Channel, num: int | None = None, concurrency: int = 8
    ) -> list[Answer]:
        """Answers to the first ``num``; their KV is in no cache."""
        salt = secrets.token_hex(8)
        slots = asyncio.Semaphore(concurrency)

        async def one(ids: list[int]) -> Answer:
            async with slots:
                request = token_request(ids, max_tokens=MAX_OUTPUT, salt=salt)
                return await generate(channel, request, timeout_s=30)

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one(ids)) for ids in self.token_ids[:num]]
        return [task.result() for task in asked]

    def check(self, answers: Sequence[Answer], what: str) -> None:
        """Each is answered, with the undisturbed tokens."""
        for index, answer in enumerate(answers):
            assert answer.error is None, f"{what} {index}: {answer.error}"
            want = self._answers[index]
            check_exact(answer.token_ids, want.token_ids, want.margins, f"{what} {index}")
            assert answer.finish_reason == want.finish_reason, f"{what} {index}"

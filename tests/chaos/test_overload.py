"""Three times as many requests as can be served: refused fast, served as well as before.

Both pools hold two requests, the router lets a few more wait. The peak is what clients
that wait for each answer get done; the overload comes at three times that rate, whether
answers come or not, and faster where the machine has become faster since: three requests come for
each one answered. How well it serves is counted: tokens that clients got for each of the
engine's steps, which neither a busy machine nor a slow one changes.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from diptych.errors import QueueFullError
from diptych.rpc.channel import open_channel
from tests.call import Answer, generate
from tests.chaos import silence
from tests.chaos.expected import Expected
from tests.chaos.load import Job, jobs
from tests.chaos.open_things import check_no_more, open_things
from tests.cluster import Cluster, running_cluster
from tests.notes import Note

# Long answers: what a refusal costs the cores that all of this shares is small beside them.
PROMPT_LEN, MAX_TOKENS, BLOCK_SIZE = 96, 240, 16
DEPTH = 2  # requests that a pool holds
MAX_QUEUE = 4
OVERLOAD = 3
TICK_S = 0.005
PEAK_S = 8.0
OVERLOAD_S, OVERLOAD_LONG_S = 30.0, 300.0
DEADLINE_S = 10.0  # the objective: an answer that comes later is a miss
MIN_IN_TIME_RATIO = 0.9
TIMEOUT_S = 20.0  # of a request that is neither answered nor refused
MAX_REFUSAL_S = 0.1
MAX_SILENCE_S = 1.0
TOKENS = "diptych_engine_tokens_total"
MIN_WORTH_RATIO = 0.9
WORK = [
    Job(job.token_ids, MAX_TOKENS, job.temperature, job.seed)
    for job in jobs(64, seed=31, prompt_len=PROMPT_LEN)
]


@dataclass(frozen=True)
class Outcome:
    """One request and when it was over."""

    index: int
    answer: Answer
    ended_at: float

    @property
    def took_s(self) -> float:
        return self.ended_at - self.answer.sent_at


@dataclass(frozen=True)
class Work:
    """What the decode worker has done so far, by its own counters."""

    num_steps: float
    num_computed_tokens: float

    @classmethod
    def of(cls, cluster: Cluster) -> "Work":
        samples = cluster.decode[0].metrics()
        return cls(
            samples["diptych_engine_steps_total"],
            sum(num for name, num in samples.items() if name.startswith(TOKENS)),
        )

    def worth(self, before: "Work", outcomes: Sequence[Outcome]) -> float:
        """Tokens in the hands of clients for each step since then; DEPTH at the most."""
        num_steps = self.num_steps - before.num_steps
        return sum(len(outcome.answer.token_ids) for outcome in outcomes) / num_steps


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    prompt_blocks = -(-PROMPT_LEN // BLOCK_SIZE)
    all_blocks = -(-(PROMPT_LEN + MAX_TOKENS) // BLOCK_SIZE) + 1
    with running_cluster(
        tmp_path_factory.mktemp("cluster"),
        str(tiny_model),
        worker_flags={"max-model-len": str(PROMPT_LEN + MAX_TOKENS), "max-num-seqs": str(DEPTH)},
        prefill_flags={"num-blocks": str(max(all_blocks, DEPTH * (prompt_blocks + 1)))},
        decode_flags={"num-blocks": str(DEPTH * all_blocks)},
        router_flags={"local-prefill-below-tokens": "0", "max-queue": str(MAX_QUEUE)},
    ) as cluster:
        yield cluster


@pytest.mark.timeout(900)
async def test_three_times_overload(
    cluster: Cluster, step_s: float, chaos_long: bool, note: Note
) -> None:
    await cluster.wait_ready()
    expected = await Expected.learn(cluster, WORK, concurrency=DEPTH)
    await cluster.wait_baseline(within_s=1 + step_s)
    idle_before = await open_things(cluster)
    async with open_channel(cluster.router.address) as channel:
        before = Work.of(cluster)
        at_peak = await closed_loop(channel, PEAK_S)
        after_peak = Work.of(cluster)
        rate = OVERLOAD * per_second(at_peak)
        begin_s, num_logged = time.monotonic(), len(cluster.router.log_path.read_bytes())
        outcomes = await open_loop(channel, rate, OVERLOAD_LONG_S if chaos_long else OVERLOAD_S)
        after = Work.of(cluster)
    answered = [outcome for outcome in outcomes if outcome.answer.error is None]
    for outcome in answered:
        expected.check(outcome.index, outcome.answer)
    in_time = [outcome for outcome in answered if outcome.took_s <= DEADLINE_S]
    assert len(in_time) >= MIN_IN_TIME_RATIO * len(answered), [o.took_s for o in answered]
    log = cluster.router.log_path.read_bytes()[num_logged:].decode()
    check_refusals(log, outcomes, note)
    silence_s = silence.of_everybody(begin_s, [outcome.answer for outcome in outcomes])
    peak, worth = after_peak.worth(before, at_peak), after.worth(after_peak, outcomes)
    note(
        f"offered {len(outcomes)}, answered {len(answered)}; {worth:.2f} tokens a step, at the "
        f"peak {peak:.2f}; longest silence {silence_s:.2f} s"
    )
    assert silence_s < MAX_SILENCE_S
    assert worth >= MIN_WORTH_RATIO * peak
    num_tokens = sum(len(outcome.answer.token_ids) for outcome in answered)
    num_computed = after.num_computed_tokens - after_peak.num_computed_tokens
    assert num_computed <= num_tokens, "the decode worker computed what nobody got"
    await cluster.wait_baseline(within_s=1 + step_s)
    check_no_more(idle_before, await open_things(cluster))
    await expected.settle(cluster)


def check_refusals(log: str, outcomes: Sequence[Outcome], note: Note) -> None:
    """What was too much was refused, at once, and nothing else failed."""
    refused = [outcome for outcome in outcomes if outcome.answer.error is not None]
    reasons = {outcome.answer.error.reason for outcome in refused if outcome.answer.error}
    own_s = refusal_seconds(log)
    seen_s = sorted(outcome.took_s for outcome in refused)
    note(
        f"refused {len(refused)}: router max {max(own_s) * 1e3:.1f} ms,"
        f" client p99 {seen_s[int(0.99 * len(seen_s))] * 1e3:.0f} ms,"
        f" max {seen_s[-1] * 1e3:.0f} ms"
    )
    assert reasons == {QueueFullError.reason}
    assert len(refused) >= len(outcomes) // OVERLOAD
    # The clients share the cores with all that they load: the router's own clock counts.
    assert max(own_s) < MAX_REFUSAL_S


async def closed_loop(channel: grpc.aio.Channel, for_s: float) -> list[Outcome]:
    """As many clients as the pools and the queue hold, each one request after the other."""
    outcomes: list[Outcome] = []
    numbers, until_s = itertools.count(), time.monotonic() + for_s

    async def client() -> None:
        while time.monotonic() < until_s:
            outcomes.append(await ask(channel, next(numbers)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(DEPTH + MAX_QUEUE):
            tasks.create_task(client())
    return outcomes


async def open_loop(channel: grpc.aio.Channel, rate: float, for_s: float) -> list[Outcome]:
    """``rate`` requests per second, evenly; at any time OVERLOAD for each one answered so far."""
    begin_s, num_answered = time.monotonic(), 0

    async def one(number: int) -> Outcome:
        nonlocal num_answered
        outcome = await ask(channel, number)
        num_answered += outcome.answer.error is None
        return outcome

    async with asyncio.TaskGroup() as tasks:
        asked: list[asyncio.Task[Outcome]] = []
        while (passed_s := time.monotonic() - begin_s) < for_s:
            while len(asked) < max(rate * passed_s, OVERLOAD * num_answered):
                asked.append(tasks.create_task(one(len(asked))))
            await asyncio.sleep(TICK_S)
    return [task.result() for task in asked]


async def ask(channel: grpc.aio.Channel, number: int) -> Outcome:
    index = number % len(WORK)
    request = WORK[index].request(salt=str(time.monotonic_ns()))
    answer = await generate(channel, request, timeout_s=TIMEOUT_S)
    return Outcome(index, answer, time.monotonic())


def per_second(outcomes: Sequence[Outcome]) -> float:
    """Answers per second, from the first request to the last answer."""
    begin_s = min(outcome.answer.sent_at for outcome in outcomes)
    return len(outcomes) / (max(outcome.ended_at for outcome in outcomes) - begin_s)


def refusal_seconds(log: str) -> list[float]:
    """From a request's arrival to its refusal, by what the router logged."""
    ended = [json.loads(line) for line in log.splitlines() if '"request ended"' in line]
    return [line["total_s"] for line in ended if line["outcome"] == QueueFullError.reason]

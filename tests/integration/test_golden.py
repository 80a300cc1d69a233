"""Disaggregated = one process = a naive loop = Hugging Face transformers, token for token.

Real weights in float32. References (``tests/golden/*.json``) are transformers'
greedy tokens and top-2 margins on the imported folder: prompts whose margins are all clear, and
some in each of whose answers one is not. There rounding decides, and transformers is asked
how it goes on after the other token. CI runs five clear prompts and the near ties of each
model; ``make golden`` all.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch

from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.scheduling.step import Chunk, StepPlan
from diptych.rpc.channel import open_channel
from diptych.timers import Timers
from diptych.v1 import common_pb2, inference_pb2
from tests import hf_reference
from tests.call import Answer, generate, token_request
from tests.cluster import Cluster, running_cluster
from tests.engine_logits import chunk_logits
from tests.engines import CPU, load_decoder
from tests.golden.models import GoldenModel, golden_model
from tests.golden.reference import GoldenPrompt
from tests.golden_rule import MARGIN, Run, check_exact, check_exact_later
from tests.notes import Note
from tests.transports import TRANSPORTS

LOGIT_TOLERANCE = 1e-3
BLOCK_SIZE = 16
CHUNK = 512
CI_LENGTHS = (1, 16, 257, 513, 1500)
ALONE_LENGTH = 513  # of the prompt that is asked alone in CI
MAX_LEN = 1600
SEEDED_TOKENS = 48
SMALL_POOL_LEN = 384  # tokens of the longest sequence in the pool that preempts
SMALL_POOL_BLOCKS = 26
TEMPERATURE = 0.8
IN_FLIGHT = 8

# It may run beside tests that come first whenever they have something to do.
PATIENT = {
    f"timers.{name.replace('_', '-')}": "120"
    for name in (
        "lost_peer_s", "keepalive_answer_s", "accept_s", "read_progress_s", "confirm_s",
        "unbound_lease_s", "sequence_progress_s", "unsent_s", "client_write_s", "drain_s",
    )
} | {"timers.no-worker-s": "600"}  # fmt: skip
PATIENT_TIMERS = Timers(keepalive_answer_s=120)  # of the client, which stands as still as they do

pytestmark = pytest.mark.timeout(1800)
MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> GoldenModel:
    return golden_model(request.param)


@pytest.fixture(scope="module")
def golden_all(request: pytest.FixtureRequest) -> bool:
    """Whether every prompt is asked on every path."""
    return bool(request.config.getoption("--golden-all"))


@pytest.fixture(scope="module")
def clear(model: GoldenModel, golden_all: bool) -> list[GoldenPrompt]:
    """Those whose answers are never close to another one."""
    if golden_all:
        return model.prompts
    return [p for p in model.prompts if len(p.token_ids) in CI_LENGTHS]


@pytest.fixture(scope="module")
def prompts(model: GoldenModel, clear: list[GoldenPrompt]) -> list[GoldenPrompt]:
    """Clear ones and near ties; enough for IN_FLIGHT at a time."""
    chosen = [*clear, *model.near_ties]
    assert len(chosen) >= IN_FLIGHT
    return chosen


@contextmanager
def cluster_of(
    model: GoldenModel,
    work: Path,
    flags: dict[str, str] | None = None,
    *,
    num_prefill: int = 1,
    decode_flags: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    with running_cluster(
        work,
        str(model.folder),
        num_prefill=num_prefill,
        worker_flags={
            "max-model-len": str(MAX_LEN),
            "max-batched-tokens": str(CHUNK),
            "max-num-seqs": str(IN_FLIGHT),  # a start tries steps of so many, which takes seconds
            **PATIENT,
            "transfer.agent-answer-s": "120",
            **(flags or {}),
        },
        decode_flags=decode_flags,
        router_flags={"local-prefill-below-tokens": "0", **PATIENT},
    ) as cluster:
        yield cluster


@asynccontextmanager
async def calling(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    await cluster.wait_ready()
    async with open_channel(cluster.router.address, PATIENT_TIMERS) as channel:
        yield channel


async def ask(
    channel: grpc.aio.Channel,
    requests: Sequence[inference_pb2.GenerateRequest],
    in_flight: int = 1,
) -> list[Answer]:
    """The answers to ``requests``; ``in_flight`` at a time, no fewer until they run out."""
    assert len(requests) >= in_flight
    answers, slots = [Answer()] * len(requests), asyncio.Semaphore(in_flight)

    async def one(index: int) -> None:
        async with slots:
            answers[index] = await generate(channel, requests[index], timeout_s=600)

    async with asyncio.TaskGroup() as tasks:
        for index in range(len(requests)):
            tasks.create_task(one(index))
    for answer in answers:
        assert answer.error is None, answer.error
    return answers


def check_greedy(
    model: GoldenModel, prompts: Sequence[GoldenPrompt], answers: Sequence[Answer], path: str
) -> int:
    """Every answer is transformers', to its end; how many near ties were decided otherwise."""
    num_ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, num = prompt.token_ids, len(prompt.output_ids)
        resume = hf_reference.resume(model.folder, ids, num)
        ties = check_exact(
            answer.token_ids,
            prompt.output_ids,
            prompt.margins,
            f"{path}, prompt of {len(ids)}",
            resume,
        )
        assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
        num_ties += len(ties)
    return num_ties


def greedy_requests(
    prompts: Sequence[GoldenPrompt], salt: str = ""
) -> list[inference_pb2.GenerateRequest]:
    """Each with a salt of its own: some begin alike, and all of each is to be handed over."""
    return [
        token_request(p.token_ids, max_tokens=len(p.output_ids), salt=f"{salt}{number}")
        for number, p in enumerate(prompts)
    ]


def seeded_request(
    token_ids: Sequence[int], seed: int, salt: str, num_tokens: int = SEEDED_TOKENS
) -> inference_pb2.GenerateRequest:
    return token_request(
        token_ids, max_tokens=num_tokens, temperature=TEMPERATURE, seed=seed, salt=salt
    )


def seeded_requests(
    prompts: Sequence[GoldenPrompt], salt: str
) -> list[inference_pb2.GenerateRequest]:
    return [seeded_request(p.token_ids, 1000 + number, salt) for number, p in enumerate(prompts)]


def test_teacher_forced_logits(model: GoldenModel, clear: list[GoldenPrompt], note: Note) -> None:
    """Every logit row of prompt and output is transformers', over paged KV on scattered blocks.

    Prompts are computed in chunks, then each token of the outputs in a decode step of all
    sequences.
    """
    decoder = load_decoder(model.folder)
    table_len = -(-MAX_LEN // BLOCK_SIZE) + 1
    cache = KVCache(decoder.config, IN_FLIGHT * table_len, BLOCK_SIZE, torch.float32)
    runner = Runner(decoder, cache, CPU)
    blocks = list(range(cache.num_blocks))
    random.Random(1).shuffle(blocks)
    tables = [tuple(blocks[i * table_len : (i + 1) * table_len]) for i in range(IN_FLIGHT)]
    worst = 0.0
    for first in range(0, len(clear), IN_FLIGHT):
        batch = clear[first : first + IN_FLIGHT]
        decoded = []
        for prompt, table in zip(batch, tables, strict=False):
            of_prompt, rows = compute_prompt(model, runner, prompt, table)
            worst = max(worst, of_prompt)
            decoded.append(rows)
        for step in range(len(batch[0].output_ids)):
            got = runner.logits(decode_plan(batch, tables, step))
            worst = max(worst, difference(got, torch.stack([rows[step] for rows in decoded])))
    note(f"{model.name}: largest logit difference {worst:.2g}")


def compute_prompt(
    model: GoldenModel, runner: Runner, prompt: GoldenPrompt, table: tuple[int, ...]
) -> tuple[float, torch.Tensor]:
    """Its largest difference, and what the logits after each token of the output must be."""
    # float32 of any kind is up to 1.2e-3 off at a token of Gemma's: transformers' own 1.1e-3.
    dtype = torch.float64 if model.name == "gemma3" else torch.float32
    num, token_ids = len(prompt.token_ids), [*prompt.token_ids, *prompt.output_ids]
    want = hf_reference.logit_chunks(model.folder, token_ids, CHUNK, dtype, split_at=num)
    sizes = [min(CHUNK, num - start) for start in range(0, num, CHUNK)]
    worst = 0.0
    for got in chunk_logits(runner, prompt.token_ids, sizes, table):
        worst = max(worst, difference(got, next(want)))
    return worst, torch.cat(list(want))


def decode_plan(
    batch: Sequence[GoldenPrompt], tables: Sequence[tuple[int, ...]], step: int
) -> StepPlan:
    """One step in which every sequence decodes its next token."""
    chunks = [
        Chunk(
            token_ids=(prompt.output_ids[step],),
            start=len(prompt.token_ids) + step,
            block_table=table,
            sample=None,
        )
        for prompt, table in zip(batch, tables, strict=False)
    ]
    return StepPlan(chunks=tuple(chunks))


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest of logits [num_tokens, vocab_size]; also the best token is the same."""
    worst = float((got - want).abs().max())
    assert worst <= LOGIT_TOLERANCE
    top = torch.topk(want, 2)
    is_clear = top.values[:, 0] - top.values[:, 1] >= MARGIN
    assert torch.equal(got.argmax(1)[is_clear], top.indices[is_clear, 0])
    return worst


@dataclass(frozen=True)
class OneProcess:
    """A decode worker that computes the prompts itself, and its answers."""

    channel: grpc.aio.Channel
    greedy: list[Answer]  # one at a time
    seeded: list[Answer]

    async def check_seeded(self, prompt: GoldenPrompt, number: int, got: Answer, what: str) -> int:
        """The same tokens were drawn to the end; the number of draws at a boundary."""
        seed, want = 1000 + number, self.seeded[number]

        async def resume(prefix: Sequence[int]) -> Run:
            num_left = SEEDED_TOKENS - len(prefix)
            if not num_left:
                return Run([], [])
            request = seeded_request([*prompt.token_ids, *prefix], seed, "tied", num_left)
            (answer,) = await ask(self.channel, [request])
            return Run(answer.token_ids, answer.margins)

        run = Run(want.token_ids, want.margins)
        assert got.finish_reason == want.finish_reason
        return len(await check_exact_later(got.token_ids, run, what, resume))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_process(
    model: GoldenModel, prompts: list[GoldenPrompt], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[OneProcess]:
    """It stays, to say how a seeded answer goes on after a draw that fell on a boundary."""
    with cluster_of(model, tmp_path_factory.mktemp("one"), num_prefill=0) as cluster:
        async with calling(cluster) as channel:
            greedy = await ask(channel, greedy_requests(prompts))
            seeded = await ask(channel, seeded_requests(prompts, salt="s"), IN_FLIGHT)
            yield OneProcess(channel, greedy, seeded)


def test_local_prefill(
    model: GoldenModel, prompts: list[GoldenPrompt], one_process: OneProcess, note: Note
) -> None:
    num_ties = check_greedy(model, prompts, one_process.greedy, "local prefill")
    note(f"{model.name}, local prefill: {num_ties} near ties were decided otherwise")
    for answer in one_process.greedy:
        assert answer.timing.kv_path == inference_pb2.KV_PATH_LOCAL


@MODULE_LOOP
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_disaggregated(
    model: GoldenModel,
    prompts: list[GoldenPrompt],
    one_process: OneProcess,
    tmp_path: Path,
    transport: str,
    golden_all: bool,
    note: Note,
) -> None:
    """Eight in flight, greedy and seeded; and one at a time (one over nixl, or in full all)."""
    alone = prompts if golden_all else [p for p in prompts if len(p.token_ids) == ALONE_LENGTH]
    with cluster_of(model, tmp_path, {"transfer.transports": transport}) as cluster:
        async with calling(cluster) as channel:
            crowd = await ask(channel, greedy_requests(prompts), IN_FLIGHT)
            seeded = await ask(channel, seeded_requests(prompts, salt="s"), IN_FLIGHT)
            if transport == "nixl" or golden_all:
                answers = await ask(channel, greedy_requests(alone, salt="alone"))
                check_greedy(model, alone, answers, transport)
    num_ties = check_greedy(model, prompts, crowd, f"{transport}, {IN_FLIGHT} in flight")
    for prompt, answer in zip(prompts, crowd, strict=True):
        transfer = answer.timing.transfer
        assert transfer.transport == transport
        assert transfer.num_tokens == len(prompt.token_ids)
        assert answer.timing.kv_path == inference_pb2.KV_PATH_DISAGGREGATED
    num_drawn = 0
    for number, (prompt, got) in enumerate(zip(prompts, seeded, strict=True)):
        what = f"{transport} seeded, prompt of {len(prompt.token_ids)}"
        num_drawn += await one_process.check_seeded(prompt, number, got, what)
    note(f"{model.name}, {transport}: {num_ties} near ties and {num_drawn} draws the other way")
    assert num_drawn <= max(1, len(prompts) // 40)


@MODULE_LOOP
@pytest.mark.parametrize("num_prefill", [0, 1], ids=["computed", "pulled"])
async def test_preempted(
    model: GoldenModel, prompts: list[GoldenPrompt], tmp_path: Path, num_prefill: int, note: Note
) -> None:
    """A pool too small for the batch: running sequences lose their blocks and are recomputed.

    Also those whose KV came from a prefill worker.
    """
    fitting = [p for p in prompts if len(p.token_ids) + len(p.output_ids) <= SMALL_POOL_LEN]
    flags = {"max-model-len": str(SMALL_POOL_LEN)}
    small = {"num-blocks": str(SMALL_POOL_BLOCKS)}
    with cluster_of(model, tmp_path, flags, num_prefill=num_prefill, decode_flags=small) as cluster:
        async with calling(cluster) as channel:
            crowd = [*fitting, *fitting]
            requests = [
                request
                for index, prompt in enumerate(crowd)
                for request in greedy_requests([prompt], salt=str(index))
            ]
            answers = await ask(channel, requests, IN_FLIGHT)
    num_ties = check_greedy(model, crowd, answers, "preempted")
    path = inference_pb2.KV_PATH_DISAGGREGATED if num_prefill else inference_pb2.KV_PATH_LOCAL
    num_preempted = sum(
        answer.timing.num_preemptions for answer in answers if answer.timing.kv_path == path
    )
    note(f"{model.name}: {num_preempted} preemptions, {num_ties} near ties decided otherwise")
    assert num_preempted > 0, "the pool was not small enough to preempt"

"""A decode worker over real gRPC, alone and with a prefill worker in the same process."""

import asyncio
import secrets
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from diptych.errors import DiptychError, SlowClientError, TransferInterruptedError
from diptych.v1 import common_pb2, decode_pb2, worker_pb2
from tests import hf_reference
from tests.golden_rule import check_exact
from tests.integration.worker_rig import (
    BLOCK_SIZE,
    INLINE,
    MAX_LEN,
    Lease,
    Router,
    Settings,
    Worker,
    decode_worker,
    leased,
    peer_of,
    prefill_worker,
    quick,
    until_proven,
)
from tests.prompts import prompt
from tests.waiting import within

SETTINGS: Settings = {
    "num_blocks": 64,
    "max_model_len": MAX_LEN,
    "block_size": BLOCK_SIZE,
    "max_batched_tokens": 64,
    "transfer": INLINE,
}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_generates_alone_as_transformers_does(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = [prompt(n, seed) for seed, n in enumerate((1, 15, 16, 33, 100))]
    expected = [hf_reference.greedy(tiny_llama, each, 12) for each in prompts]
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        router = Router(worker)
        await router.open()
        ids = []
        for each in prompts:
            sequence_id, num_cached = await router.reserve(each, max_tokens=12)
            assert num_cached == 0
            await router.start(sequence_id, compute_missing=True)
            ids.append(sequence_id)
        said = await router.until_ended(*ids)
        for each, got, want in zip(prompts, said, expected, strict=True):
            check_exact(got.token_ids, want.token_ids, want.margins, f"{len(each)} tokens")
            assert got.position == len(each)
            assert len(got.margins) == 12
            assert got.ended is not None
            assert got.ended.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert got.ended.num_computed_tokens == len(each) + 11
            assert got.ended.num_computed_prompt_tokens == len(each)
        assert router.num_messages <= 12 * 5 + 2 * 5 + 10
        await worker.wait_baseline()
        metrics = await worker.metrics()
        assert metrics['diptych_local_prefills_total{why="local"}'] == 5
        again = await router.generate(prompts[4], 12)
        assert again.token_ids == said[4].token_ids
        await router.close()


async def test_pull_and_go_on_exactly(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 100, 240))]
    async with (
        prefill_worker(tiny_llama, tmp_path, SETTINGS) as prefill,
        decode_worker(tiny_llama, tmp_path, SETTINGS) as decode,
    ):
        router = Router(decode)
        source = await peer_of(prefill)
        await router.open([source])
        await until_proven(decode)
        said = [await handed_over(prefill, decode, router, source, each) for each in prompts]
        metrics = await decode.metrics()
        assert metrics['diptych_kv_pulls_total{transport="inline"}'] == len(prompts)
        assert metrics['diptych_local_prefills_total{why="local"}'] == 0
        assert metrics['diptych_kv_pairs{state="proven"}'] == 1
        (rate,) = (v for k, v in metrics.items() if k.startswith("diptych_kv_pair_bytes_per_s"))
        assert rate > 0
        num_confirmed = (await prefill.metrics())["diptych_kv_fetches_confirmed"]
        assert num_confirmed == len(prompts) + 2  # probes
        await router.close()
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as alone:
        router = Router(alone)
        await router.open()
        for tokens, got in zip(prompts, said, strict=True):
            want = await router.generate(tokens, 10)
            check_exact(got, want.token_ids, want.margins, f"one process, {len(tokens)} tokens")
        await router.close()


async def handed_over(
    prefill: Worker, decode: Worker, router: Router, source: decode_pb2.Peer, tokens: list[int]
) -> list[int]:
    """The answer to a prompt that the prefill worker computes; nothing is held after it."""
    sequence_id, num_cached = await router.reserve(tokens, max_tokens=10)
    lease, ticket, first = await leased(prefill, tokens, router.worker_incarnation)
    await router.bind(sequence_id, source, ticket, num_cached)
    proven = (await router.next("proven")).proven
    assert proven.stats.transport == "inline"
    assert proven.stats.num_tokens == len(tokens)
    await lease.close()
    await prefill.wait_baseline()
    await router.start(sequence_id, [first])
    (pulled,) = await router.until_ended(sequence_id)
    assert pulled.position == len(tokens) + 1
    assert pulled.ended is not None
    assert pulled.ended.num_computed_tokens == 9
    assert pulled.ended.HasField("num_computed_prompt_tokens")
    assert pulled.ended.num_computed_prompt_tokens == 0

    again = await router.reserve(tokens, max_tokens=10)
    assert again[1] == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    await router.release(again[0])
    await router.until_ended(again[0])
    await decode.wait_baseline()
    return [first, *pulled.token_ids]


async def test_all_cached_needs_no_bind(tiny_llama: Path, tmp_path: Path) -> None:
    tokens = prompt(2 * BLOCK_SIZE)
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        router = Router(worker)
        await router.open()
        want = await router.generate(tokens, 6)
        sequence_id, num_cached = await router.reserve(tokens, max_tokens=6)
        assert num_cached == len(tokens)
        await router.start(sequence_id, compute_missing=True)
        (got,) = await router.until_ended(sequence_id)
        assert got.token_ids == want.token_ids
        sequence_id, _ = await router.reserve(tokens, max_tokens=6)
        await router.start(sequence_id, want.token_ids[:2])
        (got,) = await router.until_ended(sequence_id)
        assert got.token_ids == want.token_ids[2:]
        await worker.wait_baseline()
        await router.close()


async def test_a_failed_pull_keeps_the_reservation_and_a_new_bind_wins(
    tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = prompt(100)
    async with (
        prefill_worker(tiny_llama, tmp_path, SETTINGS) as prefill,
        decode_worker(tiny_llama, tmp_path, SETTINGS) as decode,
    ):
        router = Router(decode)
        source = await peer_of(prefill)
        await router.open([source])
        await until_proven(decode)
        sequence_id, _ = await router.reserve(tokens, max_tokens=6)

        await router.bind(sequence_id, source, secrets.token_bytes(16), 0, bind_id=1)
        failed = (await router.next("pull_failed")).pull_failed
        assert failed.bind_id == 1
        assert failed.reason == decode_pb2.PULL_FAILURE_TICKET_INVALID
        stranger = decode_pb2.Peer(address="127.0.0.1:1", incarnation="nobody")
        await router.bind(sequence_id, stranger, secrets.token_bytes(16), 0, bind_id=2)
        failed = (await router.next("pull_failed")).pull_failed
        assert failed.reason == decode_pb2.PULL_FAILURE_NOT_CONNECTED
        assert (await decode.blocks())["reserved"] >= 7

        lease, old_ticket, first = await leased(prefill, tokens, router.worker_incarnation)
        new_ticket = await lease.grant(router.worker_incarnation)
        await router.bind(sequence_id, source, old_ticket, 0, bind_id=3)
        await router.bind(sequence_id, source, new_ticket, 0, bind_id=4)
        while not (event := await router.read()).HasField("proven"):
            if event.HasField("pull_failed"):  # it had ended before the new bind came
                assert event.pull_failed.bind_id == 3
                assert event.pull_failed.reason == decode_pb2.PULL_FAILURE_TICKET_INVALID
        assert event.proven.bind_id == 4
        await router.start(sequence_id, [first])
        (said,) = await router.until_ended(sequence_id)
        assert len(said.token_ids) == 5
        await lease.close()
        metrics = await decode.metrics()
        assert metrics['diptych_kv_pulls_failed_total{reason="TICKET_INVALID"}'] >= 1
        assert metrics['diptych_kv_pulls_failed_total{reason="NOT_CONNECTED"}'] == 1
        await decode.wait_baseline()
        await router.close()


async def test_a_pair_lost_while_both_pools_are_full_is_proven_at_once(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Probes need no block that a sequence could have."""
    tokens = prompt(240)
    full = {**SETTINGS, "num_blocks": 17}
    losing = INLINE.model_copy(
        update={"allow_faults": True, "faults": '[{"at": "read", "do": "fail"}]'}
    )
    async with (
        prefill_worker(tiny_llama, tmp_path, full) as prefill,
        decode_worker(tiny_llama, tmp_path, full, transfer=losing) as decode,
    ):
        router = Router(decode)
        source = await peer_of(prefill)
        await router.open([source])
        await until_proven(decode)
        sequence_id, _ = await router.reserve(tokens, max_tokens=2)
        await router.reserve(prompt(10, seed=2), max_tokens=2)
        lease, ticket, _ = await leased(prefill, tokens, router.worker_incarnation)
        other, _, _ = await leased(prefill, prompt(20, seed=2), router.worker_incarnation)
        for worker in (prefill, decode):
            blocks = await worker.blocks()
            assert not blocks["free"] + blocks["cached"], blocks

        await router.bind(sequence_id, source, ticket, 0, bind_id=1)
        failed = (await router.next("pull_failed")).pull_failed
        assert failed.reason == decode_pb2.PULL_FAILURE_TRANSPORT
        async with within(1):
            await router.bind(sequence_id, source, ticket, 0, bind_id=2)
            assert (await router.next("proven")).proven.bind_id == 2
        metrics = await prefill.metrics()
        num_probes = 4  # two for each proof of the pair
        assert metrics["diptych_kv_fetches_confirmed"] == num_probes + 1
        for each in (lease, other):
            await each.close()
        await router.close()
        for worker in (prefill, decode):
            await worker.wait_baseline()


async def test_release_at_every_phase_frees_everything(tiny_llama: Path, tmp_path: Path) -> None:
    tokens = prompt(240)
    slow = {**SETTINGS, "max_batched_tokens": 16, "max_num_seqs": 8}
    async with (
        prefill_worker(tiny_llama, tmp_path, slow) as prefill,
        decode_worker(tiny_llama, tmp_path, slow) as decode,
    ):
        router = Router(decode)
        source = await peer_of(prefill)
        await router.open([source])
        await until_proven(decode)

        reserved, _ = await router.reserve(tokens)
        await router.release(reserved)
        await router.release(reserved)
        await router.until_ended(reserved)
        await decode.wait_baseline()

        pulling, _ = await router.reserve(tokens)
        lease = Lease(prefill)
        await lease.start(tokens)
        await lease.next("accepted")
        ticket = await lease.grant(router.worker_incarnation)
        await router.bind(pulling, source, ticket, 0)
        await router.release(pulling)
        await router.until_ended(pulling)
        await decode.wait_baseline()
        first = (await lease.next("first_token")).first_token.token_id

        proven, _ = await router.reserve(tokens)
        ticket = await lease.grant(router.worker_incarnation)
        await router.bind(proven, source, ticket, 0)
        await router.next("proven")
        await router.release(proven)
        await router.until_ended(proven)
        await decode.wait_baseline()

        running, num_cached = await router.reserve(tokens[:239], max_tokens=17)
        assert num_cached == 224
        await router.start(running, [first], compute_missing=True)
        await router.next("step")
        await router.release(running)
        (said,) = await router.until_ended(running)
        assert said.ended is not None
        assert not said.ended.HasField("failure")
        await router.release(running)
        await decode.wait_baseline()
        await lease.close()
        await prefill.wait_baseline()
        await router.close()


async def test_routers_are_apart_and_a_broken_stream_frees_its_own(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        one, two = Router(worker, "one"), Router(worker, "two")
        await one.open()
        await two.open()
        want = await one.generate(prompt(50), 20)
        held, _ = await one.reserve(prompt(60, seed=2), max_tokens=100)
        await one.start(held, compute_missing=True)
        await one.reserve(prompt(60, seed=3))
        mine, _ = await two.reserve(prompt(50), max_tokens=20)
        await two.release(held)  # not its own: ignored
        await two.start(mine, compute_missing=True)
        await one.next("step")
        one.call.cancel()
        (said,) = await two.until_ended(mine)
        assert said.token_ids == want.token_ids
        await worker.wait_baseline()

        newer = Router(worker, "two")
        await newer.open()
        with pytest.raises(TransferInterruptedError):
            await two.next("heartbeat")
        assert len((await newer.generate(prompt(50), 3)).token_ids) == 3
        await newer.close()


async def test_refusals(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "num_blocks": 20, "local_prefill": False}
    async with decode_worker(tiny_llama, tmp_path, settings, wait_ready=False) as worker:
        assert await worker.health() == NOT_SERVING  # no pair, and may not do it alone
        router = Router(worker)
        await router.open()

        async def refused(sequence_id: int) -> str:
            (said,) = await router.until_ended(sequence_id)
            assert said.ended is not None
            assert not said.token_ids
            return said.ended.failure.reason

        assert await refused(await router.ask([5, 100_000])) == "REQUEST_INVALID"
        assert await refused(await router.ask(prompt(MAX_LEN))) == "REQUEST_INVALID"
        held, _ = await router.reserve(prompt(200))
        assert await refused(await router.ask(prompt(200, 2))) == "KV_BLOCKS_EXHAUSTED"
        await router.start(held, compute_missing=True)
        assert await refused(held) == "REQUEST_INVALID"
        early, _ = await router.reserve(prompt(20))
        await router.start(early, [7])
        assert await refused(early) == "REQUEST_INVALID"
        await router.start(999_999)
        await router.release(999_999)
        await worker.wait_baseline()
        await router.close()


async def test_ready_when_a_pair_is_proven(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "local_prefill": False}
    async with (
        prefill_worker(tiny_llama, tmp_path, SETTINGS) as prefill,
        decode_worker(tiny_llama, tmp_path, settings, wait_ready=False) as decode,
    ):
        router = Router(decode)
        await router.open([await peer_of(prefill)])
        state = await decode.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_READY)
        assert state.pairs[0].transport == "inline"
        assert state.pairs_version > 0
        assert not state.local_prefill
        assert await decode.health("diptych.v1.Decode") == SERVING
        await router.close()
        alone = await decode.watch_until(lambda s: not s.pairs)
        assert alone.pairs_version > state.pairs_version
        assert await decode.health() == NOT_SERVING


async def test_hello_comes_first(tiny_llama: Path, tmp_path: Path) -> None:
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        router = Router(worker)
        await router.ask([1])
        with pytest.raises(DiptychError, match="hello"):
            await router.read()


async def test_preemption_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = [prompt(60, seed) for seed in range(4)]
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        router = Router(worker)
        await router.open()
        want = [await router.generate(each, 60) for each in prompts]
        await router.close()
    async with decode_worker(tiny_llama, tmp_path, {**SETTINGS, "num_blocks": 24}) as worker:
        router = Router(worker)
        await router.open()
        ids = [(await router.reserve(each, max_tokens=60))[0] for each in prompts]
        for each in ids:
            await router.start(each, compute_missing=True)
        got = await router.until_ended(*ids)
        for one, other in zip(got, want, strict=True):
            check_exact(one.token_ids, other.token_ids, other.margins, "preempted")
        assert sum(s.ended.num_preemptions for s in got if s.ended is not None) > 0
        assert (await worker.metrics())["diptych_preemptions_total"] > 0
        await worker.wait_baseline()
        await router.close()


@pytest.mark.parametrize("max_unsent_events", [64, 100_000])
async def test_a_router_that_does_not_read_is_cut_off(
    tiny_llama: Path, tmp_path: Path, max_unsent_events: int
) -> None:
    settings = {
        **SETTINGS,
        "timers": quick(unsent_s=0.5),
        "max_unsent_events": max_unsent_events,
    }
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        decode_worker(tiny_llama, tmp_path, settings) as worker,
        grpc.aio.insecure_channel(worker.address, options=small_window) as channel,
    ):
        deaf = Router(worker, channel=channel)
        await deaf.open()
        await deaf.reserve(prompt(30), max_tokens=200)
        for _ in range(2000):
            await deaf.ask([100_000])  # each is answered by an Ended
        await worker.wait_baseline()  # nothing of it is held, though it has not read yet
        with pytest.raises(SlowClientError):
            await deaf.until_ended(0)


async def test_drain(tiny_llama: Path, tmp_path: Path) -> None:
    async with decode_worker(tiny_llama, tmp_path, SETTINGS) as worker:
        router = Router(worker)
        await router.open()
        running, _ = await router.reserve(prompt(50), max_tokens=150)
        await router.start(running, compute_missing=True)
        await router.next("step")
        worker.stop.set()
        await worker.watch_until(lambda s: s.state == worker_pb2.SERVING_STATE_DRAINING)
        assert await worker.health() == NOT_SERVING
        late = await router.ask(prompt(10))
        said = await router.until_ended(late, running)
        assert said[0].ended is not None
        assert said[0].ended.failure.reason == "WORKER_DRAINING"
        assert len(said[1].token_ids) == 150
        with pytest.raises(DiptychError) as caught:
            await router.next("nothing")
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        async with within(5):
            await asyncio.wait([worker.serving])
        await worker.serving

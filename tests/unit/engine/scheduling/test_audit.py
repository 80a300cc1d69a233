"""A block that nobody owns, and one that is lost, show in the recount; nothing else does."""

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import SamplingParams, Sequence, SequenceKey
from diptych.telemetry.metrics import Metrics
from diptych.v1 import worker_pb2
from diptych.worker.audit import BlockAudit
from diptych.worker.engine_parts import EngineParts
from diptych.worker.status import WorkerStatus


def engine() -> tuple[BlockPool, Scheduler]:
    pool = BlockPool(8, 2)
    config = SchedulerConfig(max_num_seqs=2, max_batched_tokens=4, max_model_len=16)
    return pool, Scheduler(config, pool)


def sequence(number: int, num_tokens: int, *, prefill_only: bool = False) -> Sequence:
    return Sequence(
        key=SequenceKey("r", number),
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        prefill_only=prefill_only,
    )


def test_sequences_and_unfinished_reads_account_for_every_block() -> None:
    pool, scheduler = engine()
    assert pool_mismatch(pool, scheduler) is None
    reserved = sequence(1, 3)
    scheduler.reserve(reserved)
    scheduler.add_prefill(sequence(2, 2, prefill_only=True))
    assert pool_mismatch(pool, scheduler) is None
    late = reserved.block_table[:1]
    scheduler.release(reserved, late)
    assert pool_mismatch(pool, scheduler, late) is None
    pool.end_quarantine(late)
    assert pool_mismatch(pool, scheduler) is None


def test_a_leak_names_the_numbers() -> None:
    pool, scheduler = engine()
    pool.allocate(2, Owner.LEASED)
    assert pool_mismatch(pool, scheduler) == (
        "the pool holds running 0, reserved 0, leased 2, quarantined 0; "
        "its owners hold running 0, reserved 0, leased 0, quarantined 0"
    )


def test_a_block_in_no_list_breaks_the_sum() -> None:
    pool, scheduler = engine()
    pool._free.take(1, None)
    assert "do not sum to 8" in str(pool_mismatch(pool, scheduler))


def test_an_idle_worker_with_a_leak_has_failed() -> None:
    pool, scheduler = engine()
    parts: Any = SimpleNamespace(
        pool=pool, scheduler=scheduler, engine=SimpleNamespace(step_due=False)
    )
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    metrics = Metrics(CollectorRegistry())
    audit = BlockAudit(cast(EngineParts, parts), status, metrics, lambda: ())
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_STARTING
    pool.allocate(1, Owner.RESERVED)
    parts.engine.step_due = True
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_STARTING, "not while it works"
    parts.engine.step_due = False
    audit.check()
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_FAILED
    assert "reserved 1" in status.message
    assert b"kv_block_mismatches_total 1.0" in generate_latest(metrics.registry)

"""A block that nobody owns, and one that is lost, show in the recount; nothing else does."""

from prometheus_client import CollectorRegistry, generate_latest

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.engine.scheduling.step import StepOutput, StepPlan
from diptych.sampling_params import SamplingParams
from diptych.telemetry.metrics import Metrics
from diptych.v1 import worker_pb2
from diptych.worker.audit import BlockAudit
from diptych.worker.status import WorkerStatus


class NoRunner:
    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("nothing runs here")


class SteppingEngine(StepEngine):
    """One that says whether it is at a step."""

    steps = False

    @property
    def step_due(self) -> bool:
        return self.steps


def books() -> tuple[BlockPool, Scheduler]:
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
    pool, scheduler = books()
    assert pool_mismatch(pool, scheduler) is None
    reserved = sequence(1, 3)
    scheduler.reserve(reserved)
    scheduler.add_prefill(sequence(2, 2, prefill_only=True))
    assert pool_mismatch(pool, scheduler) is None
    late = reserved.block_table[:1]
    pool.quarantine(late)
    scheduler.release(reserved)
    assert pool_mismatch(pool, scheduler, late) is None
    pool.end_quarantine(late)
    assert pool_mismatch(pool, scheduler) is None


def test_a_leak_names_the_numbers() -> None:
    pool, scheduler = books()
    pool.allocate(2, Owner.LEASED)
    assert pool_mismatch(pool, scheduler) == (
        "the pool holds running 0, reserved 0, leased 2, quarantined 0; "
        "its owners hold running 0, reserved 0, leased 0, quarantined 0"
    )


def test_a_block_in_no_list_breaks_the_sum() -> None:
    pool, scheduler = books()
    pool._free.take(1, None)
    assert "do not sum to 8" in str(pool_mismatch(pool, scheduler))


def test_an_idle_worker_with_a_leak_has_failed() -> None:
    pool, scheduler = books()
    engine = SteppingEngine(scheduler, NoRunner())
    status = WorkerStatus(worker_pb2.WORKER_ROLE_DECODE)
    metrics = Metrics(CollectorRegistry())
    audit = BlockAudit(engine, status, metrics, lambda: ())
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_STARTING
    pool.allocate(1, Owner.RESERVED)
    engine.steps = True
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_STARTING, "not while it works"
    engine.steps = False
    audit.check()
    audit.check()
    assert status.state == worker_pb2.SERVING_STATE_FAILED
    assert "reserved 1" in status.message
    assert b"kv_block_mismatches_total 1.0" in generate_latest(metrics.registry)

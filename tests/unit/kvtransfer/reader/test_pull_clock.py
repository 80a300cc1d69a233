"""When a pull that stands still has failed, and as what."""

import pytest

from diptych.timers import Timers
from diptych.v1 import decode_pb2, kv_source_pb2
from kvtransfer.reader.pull_clock import PullClock
from kvtransfer.reader.pull_machine import DigestChecks, PullMachine

TIMERS = Timers(read_progress_s=5.0, confirm_s=2.0)
BLOCK = 4


class Case:
    """A pull of two blocks without digests, at second 0 of its clock."""

    def __init__(self) -> None:
        self.clock = PullClock(TIMERS, 0.0)
        self.machine = PullMachine(
            first_token=0,
            end_token=2 * BLOCK,
            prompt_digest=b"",
            local_block_ids=(1, 2),
            block_size=BLOCK,
            num_bytes_of=lambda index: 16,
            checks=DigestChecks(each_block=False, in_confirm=False),
        )

    def announce(self) -> None:
        self.machine.begin(frozenset())
        self.machine.opened(kv_source_pb2.FetchOpened(end_token=2 * BLOCK))
        self.machine.announced(
            kv_source_pb2.Range(
                num_tokens=2 * BLOCK, block_ids=[5, 6], generations=[1, 1], last=True
            )
        )

    def failure(self, now: float, silence_s: float = 0.0) -> tuple[int, str] | None:
        problem = self.clock.problem(now, self.machine, silence_s)
        return None if problem is None else (problem.failure, problem.message)


def test_an_earlier_read_may_take_as_long_as_a_read() -> None:
    case = Case()
    assert case.failure(5.0) is None
    message = "an earlier read of these blocks is unfinished"
    assert case.failure(5.1) == (decode_pb2.PULL_FAILURE_TRANSPORT, message)


def test_whether_the_source_was_asked_is_known_of_one_that_stood_still() -> None:
    case = Case()
    waiting = case.clock.problem(5.1, case.machine, 0.0)
    case.machine.begin(frozenset())
    opening = case.clock.problem(5.1, case.machine, 0.0)
    assert waiting is not None
    assert opening is not None
    assert (waiting.unasked, opening.unasked) == (True, False)


def test_a_source_that_computes_may_take_its_time() -> None:
    case = Case()
    case.machine.begin(frozenset())
    assert case.failure(5.1) == (decode_pb2.PULL_FAILURE_TRANSPORT, "no progress for 5.1 s")
    case.machine.opened(kv_source_pb2.FetchOpened(end_token=2 * BLOCK))
    assert case.failure(1000.0) is None


def test_a_probe_may_wait_for_its_turn_at_the_source() -> None:
    case = Case()
    case.clock = PullClock(TIMERS, 0.0, in_queue=True)
    case.machine.begin(frozenset())
    assert case.failure(1000.0) is None


def test_a_read_that_does_not_land_is_the_transports_fault() -> None:
    case = Case()
    case.announce()
    case.clock.announced(3.0, idle=True)
    assert case.failure(8.0) is None
    assert case.failure(8.5) == (decode_pb2.PULL_FAILURE_TRANSPORT, "no progress for 5.5 s")
    case.clock.landed(8.0, 3.0, 8.0)
    assert case.failure(8.5) is None


@pytest.mark.parametrize(
    ("silence_s", "failure", "message"),
    [
        (1.0, decode_pb2.PULL_FAILURE_UNPROVEN, "not confirmed within 2.0 s"),
        (
            2.1,
            decode_pb2.PULL_FAILURE_SOURCE_LOST,
            "the source is lost: not confirmed within 2.0 s",
        ),
    ],
)
def test_without_a_confirmation_it_is_unproven_unless_the_source_is_silent(
    silence_s: float, failure: int, message: str
) -> None:
    case = Case()
    case.announce()
    case.machine.landed(0, 2, ())
    case.clock.landed(4.0, 3.0, 4.0)
    assert case.failure(6.0, silence_s) is None
    assert case.failure(6.1, silence_s) == (failure, message)


def test_a_source_that_stopped_after_a_last_heartbeat_is_not_said_to_have_sent_what_is_wrong() -> (
    None
):
    """Which of both it is shows a little later: it says something, or has been silent for long."""
    case = Case()
    case.announce()
    case.machine.landed(0, 2, ())
    case.clock.landed(4.0, 3.0, 4.0)
    assert case.failure(6.1, silence_s=1.6) is None
    assert case.failure(6.2, silence_s=0.0) is not None
    lost = case.failure(6.6, silence_s=2.1)
    assert lost is not None
    assert lost[0] == decode_pb2.PULL_FAILURE_SOURCE_LOST


def test_reads_that_overlap_are_counted_once() -> None:
    clock = PullClock(TIMERS, 1.0)
    clock.announced(2.0, idle=True)
    clock.landed(5.0, 3.0, 5.0, 0.25)
    clock.landed(6.0, 4.0, 6.0, 0.25)
    clock.landed(9.0, None, 8.0)  # since it was last idle
    clock.proven(10.0)
    stats = clock.stats("nixl", 100, 8)
    assert (stats.read_s, stats.exposed_s, stats.total_s) == (6.0, 8.0, 9.0)
    assert stats.digest_s == 0.5

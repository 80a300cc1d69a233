"""The model of the hand-off finds each of these bugs: its invariants bite."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from decode_worker.outbox import Outbox
from decode_worker.router_sequences import RouterSequences
from decode_worker.worker_limits import WorkerLimits
from diptych.block_needs import BlockNeeds
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.prefix_cache import PrefixCache
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.errors import InvalidRequestError
from diptych.v1 import kv_source_pb2
from kvtransfer.reader import pull_machine as pull
from kvtransfer.reader.pull_machine import DigestChecks, PullMachine
from kvtransfer.reader.quarantine import PullReads, Quarantine
from kvtransfer.source.lease_record import Grant, Lease
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeaseSession
from router.request.attempt import Attempt
from router.request.emitted_tokens import EmittedTokens
from router.request.fail_over import FailOver
from router.request.stall_watch import StallWatch
from tests.protocol.invariants import BrokenError, Invariant, Watch
from tests.protocol.machine import NUM_EXAMPLES, SEARCH, ProtocolMachine, SmallMachine

Patch = Callable[[pytest.MonkeyPatch], None]


def free_a_block_whose_read_is_unfinished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "quarantine", lambda self, block_ids: None)


def forget_the_reads_of_a_dead_pull(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PullReads, "abandon", lambda self, now: frozenset())


def read_where_an_earlier_read_may_write(patch: pytest.MonkeyPatch) -> None:
    original = PullMachine.begin
    patch.setattr(PullMachine, "begin", lambda self, quarantined: original(self, frozenset()))


def never_end_an_agent_for_its_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "older_than", lambda self, age_s, now: [])


def compute_where_late_reads_may_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterSequences, "_leave_unfinished_reads", lambda self, entry: None)
    patch.setattr(BlockPool, "is_writable", lambda self, block_id: True)  # it would be noticed


def accept_what_was_not_proven(patch: pytest.MonkeyPatch) -> None:
    original = PullMachine.__init__

    def unchecked(self: PullMachine, **given: Any) -> None:
        original(self, **{**given, "checks": DigestChecks(False, False)})

    patch.setattr(PullMachine, "__init__", unchecked)
    patch.setattr(LeaseTable, "confirm", lambda self, *asked: None)


def confirm_without_looking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "confirm", lambda self, *asked: None)


def accept_another_sequences_lease(patch: pytest.MonkeyPatch) -> None:
    original = PullMachine.opened

    def opened(self: PullMachine, message: kv_source_pb2.FetchOpened) -> None:
        self._prompt_digest = message.prompt_digest
        original(self, message)

    patch.setattr(PullMachine, "opened", opened)


def prove_before_everything_landed(patch: pytest.MonkeyPatch) -> None:
    original = PullMachine.landed

    def hasty(self: PullMachine, first: int, num: int, digests: tuple[bytes, ...]) -> Any:
        self._num_landed = max(self._num_landed, self.num_blocks - num)
        return original(self, first, num, digests)

    patch.setattr(PullMachine, "landed", hasty)
    patch.setattr(pull, "combined_digest", lambda digests: b"")
    patch.setattr(LeaseTable, "confirm", lambda self, *asked: None)


def miss_a_lost_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PullMachine, "numbered", lambda self, number: None)
    rescue_nothing(patch)


def rescue_nothing(patch: pytest.MonkeyPatch) -> None:
    """A router moves a hand-off on that does not end, after a minute: the bug is that it has to."""
    patch.setattr(StallWatch, "is_stuck", lambda self, num, now: bool(self.begin(num, now)))


def grant_without_revoking(patch: pytest.MonkeyPatch) -> None:
    def grant(self: LeaseTable, lease_id: Any, ticket: bytes, reader: str) -> None:
        lease = self._leases[lease_id]
        lease.grant = Grant(lease, ticket, reader)
        self._grants[ticket] = lease.grant
        lease.changed()

    patch.setattr(LeaseTable, "grant", grant)


def tell_readers_nothing_of_their_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "changed", lambda self: None)
    rescue_nothing(patch)


def start_what_is_not_proven(patch: pytest.MonkeyPatch) -> None:
    original = Attempt.start_if_proven

    def hasty(self: Attempt, output: Sequence[int]) -> bool:
        held = self.reservation
        if held is not None and held.state.name == "PULLING" and self.lease is not None:
            held.state = type(held.state).PROVEN
        return original(self, output)

    patch.setattr(Attempt, "start_if_proven", hasty)
    patch.setattr(WorkerLimits, "check_start", lambda self, *asked, **known: None)
    original_start = Scheduler.start

    def start(self: Scheduler, seq: Any, emitted: list[int], compute_missing: bool) -> None:
        seq.num_computed_tokens = seq.num_tokens
        original_start(self, seq, emitted, compute_missing)

    patch.setattr(Scheduler, "start", start)


def emit_a_token_at_another_position(patch: pytest.MonkeyPatch) -> None:
    accept, put = EmittedTokens.accept, Outbox.put_tokens

    def accept_anywhere(self: EmittedTokens, position: int, *tokens: Any) -> bool:
        return accept(self, self.num_sequence_tokens, *tokens)

    patch.setattr(EmittedTokens, "accept", accept_anywhere)
    patch.setattr(Outbox, "put_tokens", lambda self, new: put(self, [*new, *new]))


def keep_the_blocks_of_a_closed_lease(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.close

    def close(self: LeaseSession) -> None:
        self._engine.release = lambda *asked: None  # type: ignore[method-assign]
        original(self)

    patch.setattr(LeaseSession, "close", close)


def free_the_blocks_of_an_open_lease(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.step

    def step(self: LeaseSession, update: Any, started_at: float) -> Any:
        event = original(self, update, started_at)
        if event is not None:
            self._engine.release(update.sequence)
        return event

    patch.setattr(LeaseSession, "step", step)


def announce_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.start

    def start(self: LeaseSession, command: Any) -> Any:
        event = original(self, command)
        assert self.sequence is not None
        self._leases.announce(self.sequence.key, self.sequence.num_tokens)
        return event

    patch.setattr(LeaseSession, "start", start)


def announce_blocks_that_were_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "rebase", lambda self, lease_id, block_ids: None)


def forget_the_reservation_when_the_lease_is_lost(patch: pytest.MonkeyPatch) -> None:
    def close(self: Attempt) -> None:
        self.drop_reservation()
        self.close_lease()

    patch.setattr(Attempt, "close", close)


def never_give_up_waiting(patch: pytest.MonkeyPatch) -> None:
    for way in ("lease_silent", "reservation_silent", "reservation_over", "lease_ended"):
        patch.setattr(FailOver, way, lambda self, said: None)


def refuse_a_repeated_grant(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.grant

    def grant(self: LeaseSession, command: Any) -> Any:
        granted = original(self, command)
        if granted is None:
            raise InvalidRequestError("was repeated", field="grant")
        return granted

    patch.setattr(LeaseSession, "grant", grant)


def ship_less_than_is_needed(patch: pytest.MonkeyPatch) -> None:
    original = BlockNeeds.num_bytes_of

    def fewer(self: BlockNeeds, block_index: int, num_tokens: int) -> int:
        return original(self, block_index, num_tokens + self.block_size)

    patch.setattr(BlockNeeds, "num_bytes_of", fewer)


def use_a_cached_block_whatever_hole_it_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_num_usable", lambda self, block_ids, step_back: len(block_ids))


def forget_which_blocks_have_holes(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.insert
    patch.setattr(BlockPool, "insert", lambda self, *named: original(self, *named[:3]))


class Bug(NamedTuple):
    """A change of the code that is wrong, and the invariant that has to say so."""

    patch: Patch
    found_by: Invariant
    machine: type[ProtocolMachine] = SmallMachine


BUGS = (
    Bug(free_a_block_whose_read_is_unfinished, Invariant.WRITERS),
    Bug(forget_the_reads_of_a_dead_pull, Invariant.WRITERS),
    Bug(read_where_an_earlier_read_may_write, Invariant.WRITERS),
    Bug(never_end_an_agent_for_its_reads, Invariant.RECLAIMED),
    Bug(compute_where_late_reads_may_write, Invariant.WRITERS),
    Bug(accept_what_was_not_proven, Invariant.PROVEN),
    Bug(confirm_without_looking, Invariant.PROVEN),
    Bug(accept_another_sequences_lease, Invariant.PROVEN),
    Bug(prove_before_everything_landed, Invariant.PROVEN),
    Bug(miss_a_lost_event, Invariant.ENDS),
    Bug(grant_without_revoking, Invariant.READABLE),
    Bug(tell_readers_nothing_of_their_lease, Invariant.ENDS),
    Bug(start_what_is_not_proven, Invariant.ATTENDED),
    Bug(emit_a_token_at_another_position, Invariant.TOKENS),
    Bug(keep_the_blocks_of_a_closed_lease, Invariant.HOLDERS),
    Bug(free_the_blocks_of_an_open_lease, Invariant.READABLE),
    Bug(announce_before_it_is_computed, Invariant.READABLE),
    Bug(announce_blocks_that_were_given_back, Invariant.READABLE),
    Bug(forget_the_reservation_when_the_lease_is_lost, Invariant.RECLAIMED, ProtocolMachine),
    Bug(never_give_up_waiting, Invariant.ENDS),
    Bug(refuse_a_repeated_grant, Invariant.OUTCOME),
    Bug(ship_less_than_is_needed, Invariant.PROVEN),
    Bug(use_a_cached_block_whatever_hole_it_has, Invariant.ATTENDED),
    Bug(forget_which_blocks_have_holes, Invariant.CACHED),
)


MAX_EXAMPLES = 10 * NUM_EXAMPLES
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.patch.__name__)
def test_the_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch, search_seed: int) -> None:
    """By its invariant alone: the others say nothing.

    Mostly within the examples of one run; more are allowed, so that no seed is unlucky. Where
    the broken code stumbles over an assertion of its own first, the search goes on.
    """
    bug.patch(monkeypatch)

    class Mutant(bug.machine):  # type: ignore[name-defined,misc]
        watch = Watch({bug.found_by})
        num_examples = 0

        def __init__(self) -> None:
            type(self).num_examples += 1
            super().__init__()

    while Mutant.num_examples < MAX_EXAMPLES:
        left = MAX_EXAMPLES - Mutant.num_examples
        budget = settings(SEARCH, max_examples=left, database=None, phases=[Phase.generate])
        try:
            run_state_machine_as_test(seed(search_seed + left)(Mutant), settings=budget)
        except BrokenError:  # no other one is watched
            return
        except AssertionError:
            continue
    pytest.fail(f"{bug.found_by.name} never broke")

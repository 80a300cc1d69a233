"""The model of the hand-off finds each of these bugs: its invariants bite."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from decode_worker.outbox import Outbox
from decode_worker.session import Session
from decode_worker.worker_limits import SessionRules
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import Scheduler
from diptych.errors import InvalidRequestError
from diptych.v1 import kv_source_pb2
from kvtransfer.reader import pull_machine as pull
from kvtransfer.reader.pull_machine import PullMachine
from kvtransfer.reader.quarantine import PullReads
from kvtransfer.source.lease_record import Grant
from kvtransfer.source.lease_table import LeaseTable
from prefill_worker.lease_session import LeaseSession
from router.request.attempt import Attempt
from router.request.emitted_tokens import EmittedTokens
from router.request.fail_over import FailOver
from tests.protocol.test_protocol import ProtocolMachine, SmallMachine

Patch = Callable[[pytest.MonkeyPatch], None]


def free_a_block_whose_read_is_unfinished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "quarantine", lambda self, block_ids: None)


def forget_the_reads_of_a_dead_pull(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PullReads, "abandon", lambda self, now: frozenset())


def compute_where_late_reads_may_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_leave_unfinished_reads", lambda self, entry: None)


def accept_what_was_not_proven(patch: pytest.MonkeyPatch) -> None:
    original = PullMachine.__init__

    def unchecked(self: PullMachine, **given: Any) -> None:
        original(self, **{**given, "check_digests": False, "confirm_digest": False})

    patch.setattr(PullMachine, "__init__", unchecked)
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


def grant_without_revoking(patch: pytest.MonkeyPatch) -> None:
    def grant(self: LeaseTable, lease_id: Any, ticket: bytes, reader: str) -> None:
        lease = self._leases[lease_id]
        lease.grant = Grant(lease, ticket, reader)
        self._grants[ticket] = lease.grant
        self._changed(lease)

    patch.setattr(LeaseTable, "grant", grant)


def start_what_is_not_proven(patch: pytest.MonkeyPatch) -> None:
    original = Attempt.start_if_proven

    def hasty(self: Attempt, output: Sequence[int]) -> bool:
        held = self.reservation
        if held is not None and held.state.name == "PULLING" and self.lease is not None:
            held.state = type(held.state).PROVEN
        return original(self, output)

    patch.setattr(Attempt, "start_if_proven", hasty)
    patch.setattr(SessionRules, "check_start", lambda self, *asked, **known: None)
    original_start = Scheduler.start

    def start(self: Scheduler, seq: Any, emitted: list[int], compute_missing: bool) -> None:
        seq.num_computed_tokens = seq.num_tokens
        original_start(self, seq, emitted, compute_missing)

    patch.setattr(Scheduler, "start", start)


def emit_a_token_at_another_position(patch: pytest.MonkeyPatch) -> None:
    accept, put = EmittedTokens.accept, Outbox.put_tokens

    def accept_anywhere(self: EmittedTokens, position: int, token_ids: Any, margins: Any) -> bool:
        return accept(self, self.num_sequence_tokens, token_ids, margins)

    patch.setattr(EmittedTokens, "accept", accept_anywhere)
    patch.setattr(Outbox, "put_tokens", lambda self, new: put(self, [*new, *new]))


def keep_the_blocks_of_a_closed_lease(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.close

    def close(self: LeaseSession) -> None:
        self._scheduler.release = lambda *asked: None  # type: ignore[method-assign]
        original(self)

    patch.setattr(LeaseSession, "close", close)


def free_the_blocks_of_an_open_lease(patch: pytest.MonkeyPatch) -> None:
    original = LeaseSession.step

    def step(self: LeaseSession, update: Any, started_at: float) -> Any:
        event = original(self, update, started_at)
        if event is not None:
            self._scheduler.release(update.sequence)
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


MUTATIONS: dict[str, Patch] = {
    mutation.__name__: mutation
    for mutation in (
        free_a_block_whose_read_is_unfinished,
        forget_the_reads_of_a_dead_pull,
        compute_where_late_reads_may_write,
        accept_what_was_not_proven,
        accept_another_sequences_lease,
        prove_before_everything_landed,
        grant_without_revoking,
        start_what_is_not_proven,
        emit_a_token_at_another_position,
        keep_the_blocks_of_a_closed_lease,
        free_the_blocks_of_an_open_lease,
        announce_before_it_is_computed,
        forget_the_reservation_when_the_lease_is_lost,
        never_give_up_waiting,
        refuse_a_repeated_grant,
    )
}


WIDE = ("forget_the_reservation_when_the_lease_is_lost",)  # needs a second worker


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    budget = settings(
        max_examples=120,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    machine = ProtocolMachine if name in WIDE else SmallMachine
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=budget)

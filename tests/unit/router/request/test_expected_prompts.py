"""Which prompts the router expects in workers' caches, from what it asked of them. No sockets."""

from collections.abc import Callable
from unittest.mock import create_autospec

import pytest

from diptych.errors import BlocksExhaustedError
from diptych.sampling_params import SamplingParams
from diptych.v1 import decode_pb2
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Why
from router.request import actions, events
from router.request.dispatch import Dispatch
from router.request.emitted_tokens import RequestShape
from router.request.resolved import ResolvedRequest
from router.request.response_builder import ResponseBuilder
from router.request.session import Session
from tests.unit.router.request.dispatch_world import (
    DECODE,
    NUM_BLOCKS,
    PREFILL,
    PROMPT,
    Deaf,
    Untraced,
    World,
    opened,
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return opened(monkeypatch)


async def test_a_prompt_that_was_not_accepted_is_not_expected(world: World) -> None:
    request = world.request()
    assert request.open_lease(actions.OpenLease(PREFILL, 1, 0), (), Deaf())
    assert world.num_believed(PREFILL) == NUM_BLOCKS, "prompts that come together meet"
    request.heard(events.LeaseEnded(1, BlocksExhaustedError("full", retry_after_s=1.0)))
    assert world.num_believed(PREFILL) == 0
    assert request.open_lease(actions.OpenLease(PREFILL, 2, 0), (), Deaf())
    request.close_lease(2)
    assert world.num_believed(PREFILL) == 0


@pytest.mark.parametrize("is_computed", [True, False])
async def test_a_prompt_that_was_accepted_is_expected_until_the_worker_would_have_told(
    world: World, is_computed: bool
) -> None:
    """What it told just then may have been on its way, so the next but one decides."""
    request = world.request()
    request.open_lease(actions.OpenLease(PREFILL, 1, 0), (), Deaf())
    request.heard(events.Accepted(1, 0))
    for _ in range(3):
        world.tells(PREFILL)
        assert world.num_believed(PREFILL) == NUM_BLOCKS, "it waits there to be computed"
    if is_computed:
        request.heard(events.FirstToken(1, 7, len(PROMPT), None, 0))
    request.close_lease(1)
    world.tells(PREFILL)
    assert world.num_believed(PREFILL) == NUM_BLOCKS
    world.tells(PREFILL, world.keys if is_computed else ())
    assert world.num_believed(PREFILL) == (NUM_BLOCKS if is_computed else 0)
    world.tells(PREFILL)
    assert world.num_believed(PREFILL) == 0, "it was evicted"


async def test_what_a_worker_has_stays_whoever_is_refused(world: World) -> None:
    request = world.request()
    world.tells(PREFILL, world.keys)
    request.open_lease(actions.OpenLease(PREFILL, 2, 0), (), Deaf())
    request.heard(events.LeaseEnded(2, BlocksExhaustedError("full", retry_after_s=1.0)))
    assert world.num_believed(PREFILL) == NUM_BLOCKS


async def test_of_a_worker_that_tells_nothing_only_what_is_under_way_is_expected(
    world: World,
) -> None:
    world.cache.untold(PREFILL.incarnation)
    request = world.request()
    request.open_lease(actions.OpenLease(PREFILL, 1, 0), (), Deaf())
    request.heard(events.Accepted(1, 0))
    assert world.num_believed(PREFILL) == NUM_BLOCKS, "prompts that come together meet"
    request.close_lease(1)
    assert world.num_believed(PREFILL) == 0


@pytest.mark.parametrize("computes", [True, False])
async def test_a_decode_worker_is_counted_on_from_the_start_of_a_sequence(
    world: World, computes: bool
) -> None:
    """Until it would have told of it: from its first token on."""
    world.welcomes(DECODE)
    request = world.request()
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=not computes), (), Deaf())
    assert world.num_believed(DECODE) == 0
    request.start(actions.Start(1, (), compute_missing=computes))
    for _ in range(3):
        world.tells(DECODE)
        assert world.num_believed(DECODE) == NUM_BLOCKS
    request.heard(events.Tokens(1, len(PROMPT), (7,), ()))
    request.heard(events.Tokens(1, len(PROMPT) + 1, (7,), ()))
    world.tells(DECODE)
    assert world.num_believed(DECODE) == NUM_BLOCKS
    world.tells(DECODE)
    assert world.num_believed(DECODE) == 0


@pytest.mark.parametrize(
    "end",
    [
        events.Ended(1, 0, 0, BlocksExhaustedError("full", retry_after_s=1.0)),
        events.ReservationLost(1, "cut"),
    ],
    ids=lambda end: type(end).__name__,
)
async def test_a_sequence_that_ends_before_its_first_token_is_counted_on_no_longer(
    world: World, end: events.Ended | events.ReservationLost
) -> None:
    """However often the request is asked for anew: its worker has told twice by then."""
    world.welcomes(DECODE)
    request = world.request()
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=False), (), Deaf())
    request.start(actions.Start(1, (), compute_missing=True))
    request.heard(end)
    for num_believed in (NUM_BLOCKS, 0):
        world.tells(DECODE)
        assert world.num_believed(DECODE) == num_believed


@pytest.mark.parametrize("tells", [True, False])
async def test_other_choices_of_a_prompt_find_it_where_the_first_one_starts(
    world: World, tells: bool
) -> None:
    """Also on a worker of an earlier version, which does not tell what it has."""
    world.welcomes(DECODE)
    if not tells:
        world.cache.untold(DECODE.incarnation)
    request = world.request()
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=True), (), Deaf())
    request.start(actions.Start(1, (), compute_missing=False))
    assert world.num_believed(DECODE) == NUM_BLOCKS


@pytest.mark.parametrize("is_dropped_first", [True, False])
async def test_what_another_prompt_brought_stays_when_one_is_refused(
    world: World, is_dropped_first: bool
) -> None:
    """They share their first blocks and come together."""
    dropped, taken = world.request((*PROMPT[:32], *[1] * 16)), world.request((*PROMPT[:32], 2))
    dropped.open_lease(actions.OpenLease(PREFILL, 1, 0), (), Deaf())
    taken.open_lease(actions.OpenLease(PREFILL, 2, 0), (), Deaf())
    if is_dropped_first:
        dropped.close_lease(1)
        taken.heard(events.Accepted(2, 0))
    else:
        taken.heard(events.Accepted(2, 0))
        dropped.close_lease(1)
    assert world.num_believed(PREFILL) == NUM_BLOCKS
    taken.close_lease(2)
    assert world.num_believed(PREFILL) == NUM_BLOCKS
    world.request((*PROMPT[:32], *[1] * 16))
    assert world.num_believed(PREFILL) == NUM_BLOCKS, "of what only the refused one had, nothing"


async def test_what_a_lease_brought_is_settled_once_and_another_still_expects_the_same(
    world: World,
) -> None:
    """When it is computed, and not again when its lease is closed."""
    computed, waiting = world.request(), world.request()
    for sequence_id, request in enumerate((computed, waiting), start=1):
        request.open_lease(actions.OpenLease(PREFILL, sequence_id, 0), (), Deaf())
        request.heard(events.Accepted(sequence_id, 0))
    computed.heard(events.FirstToken(1, 7, len(PROMPT), None, 0))
    computed.close_lease(1)
    for _ in range(3):
        world.tells(PREFILL)
        assert world.num_believed(PREFILL) == NUM_BLOCKS, "the other waits there to be computed"
    waiting.close_lease(2)
    for num_believed in (NUM_BLOCKS, 0):
        world.tells(PREFILL)
        assert world.num_believed(PREFILL) == num_believed


async def test_nothing_is_expected_of_a_worker_that_was_forgotten(world: World) -> None:
    world.welcomes(DECODE)
    decode = world.cluster._decode[DECODE.address]
    request = world.request()
    assert request.reserve(actions.Reserve(DECODE, 1, 0, to_pull=True), (), Deaf())
    decode.watch._lose("its Watch broke")  # its decode stream has not, yet
    request.start(actions.Start(1, (), compute_missing=True))
    assert DECODE.incarnation not in world.cache._workers
    request.release(1)
    assert DECODE.incarnation not in world.cache._workers


def running(world: World) -> Session:
    """A request whose prompt the decode worker computes; the first of its sequences is 1."""
    shape = RequestShape(prompt_ids=PROMPT, max_tokens=9, stop_token_ids=frozenset())
    answer = create_autospec(
        ResponseBuilder, instance=True, is_due=False, is_overfull=False, num_output_tokens=0
    )
    answer.sink.return_value = False  # none is a stop
    session = Session(
        "r",
        ResolvedRequest(shape=shape, sampling=SamplingParams(max_tokens=9)),
        answer,
        Untraced(),
        world.services,
        deadline_s=None,
        on_failed=lambda: None,
    )
    session.start()
    world.services.room.pump()
    session.on_decode_event(
        decode_pb2.DecodeEvent(reserved=decode_pb2.Reserved(sequence_id=1, num_cached_tokens=0))
    )
    assert session.is_under_way
    world.keys = session._dispatch._keys or ()
    return session


def says_token(session: Session, index: int) -> None:
    session.on_tokens(
        decode_pb2.SequenceTokens(sequence_id=1, position=len(PROMPT) + index, token_ids=[7])
    )


def hears(dispatch: Dispatch, heard: list[events.Event]) -> Callable[[events.Event], None]:
    """What ``dispatch`` is told from now on is noted in ``heard``."""
    hear = dispatch.heard

    def note(event: events.Event) -> None:
        heard.append(event)
        hear(event)

    return note


@pytest.fixture
def local(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """All prompts are the decode worker's, and nothing is foretold of them."""
    monkeypatch.setattr(LeastLoaded, "place", lambda *asked: DecodeOnly(DECODE, Why.CHOICE))
    world.welcomes(DECODE)
    return world


async def test_what_a_worker_evicts_while_a_sequence_runs_is_not_believed_to_its_end(
    local: World,
) -> None:
    """Through the session, which passes most tokens by."""
    session = running(local)
    says_token(session, 0)
    local.tells(DECODE, local.keys)
    assert local.num_believed(DECODE) == NUM_BLOCKS
    says_token(session, 1)
    local.tells(DECODE)  # it was preempted, and its blocks went to others
    says_token(session, 2)
    assert local.num_believed(DECODE) == 0
    session.close()
    assert local.num_believed(DECODE) == 0


async def test_where_a_worker_does_not_tell_a_prompt_is_there_as_long_as_its_sequence(
    local: World,
) -> None:
    """Other choices of the prompt wait for room, and are to find it beside the first."""
    local.cache.untold(DECODE.incarnation)
    session = running(local)
    for index in range(3):
        says_token(session, index)
        assert local.num_believed(DECODE) == NUM_BLOCKS
    local.tells(DECODE)  # it does now
    says_token(session, 3)
    for num_believed in (NUM_BLOCKS, 0):
        local.tells(DECODE)
        assert local.num_believed(DECODE) == num_believed
    session.close()


async def test_a_session_looks_at_tokens_until_the_first_and_not_at_all_the_others(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[events.Event] = []
    session = running(local)
    monkeypatch.setattr(session._dispatch, "heard", hears(session._dispatch, heard))
    for index in range(5):
        says_token(session, index)
    assert len(heard) == 1
    session.close()

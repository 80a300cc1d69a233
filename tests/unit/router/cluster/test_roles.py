"""Roles come from what workers say, and change while they run. No sockets."""

import pytest

from diptych.rpc import peer_channel
from diptych.rpc.identity import Identity, PeerRole
from diptych.rpc.peer_channel import Dialer
from diptych.step_model import StepCost, StepModel
from diptych.v1 import decode_pb2, worker_pb2
from router.cluster.watch import WorkerWatch
from router.discovery.source import Targets
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import DecodeOnly, Paired, Why
from router.placement.predicted import Predicted
from router.placement.query import Objectives, Query
from router.placement.views import WorkerId
from tests.unit.router.cluster.last_words import LastWords
from tests.unit.router.cluster.world import READY, FakeChannel, World, placeable, proven, targets
from tests.unit.router.request.dispatch_world import Deaf

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
BOTH = (PREFILL, DECODE)
QUERY = Query(num_tokens=100, num_max_tokens=200)


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channel, "open_channel", lambda address, timers: FakeChannel())


class FakeIdentity:
    pems = "ours"


def soft_world(**roles: tuple[int, ...]) -> World:
    """Workers that could have either role, named by no list as what they are; all pairs proven."""
    world = World()
    world.decode = [f"{name}:1" for name in roles]
    world.cluster.set_members(Targets(decode=frozenset(world.decode), has_prefill_pool=False))
    for name, held in roles.items():
        soft(world, name, held)
    for address in world.decode:
        world.links.append(world.link(address))
        world.sequence_ids.append([])
    return world


def soft(world: World, name: str, held: tuple[int, ...], **changes: object) -> None:
    """The worker says which roles it has; its pairs with all others are proven."""
    address = f"{name}:1"
    pairs = [proven(other) for other in world.decode if other != address]
    world.says(
        address,
        role=held[0],
        roles=held,
        able_roles=BOTH,
        pairs=pairs,
        pairs_version=1,
        **changes,
    )


def worker(name: str) -> WorkerId:
    return WorkerId(f"{name}:1", f"{name}:1-1")


async def test_a_worker_that_has_only_roles_without_a_name_here_gets_no_more_work() -> None:
    world = soft_world(a=BOTH, b=(DECODE,))
    assert placeable(world) == ({"a:1"}, {"a:1", "b:1"})
    world.says("b:1", role=78, roles=(78,), able_roles=(78,))
    assert placeable(world) == ({"a:1"}, {"a:1"})
    soft(world, "b", (DECODE,))
    assert placeable(world) == ({"a:1"}, {"a:1", "b:1"})


async def test_a_worker_of_both_roles_is_in_both_pools_over_one_watch() -> None:
    world = soft_world(a=BOTH, b=(DECODE,))
    assert placeable(world) == ({"a:1"}, {"a:1", "b:1"})
    assert world.cluster.snapshot().has_prefill_pool, "though no list names one"
    seen = world.cluster.overview()
    assert [each.address for each in seen.prefill] == ["a:1"]
    assert [each.address for each in seen.decode] == ["a:1", "b:1"]
    watches: set[WorkerWatch] = {m.watch for m in world.cluster._members()}
    assert len(watches) == 2


async def test_prompts_may_be_computed_apart_while_somebody_could_be_given_that_role() -> None:
    world = soft_world(a=(DECODE,), b=(DECODE,))
    assert placeable(world) == (set(), {"a:1", "b:1"})
    assert not world.cluster.snapshot().has_prefill_pool
    assert world.cluster.may_have_prefill
    for address in world.decode:
        world.watch(address)._lose("a cut line")
    assert world.cluster.may_have_prefill, "for all that is known"
    for address in world.decode:
        world.says(address, role=DECODE, roles=(DECODE,), able_roles=(DECODE,))
    assert not world.cluster.may_have_prefill, "workers of one role came back there"
    world.cluster.set_members(targets(["p:1"], world.decode))
    assert world.cluster.may_have_prefill, "one is named"


async def test_one_worker_of_both_roles_serves_alone() -> None:
    """It is its own pair, and pulls nothing from itself."""
    world = soft_world(a=BOTH)
    assert world.cluster.is_ready
    assert world.cluster.num_proven_pairs == 0
    assert world.policy.place(QUERY, world.cluster.snapshot()) == DecodeOnly(
        worker("a"), Why.CHOICE
    )


async def test_a_flip_moves_a_worker_between_the_pools_and_is_news() -> None:
    world = soft_world(a=(PREFILL,), b=(DECODE,))
    snapshot = world.cluster.snapshot()
    assert world.policy.place(QUERY, snapshot) == Paired(worker("a"), worker("b"))
    world.num_changes = 0
    soft(world, "a", (DECODE,))
    soft(world, "b", (PREFILL,))
    assert world.num_changes >= 2, "who waits may be placed now"
    assert placeable(world) == ({"b:1"}, {"a:1"})
    placed = world.policy.place(QUERY, world.cluster.snapshot())
    assert placed == Paired(worker("b"), worker("a")), "its pair was proven before"


async def test_a_worker_that_lost_a_role_keeps_what_it_has() -> None:
    """Its stream stays open, and readers go on to know it as a source."""
    world = soft_world(a=BOTH, b=BOTH)
    listener = LastWords()
    link = world.cluster._decode["a:1"].link
    assert link.reserve(decode_pb2.Reserve(sequence_id=7), listener)
    soft(world, "a", (PREFILL,))
    soft(world, "b", (DECODE,))
    assert placeable(world) == ({"a:1"}, {"b:1"})
    assert world.cluster.decode_link(worker("a")) is link
    assert (link.load.num_own, listener.lost) == (1, [])
    assert worker("b") in link._peers, "leases that b has are pulled to their end"
    assert link.watch.state is not None
    assert link.watch.state.state == READY


async def test_one_that_waits_for_a_pair_is_a_source_while_it_may_have_leases() -> None:
    """It gave up prefill, may not compute prompts for itself, and nobody else computes any."""
    world = soft_world(a=(PREFILL,), b=(DECODE,))
    link = world.cluster._decode["b:1"].link
    soft(world, "a", (DECODE,), state=worker_pb2.SERVING_STATE_STARTING)
    assert placeable(world) == (set(), {"b:1"})
    assert worker("a") in link._peers
    soft(world, "a", (DECODE,), state=worker_pb2.SERVING_STATE_FAILED)
    assert worker("a") not in link._peers


async def test_what_was_sent_to_one_role_counts_for_the_other_until_the_worker_tells() -> None:
    world = soft_world(a=BOTH)
    world.cluster.prefill_backlog.opened(1, worker("a"), 30, b"")
    world.cluster.prefill_backlog.accepted(1, 0)
    world.reserve(worker("a"), num_tokens=20, is_started=True)
    (prefill,), (decode,) = world.cluster.snapshot().prefill, world.cluster.snapshot().decode
    assert (prefill.num_pending_tokens, decode.num_pending_tokens) == (50, 50)
    world.passes(1.0)
    soft(world, "a", BOTH, num_pending_prefill_tokens=50)
    (prefill,), (decode,) = world.cluster.snapshot().prefill, world.cluster.snapshot().decode
    assert (prefill.num_pending_tokens, decode.num_pending_tokens) == (50, 50)


async def test_a_worker_is_left_with_all_its_roles() -> None:
    world = soft_world(a=BOTH, b=BOTH)
    world.cluster.set_members(targets([], ["b:1"]))
    assert placeable(world) == ({"b:1"}, {"b:1"})
    assert world.cluster.prefill_watch(worker("a")) is None
    assert world.cluster.decode_link(worker("a")) is None


async def test_who_computed_prompts_is_missed_until_its_address_is_gone_or_says_otherwise() -> None:
    """Else the last one's crash would let decode workers compute what they may not."""
    world = soft_world(a=(PREFILL,), b=(DECODE,))
    strict = LeastLoaded(
        CacheIndex(10), local_below_tokens=0, allow_local=False, allow_recompute=False
    )
    assert strict.place(QUERY, world.cluster.snapshot()) == Paired(worker("a"), worker("b"))
    world.watch("a:1")._lose("it crashed")
    snapshot = world.cluster.snapshot()
    assert snapshot.has_prefill_pool
    assert strict.place(QUERY, snapshot) is None
    seen = world.cluster.overview()
    assert [each.address for each in seen.prefill] == ["a:1"], "as what it was"
    soft(world, "a", (DECODE,), incarnation="a:1-2")
    assert not world.cluster.snapshot().has_prefill_pool, "it is another now"
    soft(world, "a", (PREFILL,), incarnation="a:1-3")
    world.watch("a:1")._lose("it crashed again")
    world.cluster.set_members(Targets(decode=frozenset(["b:1"]), has_prefill_pool=False))
    assert not world.cluster.snapshot().has_prefill_pool, "it shall not be there"
    assert strict.place(QUERY, world.cluster.snapshot()) == DecodeOnly(worker("b"), Why.CHOICE)


async def test_an_address_of_another_list_is_expected_to_be_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With locks: whoever is met there next has to be certified as what it is named now."""
    opened: list[str] = []

    def noted(dialer: Dialer, address: str, role: PeerRole) -> FakeChannel:
        opened.append(role)
        return FakeChannel()

    monkeypatch.setattr(Dialer, "open", noted)
    monkeypatch.setattr(Identity, "of", lambda files: FakeIdentity())
    world = World()
    world.cluster.set_members(targets(["x:1"], ["d:1"]))
    watch = world.cluster._watches["x:1"]
    await watch._peer.renewed()
    world.says("x:1", role=PREFILL)
    world.cluster.set_members(targets(["p:1"], ["x:1", "d:1"]))
    assert world.cluster._watches["x:1"] is watch, "what runs there goes on"
    watch._lose("it was replaced")
    for _ in range(2):
        await watch._peer.renewed()
    assert opened == ["prefill", "decode"]


async def test_who_is_lost_and_named_otherwise_is_no_more_what_it_was() -> None:
    world = World()
    world.cluster.set_members(targets(["x:1"], ["d:1"]))
    world.says("x:1", role=PREFILL)
    world.watch("x:1")._lose("it was replaced")
    world.cluster.set_members(Targets(decode=frozenset(["x:1", "d:1"]), has_prefill_pool=False))
    assert not world.cluster.snapshot().has_prefill_pool
    assert [each.address for each in world.cluster.overview().prefill] == []


ENGINE = StepModel(prefill=StepCost(prefill_token_s=0.001, num_steps=30)).to_proto()


async def test_who_wants_a_pace_is_placed_where_prompts_are_leased_no_more() -> None:
    """What they took of late was of the role that it lost."""
    model = StepModel(
        prefill=StepCost(prefill_token_s=0.001, num_steps=30),
        decode=StepCost(fixed_s=0.02, num_steps=30),
    )
    told = {"step_model": model.to_proto(), "max_batched_tokens": 64, "prefill_time_ratio": 0.9}
    paced = Query(num_tokens=100, num_max_tokens=200, objectives=Objectives(None, 0.03))
    paced = paced._replace(may_refuse=True)
    world = soft_world(a=BOTH, b=(PREFILL,))
    policy = Predicted(world.policy, lambda: 0.5)
    soft(world, "b", (PREFILL,), **told)
    soft(world, "a", BOTH, **told)
    assert policy.place(paced, world.cluster.snapshot()) is None, "it is at prompts, mostly"
    soft(world, "a", (DECODE,), **told)
    placed = policy.place(paced, world.cluster.snapshot())
    assert isinstance(placed, Paired | DecodeOnly)
    assert placed.decode == worker("a")
    soft(world, "a", BOTH, **told)
    (view,) = world.cluster.snapshot().decode
    assert view.prefill_time_ratio == pytest.approx(0.9)


async def test_a_prompt_that_is_computed_beside_leases_is_news_to_those() -> None:
    """Whoever takes only what nobody else wants may lease there now."""
    world = soft_world(a=BOTH)
    sequence_id = world.reserve(worker("a"), num_tokens=20, is_started=True, listener=Deaf())
    world.num_changes = 0
    world.draws("a:1", sequence_id)
    assert world.num_changes == 1


async def test_leases_of_less_work_are_news_to_those_that_are_decoded_beside_them() -> None:
    world = soft_world(a=BOTH)
    soft(world, "a", BOTH, step_model=ENGINE)
    world.cluster.prefill_backlog.opened(1, worker("a"), 30, b"")
    world.num_changes = 0
    world.cluster.prefill_backlog.accepted(1, 5)
    assert world.num_changes == 0
    world.cluster.prefill_backlog.accepted(1, 17)
    assert world.num_changes == 1, "8 tokens are computed in less than 20 ms"


async def test_what_a_worker_tells_is_seen_beside_what_it_told_of_the_other_role() -> None:
    """Nothing waits there any more: it is news with this message, not with the next one."""
    world = soft_world(a=BOTH)
    world.reserve(worker("a"), num_tokens=20, is_started=True)
    world.passes(1.0)
    world.num_changes = 0
    soft(world, "a", BOTH)
    assert world.num_changes == 1
    soft(world, "a", BOTH)
    assert world.num_changes == 1


async def test_what_moves_from_what_was_sent_to_what_is_told_is_no_news() -> None:
    world = soft_world(a=BOTH)
    soft(world, "a", BOTH, prefill_tokens_per_s=1000.0, step_model=ENGINE)
    world.reserve(worker("a"), num_tokens=15, is_started=True)
    world.passes(1.0)
    world.num_changes = 0
    for num_tokens in (15, 15, 20):
        soft(
            world,
            "a",
            BOTH,
            prefill_tokens_per_s=1000.0,
            step_model=ENGINE,
            num_pending_prefill_tokens=num_tokens,
        )
    assert world.num_changes == 0

"""Who is a member, what a message on Watch costs, and what placement then sees. No sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from diptych.errors import ConfigurationError, DiptychError
from diptych.rpc import peer_channel
from diptych.timers import Timers
from diptych.v1 import decode_pb2, worker_pb2
from router.cluster.cache_link import CacheLink
from router.cluster.decode_link import DecodeLink
from router.cluster.member import DecodeMember
from router.cluster.members import Cluster
from router.cluster.watch import WorkerWatch
from router.discovery.source import StaticDiscovery, Targets
from router.placement.cache_index import CacheIndex
from router.placement.claim import Asked
from router.placement.least_loaded import LeastLoaded
from router.placement.place import Place
from router.placement.placement import DecodeOnly, Paired, Why
from router.placement.query import Query
from router.placement.views import Snapshot, WorkerId
from router.placement.waiting_room import WaitingRoom
from tests.told_caches import holds, whole
from tests.unit.router.cluster.last_words import LastWords
from tests.unit.router.cluster.world import FakeChannel, World, placeable, proven, targets, welcome

pytestmark = pytest.mark.usefixtures("no_sockets")


def test_where_workers_are_reaches_placement() -> None:
    """By what they say, else by what their discovery says, which may change."""
    world = World(prefill=2, decode=1)
    world.says("p0:1", zone="own", nvlink_domain="rack")
    found = {"p0:1": Place("found", "other"), "p1:1": Place("found"), "d0:1": Place("found")}
    world.cluster.set_members(replace(targets(world.prefill, world.decode), places=found))
    snapshot = world.cluster.snapshot()
    assert [view.place for view in snapshot.prefill] == [Place("own", "rack"), Place("found")]
    assert [view.place for view in snapshot.decode] == [Place("found")]
    world.cluster.set_members(targets(world.prefill, world.decode))
    assert [view.place for view in world.cluster.snapshot().decode] == [Place()]


async def test_one_that_comes_and_goes_before_it_is_watched_leaves_no_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []

    def open_channel(address: str, timers: Timers) -> FakeChannel:
        opened.append(address)
        return FakeChannel()

    monkeypatch.setattr(peer_channel, "open_channel", open_channel)
    world = World()
    world.cluster.set_members(targets(["p0:1"], ["d0:1"]))
    world.cluster.set_members(targets([], []))
    assert not opened


async def test_a_certificate_has_to_name_the_role_of_the_list() -> None:
    """Decode, of whom both name: a worker of several roles has a certificate for each."""
    world = World()
    for lists in ((["p0:1", "s0:1"], ["d0:1", "s0:1"]), (["d0:1"], ["p0:1", "s0:1"])):
        world.cluster.set_members(targets(*lists))
        for address in ("p0:1", "d0:1", "s0:1"):
            expected = "decode" if address in lists[1] else "prefill"
            assert world.watch(address)._peer._role == expected


async def test_members_come_go_and_come_back() -> None:
    world = World(prefill=1, decode=2)
    assert placeable(world) == ({"p0:1"}, {"d0:1", "d1:1"})
    world.cluster.set_members(targets([], ["d1:1"]))
    assert placeable(world) == (set(), {"d1:1"})
    assert world.cluster.decode_link(WorkerId("d0:1", "d0:1-1")) is None
    world.cluster.set_members(targets(["p0:1"], ["d0:1", "d1:1"]))
    assert placeable(world) == (set(), {"d1:1"}), "nothing is known of it yet"
    world.says("p0:1")
    world.says("d0:1")
    world.link("d0:1")
    assert placeable(world) == ({"p0:1"}, {"d0:1", "d1:1"})


async def test_a_prefill_pool_without_workers_is_still_one() -> None:
    """Whether there shall be one is the source's word: else an outage would allow what the
    settings forbid, to compute prompts on decode workers."""
    world = World(prefill=1, decode=1)
    world.cluster.set_members(targets([], ["d0:1"]))
    assert world.cluster.snapshot().has_prefill_pool
    assert placeable(world) == (set(), {"d0:1"})
    forbidding = LeastLoaded(
        CacheIndex(1000), local_below_tokens=64, allow_local=False, allow_recompute=True
    )
    query = Query(num_tokens=32, num_max_tokens=40)
    assert forbidding.place(query, world.cluster.snapshot()) is None
    world.cluster.set_members(Targets(decode=frozenset({"d0:1"}), has_prefill_pool=False))
    assert isinstance(forbidding.place(query, world.cluster.snapshot()), DecodeOnly)


async def test_words_on_traces_of_a_worker_that_is_not_seen_are_kept_for_it() -> None:
    world = World(decode=1)
    worker = world.cluster.snapshot().decode[0].worker
    world.watch("d0:1")._lose("a cut line")
    world.cluster.tell_trace(worker, 7, keep=True)
    (word,) = world.cluster._traces["d0:1"]._words
    assert (word.worker, word.hold, word.keep) == (worker, 7, True)
    world.cluster.tell_trace(WorkerId("left:1", "i"), 7, keep=True)  # nobody hears it


async def test_a_word_of_a_worker_that_was_left_changes_nothing() -> None:
    world = World(decode=2)
    left = world.watch("d0:1")
    world.cluster.set_members(targets([], ["d1:1"]))
    assert left.state is not None
    left._update(left.state)
    assert placeable(world) == (set(), {"d1:1"})


async def test_the_requests_of_a_removed_worker_are_told_and_its_tasks_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Source:
        age_s = 0.0

        def __init__(self) -> None:
            self.changes: asyncio.Queue[Targets] = asyncio.Queue()

        async def targets(self) -> AsyncIterator[Targets]:
            while True:
                yield await self.changes.get()

    ended: list[str] = []

    async def wait_for_ever(watch: WorkerWatch) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(watch.address)

    async def hold(link: DecodeLink) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            link._break("the router left it")
        return True

    async def follow(link: CacheLink) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cache")
        return True

    monkeypatch.setattr(WorkerWatch, "run", wait_for_ever)
    monkeypatch.setattr(DecodeLink, "_hold_stream", hold)
    monkeypatch.setattr(CacheLink, "_hold_stream", follow)
    world, source, listener = World(), Source(), LastWords()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.cluster.run(source))
        source.changes.put_nowait(Targets(decode=frozenset({"d0:1", "d1:1"})))
        await settled()
        world.says("d0:1")
        link = world.link("d0:1")
        assert link.reserve(decode_pb2.Reserve(sequence_id=1), listener)
        source.changes.put_nowait(Targets(decode=frozenset({"d1:1"})))
        await settled()
        assert ended == ["d0:1", "cache"]
        assert listener.lost == [(1, "the router left it")]
        running.cancel()
    assert sorted(ended) == ["cache", "cache", "d0:1", "d1:1"]


async def settled() -> None:
    """Let the loop run until nothing is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_static_source_tells_once_and_needs_a_decode_worker() -> None:
    source = StaticDiscovery(prefill=["p0:1"], decode=["d0:1"])
    told = [each async for each in source.targets()]
    assert told == [Targets(prefill=frozenset({"p0:1"}), decode=frozenset({"d0:1"}))]
    alone = [each async for each in StaticDiscovery(prefill=[], decode=["d0:1"]).targets()]
    assert alone == [Targets(decode=frozenset({"d0:1"}), has_prefill_pool=False)]
    with pytest.raises(ConfigurationError, match="--decode"):
        StaticDiscovery(prefill=["p0:1"], decode=[])


async def test_watch_at_100_x_100_costs_one_view_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Load alone tells nobody of peers, chooses no model, reads no pair, pumps no queue."""
    world = World(prefill=100, decode=100)
    counts = {"set_peers": 0, "gates": 0, "pairs": 0}
    count_calls(monkeypatch, DecodeLink, "set_peers", counts, "set_peers")
    count_calls(monkeypatch, Cluster, "_gates_changed", counts, "gates")
    count_calls(monkeypatch, DecodeMember, "read_pairs", counts, "pairs")
    before, world.num_changes = world.cluster.snapshot(), 0
    for number in range(50):
        world.says(f"d{number}:1", num_running=2)
        world.says(f"p{number}:1", num_pending_prefill_tokens=9)
    assert (counts, world.num_changes) == ({"set_peers": 0, "gates": 0, "pairs": 0}, 0)
    after = world.cluster.snapshot()
    assert after is world.cluster.snapshot(), "made once"
    same = [a is b for a, b in zip(before.decode, after.decode, strict=True)]
    assert same.count(False) == 50
    assert all(view.num_sequences == 2 for view in after.decode[:1])


def count_calls(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, counts: dict[str, int], key: str
) -> None:
    honest = getattr(cls, name)

    def counted(self: object, *args: object, **named: object) -> object:
        counts[key] += 1
        return honest(self, *args, **named)

    monkeypatch.setattr(cls, name, counted)


async def test_only_a_placement_that_was_not_possible_before_is_news() -> None:
    world = World(prefill=1, decode=1)
    link, worker = world.links[0], world.cluster.snapshot().decode[0].worker
    ours = [world.reserve(worker) for _ in range(4)]
    assert not world.cluster.snapshot().has_room_for([Asked(b"any")])
    world.num_changes = 0
    world.says("d0:1", num_running=4)
    assert world.num_changes == 0, "as full as before"
    link.release(ours[0])
    assert world.num_changes == 1
    assert world.cluster.snapshot().has_room_for([Asked(b"any")])
    link.release(ours[1])
    assert world.num_changes == 2, "for a batch, which leaves one place in four to others"
    link.release(ours[2])
    assert world.num_changes == 2, "there was room already"


async def test_a_pair_that_is_proven_now_is_news() -> None:
    world = World(prefill=1, decode=1)
    world.num_changes, world.prefill = 0, []
    world.says("d0:1", pairs_version=2)
    assert world.num_changes == 0, "one less"
    world.says("d0:1", pairs_version=3, pairs=[proven("p0:1")])
    assert world.num_changes == 1


@pytest.mark.parametrize(("address", "placed"), [("p0:1", {"p0:1-1"}), ("p9:1", set())])
async def test_of_routers_that_name_a_source_differently_who_names_the_proven_one_uses_it(
    address: str, placed: set[str]
) -> None:
    world = World()
    world.cluster.set_members(targets([address], ["d0:1"]))
    world.says(address, incarnation="p0:1-1")
    world.says("d0:1", pairs=[proven("p0:1")])
    world.link("d0:1")
    (decode,) = world.cluster.snapshot().decode
    assert decode.proven == placed


async def test_the_loss_of_the_last_prefill_worker_is_news_too() -> None:
    """What waits for it may be computed by a decode worker now."""
    world = World(prefill=1, decode=1)
    world.num_changes = 0
    world.watch("p0:1")._lose("it ended the stream")
    assert world.num_changes == 1
    query = Query(num_tokens=100, num_max_tokens=200)
    placement = world.policy.place(query, world.cluster.snapshot())
    assert placement == DecodeOnly(WorkerId("d0:1", "d0:1-1"), Why.NO_PREFILL)


async def test_the_loss_of_the_last_pair_is_news_too() -> None:
    """As where all settings of the pools differ: a prefill worker that nobody can pull from is
    no reason to wait.
    """
    world = World(prefill=1, decode=2)
    world.prefill = []
    failed = proven("p0:1")
    failed.state = worker_pb2.PAIR_STATE_FAILED
    query = Query(num_tokens=100, num_max_tokens=200)
    world.says("d0:1", pairs_version=2, pairs=[failed])
    assert world.cluster.snapshot().has_prefill, "the other one can pull"
    assert isinstance(world.policy.place(query, world.cluster.snapshot()), Paired)
    connecting = proven("p0:1")
    connecting.state = worker_pb2.PAIR_STATE_CONNECTING
    world.says("d1:1", pairs_version=2, pairs=[connecting])
    assert world.policy.place(query, world.cluster.snapshot()) is None, "it may be soon"
    assert not world.cluster.is_ready
    world.num_changes = 0
    world.says("d1:1", pairs_version=3, pairs=[failed])
    assert world.num_changes == 1
    placement = world.policy.place(query, world.cluster.snapshot())
    assert isinstance(placement, DecodeOnly)
    assert placement.why is Why.NO_PREFILL
    assert world.cluster.is_ready
    assert world.cluster.snapshot().has_room_for([Asked(b"any")])
    world.says("p0:1", incarnation="again")
    assert world.cluster.snapshot().has_prefill, "another process may fit"


async def test_who_waits_is_told_of_the_room_of_a_half_that_will_not_be_asked_for() -> None:
    """Its first one was refused, and its request is elsewhere already: nobody else would tell."""
    world = World(prefill=1, decode=1)
    world.says("d0:1", max_num_seqs=1)
    pair = Paired(WorkerId("p0:1", "p0:1-1"), WorkerId("d0:1", "d0:1-1"))
    halves, query = world.cluster.second_halves, Query(num_tokens=100, num_max_tokens=200)
    halves.add("request", pair, pair.prefill, 100)
    assert world.policy.place(query, world.cluster.snapshot()) is None
    world.num_changes = 0
    halves.drop("request")
    assert world.num_changes == 1
    assert world.policy.place(query, world.cluster.snapshot()) is not None
    halves.add("request", pair, pair.prefill, 100)
    halves.asked("request")
    assert world.num_changes == 1


async def test_one_worker_with_other_weights_is_left_out_and_not_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(prefill=2, decode=2)
    world.says("p0:1", incarnation="again", model_digest="new")
    assert placeable(world) == ({"p1:1"}, {"d0:1", "d1:1"})
    world.says("p0:1", incarnation="again", model_digest="new")
    (said,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert said.message == "another model than most workers': not used"
    assert (said.__dict__["model_digest"], said.__dict__["served"]) == ("new", "m")


async def test_a_complaint_is_remembered_as_long_as_its_worker_is_a_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each pod has an address of its own: they would be many."""
    world = World(decode=3)
    for _ in range(2):
        world.says("d0:1", incarnation="again", model_digest="new")
        world.cluster.set_members(targets([], ["d1:1", "d2:1"]))
        assert not world.cluster._model._complained
        world.cluster.set_members(targets([], world.decode))
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 2


async def test_most_workers_say_which_model_is_served() -> None:
    world = World(decode=3)
    world.says("d0:1", incarnation="again", model_digest="new")
    assert placeable(world)[1] == {"d1:1", "d2:1"}
    world.says("d1:1", incarnation="again too", model_digest="new")
    world.link("d0:1")._handle(welcome("again"))
    world.link("d1:1")._handle(welcome("again too"))
    assert placeable(world)[1] == {"d0:1", "d1:1"}


async def test_a_pool_that_has_other_weights_first_does_not_leave_nobody_to_decode() -> None:
    """All prefill workers are rolled to new ones: those that decode go on alone, with the old."""
    world = World(prefill=3, decode=2)
    for address in world.prefill:
        world.says(address, incarnation=f"{address} again", model_digest="new")
    assert placeable(world) == (set(), {"d0:1", "d1:1"})
    world.says("d0:1", incarnation="again", model_digest="new")
    world.link("d0:1")._handle(welcome("again"))
    assert placeable(world) == (set(world.prefill), {"d0:1"}), "most have the new ones, one decodes"


async def test_workers_with_another_tokenizer_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.cluster.set_members(targets([], ["d0:1"]))
    world.says("d0:1", text_digest="another")
    world.link("d0:1")
    assert placeable(world) == (set(), set())
    assert world.cluster.max_model_len is None, "no worker was found"
    (said,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert said.message == "another tokenizer or config than this router's: not used"
    assert (said.__dict__["text_digest"], said.__dict__["ours"]) == ("another", "text")


async def test_another_process_at_an_address_is_not_taken_for_the_one_before() -> None:
    """Nothing is asked of it over what led to that; by its own stream it is used."""
    world = World(prefill=1, decode=1)
    before = [WorkerId(address, f"{address}-1") for address in ("p0:1", "d0:1")]
    assert world.cluster.prefill_watch(before[0]) is not None
    for address in ("p0:1", "d0:1"):
        world.says(address, incarnation=f"{address}-2")
    assert world.cluster.prefill_watch(before[0]) is None
    assert not any(world.cluster.has_worker(worker) for worker in before)
    assert placeable(world) == ({"p0:1"}, set())
    world.links[0]._handle(welcome("d0:1-2"))
    assert placeable(world) == ({"p0:1"}, {"d0:1"})
    assert world.cluster.decode_link(before[1]) is None


async def test_what_a_process_had_cached_is_forgotten_with_it() -> None:
    world = World()
    world.cluster.set_members(targets([], ["d0:1"]))
    world.says("d0:1")
    worker, keys = WorkerId("d0:1", "d0:1-1"), (b"a" * 16, b"b" * 16)
    holds(world.policy, worker, keys)
    world.says("d0:1", num_running=1)
    assert world.policy.cache.num_hit_blocks(worker.incarnation, keys) == 2
    world.says("d0:1", incarnation="again")
    assert world.policy.cache.holders(keys) == set()
    again, link = WorkerId("d0:1", "again"), world.cluster._caches["d0:1"]
    holds(world.policy, again, keys)
    world.cluster.set_members(targets([], []))
    assert world.policy.cache.holders(keys) == set()
    assert link._take(again, whole(keys).to_proto("again")) is not None, "its stream is to end"
    assert world.policy.cache.holders(keys) == set()


class Asker:
    """A waiter that asks the policy, as a request does."""

    def __init__(self, world: World, room: WaitingRoom) -> None:
        self.world = world
        self.room = room
        self.num_offers = 0

    def offer(self, *, room_made: bool) -> None:
        self.num_offers += 1
        query = Query(num_tokens=100, num_max_tokens=200)
        placement = self.world.policy.place(query, self.world.cluster.snapshot())
        if isinstance(placement, Paired):
            self.room.take(self)
            self.world.reserve(placement.decode)

    def may_be_local(self) -> bool:
        return True

    def may_come(self) -> bool:
        return True

    def turn_away(self, error: DiptychError) -> None:
        raise AssertionError(error)


async def test_256_that_wait_cost_little_while_all_workers_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 + 8 workers, 4 sequences each: of 288 requests 32 are placed and 256 wait."""
    world = World(prefill=8, decode=8)
    pumps: list[Callable[[], None]] = []
    room = WaitingRoom(
        max_waiting=256,
        max_placed=512,
        schedule=pumps.append,
        schedule_rest=lambda after_s, pump: pumps.append(pump),
        has_room=lambda those: world.cluster.snapshot().has_room_for(those),
    )
    world.on_change = room.pump_soon
    askers = [Asker(world, room) for _ in range(288)]
    for asker in askers:
        room.enter(asker, front=False)
    run_all(pumps)
    assert (room.num_placed, room.num_waiting) == (32, 256)

    builds = {"snapshots": 0}
    count_calls(monkeypatch, Snapshot, "__init__", builds, "snapshots")
    offers = sum(asker.num_offers for asker in askers)
    for _ in range(10):
        for number in range(8):
            world.says(f"d{number}:1", num_running=4)
            world.says(f"p{number}:1", num_pending_prefill_tokens=50)
    assert pumps == [], "160 messages that tell of load alone"
    room.pump()
    assert sum(asker.num_offers for asker in askers) == offers, "nobody has room"
    assert builds["snapshots"] == 1
    world.links[0].release(world.sequence_ids[0][0])
    room.leave(askers[0])
    run_all(pumps)
    assert (room.num_placed, room.num_waiting) == (32, 255), "one left, the next one came"
    assert sum(asker.num_offers for asker in askers) == offers + 1
    assert builds["snapshots"] == 3, "before and after it came"


def run_all(pumps: list[Callable[[], None]]) -> None:
    while pumps:
        pumps.pop(0)()

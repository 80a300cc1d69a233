"""What placement sees of workers' load: what they told, and what was sent since."""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from diptych.block_needs import ShippedBytes
from diptych.paced import Paced
from diptych.step_model import StepCost, StepModel, StepWork
from diptych.v1 import decode_pb2, worker_pb2
from router.config import RouterConfig
from router.placement.claim import Asked
from router.placement.placement import Paired
from router.placement.promises import NOTHING_PROMISED, Promise, promised
from router.placement.query import Query
from router.placement.views import EngineView, Snapshot, WorkerId
from tests.unit.router.cluster.world import World, proven
from tests.unit.router.request.dispatch_world import Deaf

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE

pytestmark = pytest.mark.usefixtures("no_sockets")


async def test_a_prompt_that_is_computed_gives_runway_back() -> None:
    world = World(prefill=1, decode=1)
    worker = WorkerId("p0:1", "p0:1-1")
    pool, most = world.cluster.prefill_backlog, RouterConfig(model="m").max_pending_prefill_tokens
    pool.opened(1, worker, most, b"")
    assert not world.cluster.snapshot().prefill[0].has_runway
    world.num_changes = 0
    pool.accepted(1, 100)
    assert world.num_changes == 1
    assert world.cluster.snapshot().prefill[0].num_pending_tokens == most - 100
    pool.computed(1)
    assert world.cluster.snapshot().prefill[0].num_pending_tokens == 0


async def test_runway_is_a_time_once_the_worker_tells_its_rate() -> None:
    """Of prompts that had begun only the rest counts."""
    world = World(prefill=1, decode=1)
    worker, pool = WorkerId("p0:1", "p0:1-1"), world.cluster.prefill_backlog
    world.says("p0:1", prefill_tokens_per_s=100.0)
    pool.opened(1, worker, 200, b"")
    assert world.cluster.snapshot().prefill[0].has_runway, "2 s"
    pool.opened(2, worker, 1, b"")
    pool.accepted(1, 0)
    pool.accepted(2, 0)
    assert not world.cluster.snapshot().prefill[0].has_runway
    world.num_changes = 0
    world.says("p0:1", prefill_tokens_per_s=100.0, num_pending_prefill_tokens=150)
    assert world.cluster.snapshot().prefill[0].has_runway
    assert world.num_changes == 1


def without_local(world: World) -> Snapshot:
    """Decode workers compute no prompts."""
    found = world.cluster.snapshot()
    return replace(found, decode=tuple(replace(v, local_prefill=False) for v in found.decode))


async def test_one_prompt_of_each_payer_may_be_sent_beyond() -> None:
    """As long as there is not as much again."""
    world = World(prefill=1, decode=1)
    worker, pool = WorkerId("p0:1", "p0:1-1"), world.cluster.prefill_backlog
    world.says("p0:1", prefill_tokens_per_s=100.0)
    pool.opened(1, worker, 300, b"flood")
    snapshot = without_local(world)
    assert not snapshot.has_room_for([Asked(b"flood")])
    assert snapshot.has_room_for([Asked(b"flood"), Asked(b"light")])
    asks = Query(num_tokens=10, num_max_tokens=20, payer=b"light")
    assert isinstance(world.policy.place(asks, snapshot), Paired)
    assert world.policy.place(asks._replace(payer=b"flood"), snapshot) is None
    pool.opened(2, worker, 10, b"light")
    assert not without_local(world).has_room_for([Asked(b"light")])
    pool.opened(4, worker, 10, b"light")
    pool.computed(4)
    assert not without_local(world).has_room_for([Asked(b"light")]), "its other prompt waits"
    pool.opened(3, worker, 100, b"third")
    assert not without_local(world).has_room_for([Asked(b"fourth")])
    pool.computed(2)
    pool.computed(3)
    assert without_local(world).has_room_for([Asked(b"light")])


async def test_what_the_worker_had_not_accepted_when_it_told_is_on_its_way() -> None:
    """Else a message that crosses what is sent would open the runway once more."""
    world = World(prefill=1, decode=1)
    worker, pool = WorkerId("p0:1", "p0:1-1"), world.cluster.prefill_backlog
    world.says("p0:1", prefill_tokens_per_s=100.0)
    pool.opened(1, worker, 201, b"")
    world.num_changes = 0
    world.says("p0:1", prefill_tokens_per_s=100.0, num_pending_prefill_tokens=0)
    view = world.cluster.snapshot().prefill[0]
    assert (view.has_runway, view.num_pending_tokens, world.num_changes) == (False, 201, 0)
    pool.accepted(1, 0)
    world.says("p0:1", prefill_tokens_per_s=100.0, num_pending_prefill_tokens=0)
    assert world.cluster.snapshot().prefill[0].has_runway, "all but the last step is computed"


async def test_that_payers_may_send_beyond_is_news() -> None:
    """The runway is spent before and after."""
    world = World(prefill=1, decode=1)
    worker, pool = WorkerId("p0:1", "p0:1-1"), world.cluster.prefill_backlog
    world.says("p0:1", prefill_tokens_per_s=100.0)
    pool.opened(1, worker, 500, b"flood")
    pool.accepted(1, 0)
    assert not without_local(world).has_room_for([Asked(b"light")])
    world.num_changes = 0
    world.says("p0:1", prefill_tokens_per_s=100.0, num_pending_prefill_tokens=399)
    assert world.num_changes == 1
    assert without_local(world).has_room_for([Asked(b"light")])
    assert not without_local(world).has_room_for([Asked(b"flood")])


async def test_that_no_prompt_waits_any_more_is_news() -> None:
    """Who takes only what nobody else wants may have it now."""
    world = World(prefill=1, decode=1)
    pool = world.cluster.prefill_backlog
    pool.opened(1, WorkerId("p0:1", "p0:1-1"), 100, b"")
    world.num_changes = 0
    pool.accepted(1, 40)
    assert world.num_changes == 0
    pool.computed(1)
    assert world.num_changes == 1
    for address in ("p0:1", "d0:1"):
        world.says(address, num_pending_prefill_tokens=60)
        assert world.num_changes == 1
        world.says(address, num_pending_prefill_tokens=60)
        assert world.num_changes == 1
        world.says(address)
        assert world.num_changes == 2
        world.says(address)
        assert world.num_changes == 2
        world.num_changes = 1


async def test_load_is_that_of_others_and_our_own() -> None:
    world = World(decode=1)
    link, worker = world.links[0], world.cluster.snapshot().decode[0].worker
    first = world.reserve(worker)
    world.says("d0:1", num_running=3)  # one of them is ours
    assert world.cluster.snapshot().decode[0].num_sequences == 3
    second = world.reserve(worker)
    assert world.cluster.snapshot().decode[0].num_sequences == 4
    link.release(first)
    link.release(second)
    assert world.cluster.snapshot().decode[0].num_sequences == 2


async def test_views_carry_what_workers_measured() -> None:
    world = World(prefill=1, decode=1)
    world.says("p0:1", prefill_tokens_per_s=2000.0)
    world.says("d0:1", decode_step_s=0.05, blocks=worker_pb2.BlockCounts(total=9, free=3, cached=4))
    (prefill,), (decode,) = world.cluster.snapshot().prefill, world.cluster.snapshot().decode
    assert prefill.tokens_per_s == 2000.0
    assert (decode.step_s, decode.num_available_blocks, decode.max_num_seqs) == (0.05, 7, 4)
    assert decode.bytes_per_s == {"p0:1-1": 2e9}
    assert decode.shipped == ShippedBytes.even(100)


async def test_views_carry_what_workers_say_of_their_engines_and_what_was_sent_since() -> None:
    """Until a worker speaks again: then it has counted what it was sent."""
    world = World(prefill=1, decode=1)
    assert world.cluster.snapshot().prefill[0].engine is None
    model = StepModel(StepCost(0.04, 0.002, num_steps=30), StepCost(0.1, num_steps=30))
    load = {
        "step_model": model.to_proto(),
        "max_batched_tokens": 512,
        "num_pending_prefill_tokens": 70,
        "num_pending_attention_pairs": 900,
        "num_decoding": 2,
        "num_context_tokens": 50,
        "prefill_age_s": 0.25,
    }
    work = StepWork(2, 50, 70, 900)
    for now_s in (100.0, 101.0):
        for address in ("p0:1", "d0:1"):
            world.watch(address)._clock = partial(float, now_s)
            world.says(address, **load)
        said = EngineView(
            model=model, max_batched_tokens=512, work=work, prefill_age_s=0.25, heard_s=now_s
        )
        snapshot = world.cluster.snapshot()
        assert (snapshot.prefill[0].engine, snapshot.decode[0].engine) == (said, said)
        prefill, decode = snapshot.prefill[0].worker, snapshot.decode[0].worker
        sequence_id = next(world._next_id)
        world.cluster.prefill_backlog.opened(sequence_id, prefill, 30, b"")
        world.cluster.prefill_backlog.accepted(sequence_id, 0)
        for to_pull in (False, True):
            world.reserve(decode, num_tokens=20, to_pull=to_pull, is_started=not to_pull)
        snapshot = world.cluster.snapshot()
        assert snapshot.prefill[0].engine == replace(said, num_departed_tokens=30)
        assert snapshot.decode[0].engine == replace(said, num_departed_tokens=20)


async def test_views_of_who_decodes_carry_how_far_answers_with_a_pace_are() -> None:
    world = World(prefill=1, decode=1)
    told = {
        "step_model": StepModel(StepCost(0.04, num_steps=30)).to_proto(),
        "num_paced": 3,
        "tightest_paced": [
            worker_pb2.PacedSequence(tpot_s=0.02, decoding_s=0.5, num_drawn=10, num_more=20),
            worker_pb2.PacedSequence(tpot_s=math.nan, num_more=20),
        ],
    }
    for address in ("p0:1", "d0:1"):
        world.says(address, **told)
    snapshot = world.cluster.snapshot()
    prefill, decode = snapshot.prefill[0].engine, snapshot.decode[0].engine
    assert prefill is not None
    assert decode is not None
    assert decode.paced == (Paced(0.02, 0.5, 10, 20),)
    assert prefill.paced is None, "nobody asks of it what decodes there"
    world.says("d0:1", step_model=told["step_model"])
    (view,) = world.cluster.snapshot().decode
    assert view.engine is not None
    assert view.engine.paced is None, "an older one says nothing of them"
    world.says("d0:1", step_model=told["step_model"], num_paced=0)
    (view,) = world.cluster.snapshot().decode
    assert view.engine is not None
    assert view.engine.paced == (), "nobody has one"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
async def test_what_is_no_time_is_not_known(wrong: float) -> None:
    world = World(prefill=1, decode=1)
    costs = StepModel(StepCost(0.04, num_steps=30), StepCost(0.1, num_steps=30))
    world.says("p0:1", step_model=costs.to_proto(), prefill_age_s=wrong)
    engine = world.cluster.snapshot().prefill[0].engine
    assert engine is not None
    assert (engine.prefill_age_s, engine.model) == (None, costs)
    broken = costs._replace(prefill=StepCost(0.1, wrong, num_steps=30))
    world.says("p0:1", step_model=broken.to_proto())
    engine = world.cluster.snapshot().prefill[0].engine
    assert engine is not None
    assert engine.model == costs._replace(prefill=StepCost())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
async def test_what_cannot_have_been_measured_was_not(wrong: float) -> None:
    """Else nobody could be placed as long as such a worker is there."""
    world, roles = World(prefill=1, decode=1), (PREFILL, DECODE)
    pair = proven("p0:1")
    pair.bytes_per_s = wrong
    told = {"decode_step_s": wrong, "prefill_time_ratio": wrong, "prefill_tokens_per_s": wrong}
    world.says("d0:1", roles=roles, able_roles=roles, pairs=[pair], pairs_version=2, **told)
    snapshot = world.cluster.snapshot()
    (decode,) = snapshot.decode
    assert (decode.step_s, decode.prefill_time_ratio) == (0.0, 0.0)
    assert decode.bytes_per_s == {"p0:1-1": 0.0}
    assert [view.tokens_per_s for view in snapshot.prefill] == [0.0, 0.0]
    seen = world.cluster.overview()
    (worker,) = seen.decode
    assert (worker.decode_step_s, worker.prefill_tokens_per_s) == (0.0, 0.0)
    assert {each.bytes_per_s for each in seen.pairs} <= {0.0, 2e9}


async def test_what_a_worker_computed_is_not_taken_from_what_was_sent_since() -> None:
    """It told after it had computed a prompt, and its word of that came later."""
    world = World(prefill=1, decode=1)
    model = StepModel(StepCost(0.1, 0.01), StepCost(0.2, 0.01)).to_proto()
    backlog = world.cluster.prefill_backlog
    worker = world.cluster.snapshot().prefill[0].worker

    def engine() -> EngineView:
        view = world.cluster.snapshot().prefill[0].engine
        assert view is not None
        return view

    backlog.opened(1, worker, 300, b"")
    backlog.accepted(1, 0)
    world.says("p0:1", step_model=model, max_batched_tokens=512)  # nothing waits there any more
    backlog.computed(1)
    assert (engine().num_departed_tokens, engine().num_computed_tokens) == (0, 300)
    backlog.opened(2, worker, 200, b"")
    assert (engine().num_departed_tokens, engine().num_computed_tokens) == (200, 300)
    backlog.accepted(2, 50)
    assert (engine().num_departed_tokens, engine().num_computed_tokens) == (150, 300)
    world.says("p0:1", step_model=model, num_pending_prefill_tokens=150)
    assert (engine().num_departed_tokens, engine().num_computed_tokens) == (0, 0)
    backlog.computed(2)
    assert (engine().num_departed_tokens, engine().num_computed_tokens) == (0, 150)


async def test_places_and_blocks_of_who_gives_way_are_room() -> None:
    world = World(decode=1)
    counts = worker_pb2.BlockCounts(total=9, free=3, cached=4, running=2)
    world.says("d0:1", num_running=4, num_giving_way=1, num_giving_way_blocks=2, blocks=counts)
    (view,) = world.cluster.snapshot().decode
    assert (view.num_sequences, view.max_num_seqs, view.has_room) == (4, 4, True)
    assert (view.num_available_blocks, view.num_obtainable_blocks) == (7, 9)
    world.says("d0:1", num_running=4, blocks=counts)
    assert not world.cluster.snapshot().decode[0].has_room


async def test_a_place_that_nobody_has_to_leave_is_news() -> None:
    """A batch, for which nobody leaves, waits for one; others had room all the time."""
    world = World(prefill=1, decode=1)
    world.says("d0:1", num_running=4, num_giving_way=4, max_num_seqs=4)
    assert world.cluster.snapshot().decode[0].has_room
    world.num_changes = 0
    world.says("d0:1", num_running=4, num_giving_way=3, max_num_seqs=4)
    assert world.num_changes == 0
    world.says("d0:1", num_running=3, num_giving_way=3, max_num_seqs=4)
    assert world.num_changes == 1


async def test_others_sequences_are_seen_beside_ours_that_only_have_their_blocks() -> None:
    """Theirs that do not run yet too: they will."""
    world = World(prefill=1, decode=1)
    worker = world.cluster.snapshot().decode[0].worker
    world.says("d0:1", max_num_seqs=8, num_running=2, num_reserved=2)
    for _ in range(4):
        world.reserve(worker, to_pull=True)
    assert world.cluster.snapshot().decode[0].num_sequences == 8
    world.says("d0:1", max_num_seqs=8, num_running=2, num_reserved=6)
    view = world.cluster.snapshot().decode[0]
    assert view.num_sequences == 8
    assert not view.has_room


async def test_a_prompt_that_has_its_blocks_only_is_not_in_what_the_worker_tells() -> None:
    world = World(decode=1)
    worker, link = world.cluster.snapshot().decode[0].worker, world.links[0]
    model = StepModel(StepCost(0.04, num_steps=30), StepCost(0.1, num_steps=30)).to_proto()

    def num_sent() -> int:
        engine = world.cluster.snapshot().decode[0].engine
        assert engine is not None
        return engine.num_departed_tokens

    world.says("d0:1", step_model=model)
    for number, is_started in enumerate((False, True)):
        world.reserve(worker, num_tokens=800 + number, is_started=is_started)
    assert num_sent() == 1601
    world.passes(1.0)
    world.says("d0:1", step_model=model)
    assert num_sent() == 800
    first, _ = world.sequence_ids[0]
    link.start(decode_pb2.Start(sequence_id=first))
    assert num_sent() == 800
    world.passes(1.0)
    world.says("d0:1", step_model=model, num_pending_prefill_tokens=800)
    assert num_sent() == 0


async def test_of_a_prompt_what_the_worker_has_cached_is_not_on_its_way() -> None:
    world = World(decode=1)
    worker, link = world.cluster.snapshot().decode[0].worker, world.links[0]
    world.says("d0:1", step_model=StepModel(StepCost(0.04, num_steps=30)).to_proto())
    sequence_id = world.reserve(worker, num_tokens=800, is_heard=False)
    said = decode_pb2.Reserved(sequence_id=sequence_id, num_cached_tokens=784)
    with suppress(AssertionError):  # its listener hears of it
        link._handle(decode_pb2.DecodeEvent(reserved=said))
    engine = world.cluster.snapshot().decode[0].engine
    assert engine is not None
    assert engine.num_departed_tokens == 16


@pytest.mark.parametrize("ends", ["first token", "ended", "released", "lost"])
async def test_a_prompt_that_is_computed_or_gone_is_on_its_way_no_more(ends: str) -> None:
    world = World(decode=1)
    worker, link = world.cluster.snapshot().decode[0].worker, world.links[0]
    model = StepModel(StepCost(0.04, num_steps=30), StepCost(0.1, num_steps=30)).to_proto()
    world.says("d0:1", step_model=model)
    world.reserve(worker, num_tokens=800)
    (sequence_id,) = world.sequence_ids[0]
    with suppress(AssertionError):  # its listener hears of it
        match ends:
            case "first token":
                tokens = decode_pb2.SequenceTokens(sequence_id=sequence_id, token_ids=[5])
                step = decode_pb2.StepTokens(sequences=[tokens])
                link._handle(decode_pb2.DecodeEvent(step=step))
            case "ended":
                ended = decode_pb2.Ended(sequence_id=sequence_id)
                link._handle(decode_pb2.DecodeEvent(ended=ended))
            case "released":
                link.release(sequence_id)
            case "lost":
                link._break("gone")
    assert link.load.num_sent_tokens == 0
    if ends != "lost":
        engine = world.cluster.snapshot().decode[0].engine
        assert engine is not None
        assert engine.num_departed_tokens == 0


def paced_state(*sequence_ids: int) -> dict[str, object]:
    """Of a worker on which these of ours decode, each with a pace."""
    listed = [
        worker_pb2.PacedSequence(
            tpot_s=0.02, decoding_s=0.5, num_drawn=10, num_more=20, owner="r1", sequence_id=each
        )
        for each in sequence_ids
    ]
    return {
        "step_model": StepModel(
            StepCost(0.04, num_steps=30), StepCost(0.1, num_steps=30)
        ).to_proto(),
        "num_decoding": len(listed),
        "num_paced": len(listed),
        "tightest_paced": listed,
    }


def paced_world() -> tuple[World, list[int]]:
    """Three sequences on one worker, of which two decode, as it told."""
    world = World(decode=1)
    worker = world.cluster.snapshot().decode[0].worker
    three = [world.reserve(worker, tpot_s=0.02, num_expected=40, listener=Deaf()) for _ in range(3)]
    world.draws("d0:1", three[0])
    world.draws("d0:1", three[1])
    world.says("d0:1", num_running=2, num_reserved=1, **paced_state(*three[:2]))
    return world, three


async def test_whoever_ends_or_breaks_off_is_promised_nothing_any_more() -> None:
    world, (first, second, third) = paced_world()
    (view,) = world.cluster.snapshot().decode
    assert view.promised == promised([Promise(0.02, 40)])
    assert view.engine is not None
    assert view.engine.decoding.num_decode_rows == 2
    world.ends("d0:1", first)
    world.links[0].release(third)
    wrong = decode_pb2.SequenceTokens(sequence_id=second, token_ids=[5], margins=[math.nan, 1.0])
    world.links[0]._handle(decode_pb2.DecodeEvent(step=decode_pb2.StepTokens(sequences=[wrong])))
    (view,) = world.cluster.snapshot().decode
    assert view.promised == NOTHING_PROMISED
    assert view.engine is not None
    assert view.engine.paced == ()
    assert view.engine.decoding.num_decode_rows == 0


async def test_who_ended_on_a_stream_that_broke_is_nobody_of_the_next_one() -> None:
    """The worker may be another process by then, and others' sequences decode there."""
    world, (first, *_) = paced_world()
    world.ends("d0:1", first)
    link = world.links[0]
    link._break("it is gone")
    world.link("d0:1")
    world.says("d0:1", num_running=2, **(paced_state(7, 8) | {"tightest_paced": []}))
    (view,) = world.cluster.snapshot().decode
    assert view.promised == NOTHING_PROMISED
    assert view.engine is not None
    assert view.engine.decoding.num_decode_rows == 2
    assert view.num_sequences == 2


@pytest.mark.parametrize("wrong", [5e-324, 1e300, -1.0, math.nan])
async def test_what_cannot_be_measured_was_not(wrong: float) -> None:
    """Sums with it are no numbers any more, and whoever says it looks better than all others."""
    world = World(prefill=1, decode=1)
    pair = proven("p0:1")
    pair.bytes_per_s = wrong
    world.says("p0:1", prefill_tokens_per_s=wrong)
    world.says("d0:1", pairs_version=2, decode_step_s=wrong)
    state = worker_pb2.WorkerState()
    watch = world.watch("d0:1")
    assert watch.state is not None
    state.CopyFrom(watch.state)
    state.pairs_version = 3
    state.pairs[0].CopyFrom(pair)
    watch._update(state)
    (prefill,), (decode,) = world.cluster.snapshot().prefill, world.cluster.snapshot().decode
    assert prefill.tokens_per_s == 0.0
    assert decode.step_s == 0.0
    assert list(decode.bytes_per_s.values()) == [0.0]

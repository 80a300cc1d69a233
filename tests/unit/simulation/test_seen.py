"""A simulated router sees, and decides, what the real one would of the same workers."""

from dataclasses import replace

import pytest

from diptych.block_needs import ShippedBytes
from diptych.engine.scheduling.sequence import Sequence, SequenceKey
from diptych.paced import tightest, to_proto
from diptych.sampling_params import SamplingParams
from diptych.simulation.agenda import Agenda
from diptych.simulation.engine import SimulatedEngine
from diptych.simulation.noise import Noise
from diptych.simulation.router import RouterLimits
from diptych.simulation.seen import DecodeSeen, PrefillSeen, Told
from diptych.v1 import common_pb2, decode_pb2, worker_pb2
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.policy import Policy
from router.placement.predicted import Predicted
from router.placement.promises import Promise, promised
from router.placement.query import Objectives, Query
from router.placement.views import Snapshot, WorkerId
from tests.unit.router.cluster.world import World, proven
from tests.unit.router.request.dispatch_world import Deaf
from tests.unit.simulation.small import SMALL, VARIED

BYTES_PER_S = 2e9  # of the world's pairs
SHIPPED = ShippedBytes.even(100.0)
GOALS = Objectives(0.3, 0.08)


class Mirrored:
    """Simulated workers, and the real router's members, which are told and asked the same."""

    def __init__(self, num_prefill: int, num_decode: int, soft: str = "") -> None:
        """``soft``: the address of the decode worker that has both roles."""
        self.soft = soft
        self.agenda = Agenda()
        self.world = World(prefill=num_prefill, decode=num_decode)
        self.engines: dict[str, SimulatedEngine] = {}
        self.prefill: dict[str, PrefillSeen] = {}
        self.decode: dict[str, DecodeSeen] = {}
        self._number = 0
        computing = [*self.world.prefill, *([soft] if soft else [])]
        for address in [*self.world.prefill, *self.world.decode]:
            engine = SimulatedEngine(SMALL, VARIED, self.agenda, Noise(1, is_on=True))
            self.engines[address] = engine
            told, worker = Told(engine), WorkerId(address, f"{address}-1")
            if address in self.world.prefill:
                self.prefill[address] = PrefillSeen(
                    worker, told, RouterLimits().runway, lambda is_news: None
                )
            else:
                sources = {f"{each}-1": BYTES_PER_S for each in computing if each != address}
                self.decode[address] = DecodeSeen(
                    worker, told, sources, SHIPPED, lambda is_news: None, "r1"
                )
            if address == soft:
                beside = PrefillSeen(worker, told, RouterLimits().runway, lambda is_news: None)
                beside.beside, self.decode[address].beside = self.decode[address], beside
                self.prefill[address] = beside
        for address in self.engines:
            self.tell(address)

    def tell(self, address: str) -> None:
        """The worker says how it is."""
        engine, watch = self.engines[address], self.world.watch(address)
        watch._clock = lambda: self.agenda.now_s
        age_s = engine.prefill_age_s
        age = {} if age_s is None else {"prefill_age_s": age_s}
        work, scheduler = engine.load(), engine.scheduler
        token_s = VARIED.decode.expected_s(work.without_prompts)
        self.world.says(
            address,
            max_model_len=SMALL.max_model_len,
            max_num_seqs=SMALL.max_num_seqs,
            layout=common_pb2.KVLayout(block_bytes=1600),
            blocks=worker_pb2.BlockCounts(**engine.pool.counts()._asdict()),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_reserved=scheduler.num_reserved,
            num_giving_way=scheduler.giving_way().num,
            num_giving_way_blocks=scheduler.giving_way().num_blocks,
            num_pending_prefill_tokens=work.num_prefill_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            decode_step_s=engine.decode_step_s,
            prefill_time_ratio=engine.prefill_time_ratio,
            step_model=VARIED.to_proto(),
            max_batched_tokens=SMALL.max_batched_tokens,
            num_pending_attention_pairs=work.num_attention_pairs,
            num_decoding=work.num_decode_rows,
            num_context_tokens=work.num_context_tokens,
            num_paced=len(engine.paced()),
            tightest_paced=to_proto(tightest(engine.paced(), token_s)),
            **age,
            **self._roles(address),
        )
        told, worker = Told(engine), WorkerId(address, f"{address}-1")
        if address in self.prefill:
            self.prefill[address].told(told, self.world.cluster.prefill_backlog.own(worker))
        if address in self.decode:
            self.decode[address].told(told)

    def _roles(self, address: str) -> dict[str, object]:
        if not self.soft or address in self.world.prefill:
            return {}
        if address != self.soft:
            return {"pairs": [proven(self.soft)], "pairs_version": 2}
        both = [worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE]
        return {"roles": both, "able_roles": both}

    def send_prompt(self, address: str, num_tokens: int) -> None:
        """To a prefill worker, which gets it at once."""
        seq = self.sequence(num_tokens, prefill_only=True)
        worker, backlog = WorkerId(address, f"{address}-1"), self.world.cluster.prefill_backlog
        backlog.opened(self._number, worker, num_tokens, b"somebody")
        backlog.accepted(self._number, 0)
        self.prefill[address].loaded(backlog.own(worker), self.agenda.now_s)
        self.engines[address].add_prefill(seq, lambda update: None)

    def send_sequence(self, address: str, num_tokens: int) -> int:
        """To a decode worker, which computes its prompt; what it is called."""
        seq = self.sequence(num_tokens, prefill_only=False)
        number = self.world.reserve(
            WorkerId(address, f"{address}-1"),
            num_tokens=num_tokens,
            tpot_s=seq.tpot_s,
            num_expected=seq.num_expected_tokens,
            listener=Deaf(),
        )
        seq.key = SequenceKey("r1", number)
        promise = Promise(seq.tpot_s, seq.num_expected_tokens)
        self.decode[address].asked(number, b"somebody", num_tokens, promise)
        self.decode[address].reserved(number, 0)
        self.engines[address].reserve(seq, lambda update: None)
        self.engines[address].start(seq, [])
        return number

    def drew(self, address: str, number: int) -> None:
        """A token of it is heard of."""
        self.world.draws(address, number)
        self.decode[address].drew_first(number)

    def ended(self, address: str, number: int) -> None:
        """Its end is heard of."""
        self.world.ends(address, number)
        self.decode[address].ended(number)

    def computed(self, address: str, number: int) -> None:
        """A prompt is heard of that a prefill worker has computed."""
        worker, backlog = WorkerId(address, f"{address}-1"), self.world.cluster.prefill_backlog
        backlog.computed(number)
        self.prefill[address].loaded(backlog.own(worker), self.agenda.now_s)

    def simulated(self) -> Snapshot:
        return Snapshot(
            tuple(seen.view() for seen in self.prefill.values()),
            tuple(seen.view() for seen in self.decode.values()),
        )

    def sequence(self, num_tokens: int, *, prefill_only: bool) -> Sequence:
        """A fresh one."""
        self._number += 1
        return Sequence(
            key=SequenceKey("r", self._number),
            token_ids=[self._number] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=40),
            prefill_only=prefill_only,
            tpot_s=0.0 if prefill_only else 0.5,
            num_expected_tokens=30,
        )


@pytest.fixture
def mirrored() -> Mirrored:
    """At some moment: some told of what was sent, some not yet, some of less than is left."""
    both = Mirrored(2, 2)
    both.send_prompt("p0:1", 100)
    both.send_prompt("p1:1", 40)
    both.send_sequence("d0:1", 50)
    both.agenda.run(0.21)
    for address in both.engines:
        both.tell(address)
    both.send_prompt("p1:1", 90)
    both.send_sequence("d1:1", 70)
    both.agenda.run(0.6)
    both.tell("d0:1")
    both.send_prompt("p0:1", 33)
    return both


def test_views_of_a_worker_of_both_roles_are_those_of_the_real_members() -> None:
    both = Mirrored(1, 2, soft="d1:1")
    both.send_prompt("d1:1", 100)
    both.send_sequence("d1:1", 50)
    both.agenda.run(0.4)
    for address in both.engines:
        both.tell(address)
    both.send_prompt("d1:1", 40)
    both.send_sequence("d1:1", 30)
    both.send_sequence("d0:1", 20)
    theirs, ours = real(both), both.simulated()
    assert [view.worker.address for view in theirs.prefill] == ["p0:1", "d1:1"]
    assert ours == theirs
    assert any(view.engine and view.engine.num_departed_tokens for view in ours.prefill)
    alone, soft = ours.decode
    assert (alone.prefill_time_ratio, soft.prefill_time_ratio > 0.0) == (0.0, True)


def test_so_are_those_of_a_worker_whose_prompts_are_heard_of_late() -> None:
    """It told how it was after it had computed one."""
    both = Mirrored(1, 1)
    both.send_prompt("p0:1", 100)
    both.send_prompt("p0:1", 60)
    until_s = 0.0
    while both.engines["p0:1"].scheduler.work.num_prefill_tokens > 60:
        both.agenda.run(until_s := until_s + 0.001)
    both.tell("p0:1")
    for number, later_s, num_computed in ((1, 0.001, 0), (2, 10.0, 60)):
        both.agenda.at(until_s := until_s + later_s, lambda: None)
        both.agenda.run(until_s)
        both.computed("p0:1", number)
        theirs, ours = real(both), both.simulated()
        assert ours.prefill == theirs.prefill
        (view,) = ours.prefill
        assert view.engine is not None
        assert 0 < view.engine.work.num_prefill_tokens <= 60
        assert view.engine.num_computed_tokens == num_computed


def real(both: Mirrored) -> Snapshot:
    """What the real router sees, rounded as the wire rounds it."""
    return both.world.cluster.snapshot()


def test_views_are_those_of_the_real_members(mirrored: Mirrored) -> None:
    theirs, ours = real(mirrored), mirrored.simulated()
    assert [view.engine for view in ours.prefill] == [view.engine for view in theirs.prefill]
    assert [view.engine for view in ours.decode] == [view.engine for view in theirs.decode]
    assert ours == theirs
    assert any(view.num_pending_tokens for view in ours.prefill)
    assert any(view.engine and view.engine.num_departed_tokens for view in ours.prefill)
    engines = [view.engine for view in ours.prefill] + [view.engine for view in ours.decode]
    assert any(engine and engine.prefill_age_s is not None for engine in engines)
    assert any(view.engine and view.engine.paced for view in ours.decode)


def test_whose_end_came_since_is_told_of_no_more() -> None:
    """And who came since counts by what it was promised, until the worker tells of it."""
    both = Mirrored(0, 1)
    first, second = both.send_sequence("d0:1", 30), both.send_sequence("d0:1", 40)
    both.agenda.at(2.0, lambda: None)
    both.agenda.run(2.0)
    both.drew("d0:1", first)
    both.drew("d0:1", second)
    both.tell("d0:1")
    both.send_sequence("d0:1", 50)
    both.ended("d0:1", first)
    theirs, ours = real(both), both.simulated()
    assert ours.decode == theirs.decode
    (view,) = ours.decode
    assert view.engine is not None
    assert view.engine.paced is not None
    assert [each.sequence_id for each in view.engine.paced] == [second]
    assert view.engine.work.num_decode_rows == 2
    assert view.engine.decoding.num_decode_rows == 1
    assert view.promised == promised([Promise(0.5, 30)])


def test_what_is_on_its_way_when_a_worker_tells_is_not_in_what_it_tells() -> None:
    """Another router has a sequence there; ours, and the start of ours, cross what it tells."""
    both = Mirrored(0, 1)
    engine, worker = both.engines["d0:1"], WorkerId("d0:1", "d0:1-1")
    theirs = both.sequence(30, prefill_only=False)
    engine.reserve(theirs, lambda update: None)
    both.tell("d0:1")
    promise = Promise(None, 0)
    number = both.world.reserve(worker, num_tokens=100, is_heard=False, listener=Deaf())
    both.decode["d0:1"].asked(number, b"somebody", 100, promise)
    seen = list[tuple[int, int]]()

    def look() -> None:
        real_view, our_view = *real(both).decode, *both.simulated().decode
        assert our_view == real_view
        seen.append((our_view.num_sequences, our_view.num_pending_tokens))

    both.tell("d0:1")
    look()
    both.world.answers("d0:1", number)
    both.decode["d0:1"].reserved(number, 0)
    ours = both.sequence(100, prefill_only=False)
    engine.reserve(ours, lambda update: None)
    both.tell("d0:1")
    look()
    both.world.links[0].start(decode_pb2.Start(sequence_id=number))
    both.decode["d0:1"].started(number, both.agenda.now_s)
    both.tell("d0:1")  # before the start came
    look()
    both.agenda.at(1.0, lambda: engine.start(ours, []))
    both.agenda.run(1.0)
    both.tell("d0:1")
    look()
    assert seen == [(2, 100)] * 4


@pytest.mark.parametrize("name", ["least-loaded", "predicted"])
def test_decisions_are_those_of_the_real_policy(mirrored: Mirrored, name: str) -> None:
    def policy() -> Policy:
        plain = LeastLoaded(
            CacheIndex(1000), local_below_tokens=16, allow_local=True, allow_recompute=True
        )
        return plain if name == "least-loaded" else Predicted(plain, lambda: 0.5)

    theirs, ours = policy(), policy()
    for num_tokens in (8, 20, 100, 200):
        query = Query(num_tokens=num_tokens, num_max_tokens=num_tokens + 20, objectives=GOALS)
        expected = theirs.place(query, real(mirrored))
        assert expected is not None
        assert ours.place(query, mirrored.simulated()) == expected
        mirrored = replace_load(mirrored)


def replace_load(mirrored: Mirrored) -> Mirrored:
    """The same workers, a little later, one prompt more."""
    mirrored.send_prompt("p0:1", 60)
    mirrored.agenda.run(mirrored.agenda.now_s + 0.05)
    mirrored.tell("p1:1")
    return mirrored


def test_the_fixture_has_views_that_differ(mirrored: Mirrored) -> None:
    """Else the comparisons say little."""
    one, other = mirrored.simulated().prefill
    assert replace(one, worker=other.worker) != other
    first, second = mirrored.simulated().decode
    assert replace(first, worker=second.worker) != second

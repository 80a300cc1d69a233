"""The real engine over a late device, whatever comes, goes, breaks off and completes when.

Sequences come, run, are preempted, are cancelled and stop by a token that is known late; sources
are read by others, and blocks are fetched from others; the event loop, the model thread and the
device each get on when they like. Rules draw all that they need from a ``Random``: Hypothesis gives
one that it can shrink, :meth:`DeviceMachine.walk` one of a seed, in a third of the time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.engine.engine import StepEngine
from diptych.engine.scheduling.audit import pool_mismatch
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler, SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import SequenceUpdate
from diptych.errors import BlocksExhaustedError
from diptych.finish_reason import FinishReason
from diptych.sampling_params import SamplingParams
from tests.protocol.fake_model import STOP_TOKEN, Memory, answer, slots_of
from tests.protocol.invariants import Watch
from tests.unit.engine.late_device import (
    LateDevice,
    LaunchingThread,
    ModelThread,
    NoRunner,
)
from tests.unit.engine.stepped_loop import SteppedLoop

BLOCK_SIZE, MAX_LEN = 2, 16
_TURNS = 10  # of the event loop, until nothing is left to do
_MAX_FAULTS = 2  # of one run: more in a row end an engine
_NUM_STEPS = 40  # of a walk
RANDOMS = st.randoms(note_method_calls=True, use_true_random=False)

ANNOUNCED_EARLY = "announced before it was there"
CACHED_EARLY = "shared before it was there"
FREED_EARLY = "freed before the device was done with it"
REUSED_EARLY = "reused before the device was done with it"
TAKEN_FROM_READERS = "a block was taken from its readers"
READ_INTO_A_STEP = "a read writes what a step has"
WRONG_TOKEN = "a token was lost, doubled or is wrong"
NO_END = "no end in sight"
LEAKED = "held by nobody"


@dataclass(eq=False)
class Client:
    """What the other side knows of a sequence."""

    seq: Sequence
    received: list[int] = field(default_factory=list)  # output
    num_announced: int = 0  # tokens of a source, whose KV readers may read
    generations: list[int] = field(default_factory=list)  # of their blocks
    to_come: list[int] = field(default_factory=list)  # positions whose KV is being fetched
    is_over: bool = False

    @property
    def wanted(self) -> list[int]:
        """The one right output."""
        seq = self.seq
        return answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling.max_tokens)[0]


class DeviceMachine(RuleBasedStateMachine):
    """Over a device that is given one step at a time."""

    model_thread: type[ModelThread] = ModelThread
    launches = False
    met: ClassVar[Counter[str]] = Counter()  # what has happened, of all runs

    @initialize(rng=RANDOMS)
    def build(self, rng: Random) -> None:
        self.pool = BlockPool(rng.randint(8, 10), BLOCK_SIZE)
        config = SchedulerConfig(max_num_seqs=3, max_batched_tokens=4, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, self.pool)
        memory = Memory(self.pool.num_blocks, BLOCK_SIZE, Watch())
        self.device = LateDevice(memory, self.pool)
        self.thread = self.model_thread(self.device, self.scheduler)
        runner = NoRunner()
        self.engine = StepEngine(
            self.scheduler,
            runner,
            launcher=runner if self.launches else None,
            model_thread=self.thread,
        )
        self.engine.subscribe(self.on_step)
        self.is_cut_short = rng.choice([False, True])  # the loop is cancelled while there is work
        self.loop = SteppedLoop()
        self.running = self.loop.create_task(self.engine.run())
        self.clients: dict[Sequence, Client] = {}  # not yet released
        self.quarantined: set[int] = set()
        self.num_made = self.num_faults = 0
        self.turn(_TURNS)

    @classmethod
    def walk(cls, seed: int) -> None:
        """One run, by what the seed says.

        Raises:
            AssertionError: A promise is broken.
        """
        rng = Random(seed)
        machine = cls()
        machine.build(rng)
        try:
            for _ in range(_NUM_STEPS):
                possible = [take for take, is_possible in RULES if is_possible(machine)]
                rng.choice(possible)(machine, rng)
                machine.nobody_has_what_the_device_has()
                machine.sources_stay_readable()
            machine.teardown()
        except BaseException:
            machine.unwind()
            raise

    def turn(self, num_turns: int) -> bool:
        """Let the event loop do so much; whether there was anything to do."""
        has_done = self.loop.run_rounds(num_turns)
        if self.running.done():
            self.running.result()
        return has_done

    def turn_or_not(self, rng: Random) -> None:
        self.turn(rng.choice([0, 3, _TURNS, _TURNS]))

    def turn_cancelled(self) -> None:
        self.loop.run_rounds(_TURNS)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        """What clients get is right, and what readers are offered is in the device's memory."""
        for update in updates:
            client, seq = self.clients[update.sequence], update.sequence
            assert not client.is_over, WRONG_TOKEN
            self.receive(client, update)
            if seq.prefill_only:
                client.num_announced = update.num_computed_tokens
                blocks = seq.block_table[: self.pool.num_blocks_for(client.num_announced)]
                client.generations = list(map(self.pool.generation, blocks))
                self.check_readable(client, ANNOUNCED_EARLY)
            elif seq.state is SequenceState.FINISHED:
                del self.clients[seq]

    def receive(self, client: Client, update: SequenceUpdate) -> None:
        seq, token = update.sequence, update.token
        if token is not None:
            assert update.position == seq.num_prompt_tokens + len(client.received), WRONG_TOKEN
            client.received.append(token.token_id)
        assert client.received == client.wanted[: len(client.received)], WRONG_TOKEN
        assert client.received == seq.token_ids[seq.num_prompt_tokens :], WRONG_TOKEN
        if update.error is not None or update.finish_reason is not None or seq.prefill_only:
            client.is_over = seq.state in (SequenceState.FINISHED, SequenceState.LEASED)
        if update.finish_reason is not None:
            assert client.received == client.wanted, WRONG_TOKEN
        is_late = seq.num_in_flight_tokens > 0 and update.finish_reason is FinishReason.STOP
        self.met["stop found late"] += is_late
        self.met["failed step"] += update.error is not None

    def check_readable(self, client: Client, otherwise: str) -> None:
        seq = client.seq
        for position, slot in enumerate(slots_of(seq.token_ids[: client.num_announced])):
            index, offset = divmod(position, BLOCK_SIZE)
            assert self.device.memory.slot(seq.block_table[index], offset) == slot, otherwise

    def make(self, rng: Random, *, is_told: bool = False) -> Sequence:
        """is_told: the host has to see its tokens."""
        shared, own, max_tokens = rng.randint(0, 6), rng.randint(1, 3), rng.randint(1, 7)
        self.num_made += 1
        prompt = [1] * shared + [own] * own
        return Sequence(
            key=SequenceKey("router", self.num_made),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                stop_token_ids=frozenset({STOP_TOKEN}),
                return_margins=is_told,
            ),
        )

    @rule(rng=RANDOMS)
    def generate(self, rng: Random) -> None:
        seq = self.make(rng, is_told=rng.choice([False, False, False, True]))
        try:
            self.engine.reserve(seq)
        except BlocksExhaustedError:
            return
        self.clients[seq] = Client(seq)
        self.engine.start(seq, [], compute_missing=True)
        self.turn_or_not(rng)

    @rule(rng=RANDOMS)
    def add_source(self, rng: Random) -> None:
        seq = self.make(rng)
        seq.prefill_only = True
        try:
            self.engine.add_prefill(seq)
        except BlocksExhaustedError:
            return
        self.clients[seq] = Client(seq)
        self.turn_or_not(rng)

    @rule(rng=RANDOMS)
    def fetch(self, rng: Random) -> None:
        """Reserve, and have what is missing written by somebody else."""
        seq = self.make(rng)
        seq.to_pull = True
        try:
            self.engine.reserve(seq)
        except BlocksExhaustedError:
            return
        to_come = list(range(seq.num_computed_tokens, seq.num_tokens))
        self.clients[seq] = client = Client(seq, to_come=to_come)
        self.spoil(self.fetched_blocks(client))
        self.turn_or_not(rng)

    def fetched_blocks(self, client: Client) -> set[int]:
        return {client.seq.block_table[position // BLOCK_SIZE] for position in client.to_come}

    def spoil(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.device.memory.spoil(block_id)

    @property
    def fetching(self) -> list[Client]:
        return [each for each in self.clients.values() if each.seq.state is SequenceState.RESERVED]

    @precondition(lambda self: self.fetching)
    @rule(rng=RANDOMS)
    def kv_arrives(self, rng: Random) -> None:
        """Some of it; with the last, the sequence starts behind tokens that others emitted."""
        client = rng.choice(self.fetching)
        seq = client.seq
        num_arrived = rng.randint(min(1, len(client.to_come)), len(client.to_come))
        arrived = rng.sample(client.to_come, num_arrived)
        slots = slots_of(seq.token_ids)
        for position in arrived:
            self.device.memory.write(seq.block_table, position, slots[position])
        client.to_come = [position for position in client.to_come if position not in arrived]
        if not client.to_come:
            self.met["fetched"] += bool(arrived)
            self.engine.mark_proven(seq)
            client.received = client.wanted[: min(rng.randint(0, 2), len(client.wanted) - 1)]
            self.engine.start(seq, list(client.received), compute_missing=False)
        self.turn_or_not(rng)

    @precondition(lambda self: self.fetching)
    @rule(rng=RANDOMS)
    def break_off(self, rng: Random) -> None:
        """A fetch whose reads may still write."""
        client = rng.choice(self.fetching)
        unfinished = self.fetched_blocks(client)
        self.engine.quarantine(unfinished)
        self.quarantined |= unfinished
        self.engine.release(client.seq)
        del self.clients[client.seq]
        self.met["broken off"] += 1
        self.turn_or_not(rng)

    @precondition(lambda self: self.quarantined)
    @rule(rng=RANDOMS)
    def late_reads(self, rng: Random) -> None:
        blocks = set(rng.sample(sorted(self.quarantined), rng.randint(1, len(self.quarantined))))
        self.spoil(blocks)
        if rng.choice([False, True]):
            self.quarantined -= blocks
            self.engine.end_quarantine(blocks)
        self.turn_or_not(rng)

    @precondition(lambda self: self.clients)
    @rule(rng=RANDOMS)
    def release(self, rng: Random) -> None:
        """Cancelled, or read by all its readers."""
        if not rng.choice([False, False, True]):
            return
        clients = [each for each in self.clients.values() if not self.fetched_blocks(each)]
        if clients:
            seq = rng.choice(clients).seq
            self.met["cancelled in flight"] += seq.num_in_flight_tokens > 0
            del self.clients[seq]
            self.engine.release(seq)
            self.turn_or_not(rng)

    @property
    def may_run_short(self) -> bool:
        return self.launches and bool(self.device.plans) and self.num_faults < _MAX_FAULTS

    @precondition(lambda self: self.may_run_short)
    @rule(rng=RANDOMS)
    def memory_runs_short(self, rng: Random) -> None:
        self.num_faults += 1
        setattr(self.thread.faults, rng.choice(["launching", "waiting"]), True)

    @rule(rng=RANDOMS)
    def get_on(self, rng: Random) -> None:
        """Whoever can, one after another."""
        gets_on = (self.device_gets_on, self.thread_gets_on, self.loop_gets_on)
        for who in rng.randbytes(16):
            if gets_on[who % 3]():
                self.nobody_has_what_the_device_has()

    def device_gets_on(self) -> bool:
        """Whether it had anything to do; here and below."""
        if not self.device.asked:
            return False
        self.device.asked.popleft()()
        return True

    def loop_gets_on(self) -> bool:
        return self.turn(4)

    def thread_gets_on(self) -> bool:
        if not self.thread.jobs:
            return False
        num_before = len(self.device.plans)
        self.thread.get_on()
        plans = self.device.plans
        if len(plans) > num_before:
            assert len(plans) <= MAX_STEPS_IN_FLIGHT
            self.met["two in flight"] += len(plans) > 1
            self.met["followed"] += any(chunk.follows is not None for chunk in plans[-1].chunks)
        return True

    @invariant()
    def nobody_has_what_the_device_has(self) -> None:
        device = self.device
        for block_id in device.unfinished_block_ids:
            assert self.pool.key_of(block_id) is None, CACHED_EARLY
        for block_id in device.read_block_ids:
            assert self.pool.holders(block_id), FREED_EARLY
        assert device.has_own_blocks, REUSED_EARLY
        being_read_into = self.quarantined.union(*map(self.fetched_blocks, self.clients.values()))
        assert not being_read_into & device.read_block_ids, READ_INTO_A_STEP
        mismatch = pool_mismatch(self.pool, self.scheduler, self.quarantined)
        assert mismatch is None, mismatch

    @invariant()
    def sources_stay_readable(self) -> None:
        for client in self.clients.values():
            if client.num_announced:
                table = client.seq.block_table[: len(client.generations)]
                now = list(map(self.pool.generation, table))
                assert now == client.generations, TAKEN_FROM_READERS
                self.check_readable(client, TAKEN_FROM_READERS)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.met["preempted"] += self.scheduler.num_preemptions
        if not self.is_cut_short:
            self.run_to_the_end()
        self.running.cancel()
        for seq in tuple(self.clients):
            self.scheduler.release(seq)
        self.turn_cancelled()
        self.get_done(self.turn_cancelled)
        self.loop.close()
        self.pool.end_quarantine(self.quarantined)
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total, LEAKED

    def unwind(self) -> None:
        """End without a look at what is wrong already."""
        if hasattr(self, "loop") and not self.loop.is_closed():
            self.running.cancel()
            self.engine.abandon()
            self.turn_cancelled()
            self.loop.close()

    def run_to_the_end(self) -> None:
        """Everybody gets all tokens, once what is fetched or read gives its blocks back."""
        for _ in range(200):
            for client in tuple(self.clients.values()):
                if client.seq.state in (SequenceState.RESERVED, SequenceState.LEASED):
                    del self.clients[client.seq]
                    self.engine.release(client.seq)
            self.engine.end_quarantine(self.quarantined)
            self.quarantined.clear()
            self.turn(_TURNS)
            if not self.clients:
                return
            self.get_done(lambda: self.turn(_TURNS))
        raise AssertionError(NO_END)

    def get_done(self, turn: Callable[[], object]) -> None:
        """All that the thread and the device were asked for."""
        while self.device.asked or self.thread.jobs:
            while self.device.asked:
                self.device.asked.popleft()()
            if self.thread.jobs:
                self.thread.get_on()
            turn()


class AheadMachine(DeviceMachine):
    """Over a device that is given the next step before it is done with the one it has."""

    model_thread = LaunchingThread
    launches = True
    met: ClassVar[Counter[str]] = Counter()


def _always(machine: DeviceMachine) -> bool:
    return True


# Of a walk, and when they are possible: as their preconditions say.
RULES: list[tuple[Callable[[Any, Random], None], Callable[[DeviceMachine], Any]]] = [
    (DeviceMachine.generate, _always),
    (DeviceMachine.add_source, _always),
    (DeviceMachine.fetch, _always),
    (DeviceMachine.kv_arrives, lambda machine: machine.fetching),
    (DeviceMachine.break_off, lambda machine: machine.fetching),
    (DeviceMachine.late_reads, lambda machine: machine.quarantined),
    (DeviceMachine.release, lambda machine: machine.clients),
    (DeviceMachine.memory_runs_short, lambda machine: machine.may_run_short),
    (DeviceMachine.get_on, _always),
]

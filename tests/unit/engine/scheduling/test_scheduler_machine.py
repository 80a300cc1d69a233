"""The scheduler keeps sequences exact and blocks accounted for, whatever happens.

Over :mod:`tests.unit.engine.scheduling.hash_model`, whose layers may have windows: then what
is pulled has holes.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Set
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.block_needs import BlockNeeds, GroupExtent
from diptych.engine.scheduling.beside_others import Allowed
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.scheduler import SchedulerConfig
from diptych.engine.scheduling.sequence import Sequence, SequenceKey, SequenceState
from diptych.engine.scheduling.step import Chunk, SequenceUpdate, StepPlan
from diptych.errors import (
    BlocksComingError,
    BlocksExhaustedError,
    InvalidRequestError,
)
from diptych.sampling_params import SamplingParams
from diptych.step_model import StepWork
from tests.unit.engine.scheduling.classy_scheduler import ClassyScheduler
from tests.unit.engine.scheduling.hash_model import (
    GARBAGE,
    HashRunner,
    SlotStore,
    continuation,
    kv_of,
)
from tests.unit.engine.scheduling.sequence_client import Client

WINDOWS = st.lists(st.sampled_from([1, 2, 3, 5, 8]), max_size=2, unique=True)


class SchedulerMachine(RuleBasedStateMachine):
    block_sizes = st.integers(1, 4)
    pool_sizes = st.integers(3, 12)  # blocks
    min_longest = 2  # tokens of the longest sequence
    max_in_flight = 1  # steps

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        block_size = data.draw(self.block_sizes, "block_size")
        num_blocks = data.draw(self.pool_sizes, "num_blocks")
        max_num_seqs = data.draw(st.integers(1, 4), "max_num_seqs")
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_batched_tokens=data.draw(st.integers(max_num_seqs, 12), "max_batched_tokens"),
            decode_headroom_blocks=data.draw(st.integers(0, 2), "headroom"),
            max_model_len=data.draw(
                st.integers(self.min_longest, num_blocks * block_size + 1), "max_len"
            ),
        )
        windows = self.draw_windows(data)
        needs = BlockNeeds(block_size, [GroupExtent(window, 1) for window in windows])
        self.pool = BlockPool(num_blocks, block_size, needs)
        self.store = SlotStore(self.pool, windows)
        self.scheduler = ClassyScheduler(config, self.pool)
        self.runner = HashRunner(self.store, self.scheduler)
        self.config = config
        self.plans: deque[StepPlan] = deque()  # in flight
        self.plan_generations: deque[list[list[int]]] = deque()
        self.clients: list[Client] = []  # not yet released
        self.quarantined: set[int] = set()
        self.num_made = 0
        self.idle = False  # schedule() found nothing and nobody called in since
        self.now_s = 0.0
        self.max_yielding_tokens: int | None = None
        self.beside_others: Allowed | None = None
        self.num_calls = 0  # that may have taken blocks
        # Who was told that its blocks come with a step's end, and when.
        self.coming: tuple[Sequence, int] | None = None

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        """Of the groups of layers, in their order within a block."""
        windows: list[int | None] = [*sorted(data.draw(WINDOWS, "windows"), reverse=True)]
        if not windows or data.draw(st.booleans(), "has full layers"):
            windows.insert(0, None)
        return windows

    def clients_in(self, *states: SequenceState) -> list[Client]:
        return [client for client in self.clients if client.seq.state in states]

    def pick(self, data: st.DataObject, *states: SequenceState) -> Client | None:
        clients = self.clients_in(*states)
        return data.draw(st.sampled_from(clients)) if clients else None

    def make(self, data: st.DataObject, prefill_only: bool) -> Sequence:
        """A sequence whose prompt likely shares a prefix with others."""
        longest = self.config.max_model_len - 1
        seed = data.draw(st.integers(0, 2), "seed")
        shared = data.draw(st.integers(0, 3 * self.pool.block_size))
        own = data.draw(st.integers(0, 3))
        prompt = ([0] * shared + [1] + [own] * 3)[:longest]
        salt = data.draw(st.sampled_from([b"", b"", b"s"]), "salt")
        if bool(self.clients) and data.draw(st.booleans(), "twin"):
            twin = data.draw(st.sampled_from(self.clients)).seq
            prompt, salt = twin.token_ids[: twin.num_prompt_tokens], twin.cache_salt
            num_whole = len(prompt) - len(prompt) % self.pool.block_size
            prompt = prompt[: data.draw(st.sampled_from([num_whole, len(prompt)]))] or prompt
        max_tokens = data.draw(st.sampled_from([1, 2, 20]), "max_tokens")
        params = SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, 2), "min_tokens"),
            stop_token_ids=data.draw(
                st.sampled_from([frozenset(), frozenset(), frozenset({2})]), "stop"
            ),
            return_margins=self.max_in_flight > 1 and not data.draw(st.integers(0, 3), "told"),
        )
        self.num_made += 1
        return Sequence(
            key=SequenceKey("router", self.num_made),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params,
            cache_salt=salt,
            prefill_only=prefill_only,
            yields=data.draw(st.booleans(), "yields"),
        )

    def emit_ahead(self, data: st.DataObject, seq: Sequence) -> list[int]:
        """Tokens that another worker has emitted already; leaves at least one."""
        left = continuation(seq, self.config.max_model_len)[0][seq.num_tokens : -1]
        return left[: data.draw(st.integers(0, len(left)), "emitted")]

    @rule(data=st.data(), resumed=st.booleans())
    def add_prefill(self, data: st.DataObject, resumed: bool) -> None:
        seq = self.make(data, prefill_only=True)
        if resumed:
            seq.token_ids += self.emit_ahead(data, seq)
        refusal = self.refusal(self.scheduler.add_prefill, seq)
        if refusal is not None:
            if not isinstance(refusal, BlocksComingError):
                self.scheduler.release(seq)
            return
        self.idle = False
        self.num_calls += 1
        self.clients.append(Client(seq, list(seq.token_ids)))
        assert seq.num_cached_tokens < seq.num_tokens
        assert seq.num_cached_tokens % self.pool.block_size == 0

    @rule(data=st.data(), next_step=st.sampled_from(["none", "pull", "compute", "pull and start"]))
    def reserve(self, data: st.DataObject, next_step: str) -> None:
        seq = self.make(data, prefill_only=False)
        seq.to_pull = data.draw(st.booleans(), "to_pull")
        if self.refusal(self.scheduler.reserve, seq) is not None:
            return
        self.num_calls += 1
        client = Client(seq, list(seq.token_ids))
        self.clients.append(client)
        assert seq.num_cached_tokens <= seq.num_tokens
        assert seq.num_cached_tokens % self.pool.block_size == 0
        if "pull" in next_step:
            self.pull_all(seq)
        if "start" in next_step or "compute" in next_step:
            self.start_one(data, client, compute_missing=True)

    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        client = self.pick(data, SequenceState.RESERVED)
        if client is not None:
            self.pull_all(client.seq)

    def pull_all(self, seq: Sequence) -> None:
        """Of each block what the sequence needs, and nothing else."""
        last_block = (seq.num_tokens - 1) // self.pool.block_size
        for position, kv in enumerate(kv_of(seq.token_ids, seq.cache_salt)):
            if position >= seq.num_computed_tokens:
                index = position // self.pool.block_size
                num_groups = self.pool.needs.num_groups_of(index, last_block)
                self.store.write(seq.block_table, position, kv, num_groups)
        self.scheduler.mark_proven(seq)
        self.idle = False  # others may share its blocks from now on

    @rule(data=st.data())
    def break_off_pull(self, data: st.DataObject) -> None:
        client = self.pick(data, SequenceState.RESERVED)
        if client is None or client.seq.num_computed_tokens == client.seq.num_tokens:
            return
        first = client.seq.num_cached_tokens // self.pool.block_size
        targets = client.seq.block_table[first:]
        unfinished = data.draw(st.sets(st.sampled_from(targets)), "unfinished")
        self.pool.quarantine(unfinished)
        self.scheduler.release(client.seq)
        self.clients.remove(client)
        self.quarantined |= unfinished
        self.idle = False

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data(), ended=st.booleans())
    def late_reads(self, data: st.DataObject, ended: bool) -> None:
        blocks = data.draw(st.sets(st.sampled_from(sorted(self.quarantined))), "blocks")
        for block in blocks:
            slots = product(range(self.pool.block_size), range(self.pool.needs.num_groups))
            for offset, group in slots:
                self.store.slots[block, offset, group] = GARBAGE
        if ended:
            self.pool.end_quarantine(blocks)
            self.quarantined -= blocks
            self.idle = False

    @rule(data=st.data(), compute_missing=st.booleans())
    def start(self, data: st.DataObject, compute_missing: bool) -> None:
        client = self.pick(data, SequenceState.RESERVED)
        if client is None:
            return
        seq = client.seq
        if seq.num_computed_tokens < seq.num_tokens and not compute_missing:
            with pytest.raises(InvalidRequestError):
                self.scheduler.start(seq, [], compute_missing)
            return
        self.start_one(data, client, compute_missing)

    def start_one(self, data: st.DataObject, client: Client, compute_missing: bool) -> None:
        emitted = self.emit_ahead(data, client.seq)
        self.num_calls += 1
        self.scheduler.start(client.seq, emitted, compute_missing)
        client.received += emitted
        self.idle = False

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = self.pick(data, *SequenceState)
        if client is None or (len(self.clients) < 3 and client.finish_reason is None):
            return
        self.scheduler.release(client.seq)
        self.scheduler.release(client.seq)
        self.clients.remove(client)
        self.idle = False

    @rule(
        seconds=st.sampled_from([0.1, 3.0, 20.0]),
        most=st.none() | st.integers(1, 6),
        beside=st.none() | st.tuples(st.integers(0, 2), st.none() | st.integers(0, 3)),
    )
    def time_passes(
        self, seconds: float, most: int | None, beside: tuple[int, int | None] | None
    ) -> None:
        self.now_s += seconds
        self.max_yielding_tokens = most
        self.beside_others = beside and Allowed(*beside, StepWork())

    @precondition(lambda self: len(self.plans) < self.max_in_flight)
    @rule()
    def schedule(self) -> None:
        aged = {client.seq for client in self.clients if client.seq.has_aged}
        rows = [seq for seq in self.scheduler.decoding if seq.gives_way]
        passed_since = {seq: seq.passed_since_s for seq in rows}
        plan = self.scheduler.schedule(
            max_yielding_tokens=self.max_yielding_tokens,
            beside_others=self.beside_others,
            now_s=self.now_s,
        )
        if plan is None:
            if not self.plans:
                self.check_nothing_can_run()
            return
        assert not self.idle, "nobody called in, and yet there is work"
        assert 0 < plan.num_tokens <= self.config.max_batched_tokens
        owners = self.scheduler.owners(plan)
        assert len(set(owners)) == len(plan.chunks)
        assert self.scheduler.num_running <= self.config.max_num_seqs
        for seq, chunk in zip(owners, plan.chunks, strict=True):
            self.check_planned(seq, chunk)
        self.check_who_goes_first(plan, aged)
        self.check_who_sits_out(plan, aged, passed_since)
        self.plans.append(plan)
        self.plan_generations.append(self.generations(plan))

    def check_planned(self, seq: Sequence, chunk: Chunk) -> None:
        """Ahead goes who will likely go on, and whom the host need not see."""
        if chunk.follows is None:
            assert chunk.end <= seq.num_tokens, "from a token that nobody has"
            return
        assert self.plans, "follows a step that has ended"
        assert chunk.start == seq.num_tokens, "planned ahead, and preempted since"
        assert not seq.sampling.return_margins, "ahead of a token that the host has to see"
        assert not seq.prefill_only, "ahead of its one token"
        assert seq.num_output_tokens + 2 <= seq.sampling.max_tokens, "ahead of its last token"
        assert seq.num_tokens + 2 <= self.config.max_model_len, "ahead of its last token"

    def check_who_goes_first(self, plan: StepPlan, aged: Set[Sequence]) -> None:
        """Who gives way has nothing of a step with parts of others' prompts, and little else."""
        num_tokens = {True: 0, False: 0}
        for seq, chunk in zip(self.scheduler.owners(plan), plan.chunks, strict=True):
            if chunk.sample is None or len(chunk.token_ids) > 1:
                num_tokens[seq.yields and seq not in aged] += len(chunk.token_ids)
        assert not all(num_tokens.values()), "others' prompts had to wait"
        most = self.max_yielding_tokens
        assert most is None or num_tokens[True] <= most, "a step was too long"

    def check_who_sits_out(
        self, plan: StepPlan, aged: Set[Sequence], passed_since: Mapping[Sequence, float | None]
    ) -> None:
        """Beside others no more rows of those that give way than so many, by turns."""
        tokens = dict(zip(self.scheduler.owners(plan), plan.chunks, strict=True))
        others = [seq for seq in tokens if not seq.yields or seq in aged]
        decode = [seq for seq in others if tokens[seq].sample and len(tokens[seq].token_ids) == 1]
        sat_out = [
            seq
            for seq in passed_since
            if seq.state is SequenceState.RUNNING and seq.decodes_next and seq not in tokens
        ]
        if self.beside_others is None or not decode:
            if not self.plans:
                assert not sat_out, "nobody was to be waited for"
            return
        going = [seq for seq in passed_since if seq in tokens]
        assert len(going) <= self.beside_others.max_rows, "others had to wait for them"
        if self.plans:
            return
        assert not sat_out or len(going) == self.beside_others.max_rows
        latest = max((passed_since[seq] or math.inf for seq in going), default=0.0)
        assert all(latest <= (passed_since[seq] or math.inf) for seq in sat_out), "out of turn"

    def generations(self, plan: StepPlan) -> list[list[int]]:
        return [
            [self.pool.generation(block) for block in chunk.block_table] for chunk in plan.chunks
        ]

    @rule(num_steps=st.integers(2, 10))
    def run_steps(self, num_steps: int) -> None:
        """Let sequences grow into each other."""
        for _ in range(num_steps):
            while len(self.plans) < self.max_in_flight:
                num_before = len(self.plans)
                self.schedule()
                if len(self.plans) == num_before:
                    break
            if not self.plans:
                return
            self.finish_step()

    def check_nothing_can_run(self) -> None:
        self.idle = True
        if self.scheduler.has_work:
            counts = self.pool.counts()
            assert counts.reserved + counts.leased + counts.quarantined, "a deadlock"

    @precondition(lambda self: self.plans)
    @rule()
    def finish_step(self) -> None:
        plan = self.plans.popleft()
        reused = self.generations(plan) != self.plan_generations.popleft()
        assert not reused, "a block was reused under a step"
        sequences = self.scheduler.owners(plan)
        going_on = [seq for seq in sequences if seq.state is SequenceState.RUNNING]
        updates = self.scheduler.update(plan, self.runner.execute(plan))
        assert [update.sequence for update in updates] == going_on
        for update in updates:
            self.receive(update)
        self.ask_again()

    def refusal(
        self, ask: Callable[[Sequence], None], seq: Sequence
    ) -> BlocksExhaustedError | None:
        """None: it has its blocks. Who is refused holds nothing, and may be told that they come."""
        before = self.pool.counts()
        try:
            ask(seq)
        except BlocksExhaustedError as error:
            if isinstance(error, BlocksComingError):
                assert not seq.yields, "others leave for one that gives way"
                assert self.plans, "nobody is at work: who leaves could have left"
                self.coming = seq, self.num_calls
            assert self.pool.counts() == before
            return error
        return None

    def ask_again(self) -> None:
        """Whoever was told that blocks come gets them, if nobody was quicker."""
        if self.coming is None or self.plans:
            return
        (seq, num_calls), self.coming = self.coming, None
        ask = self.scheduler.add_prefill if seq.prefill_only else self.scheduler.reserve
        try:
            ask(seq)
        except BlocksExhaustedError:
            assert self.num_calls > num_calls, "the blocks did not come"
            return
        self.clients.append(Client(seq, list(seq.token_ids)))

    def receive(self, update: SequenceUpdate) -> None:
        (client,) = (client for client in self.clients if client.seq is update.sequence)
        seq = update.sequence
        if update.token is not None:
            assert update.position == len(client.received) == update.num_computed_tokens
            client.received.append(update.token.token_id)
            assert client.received == seq.token_ids
            client.finish_reason = update.finish_reason
        naive, reason = continuation(seq, self.config.max_model_len)
        assert client.received == naive[: len(client.received)], "wrong, or behind its end"
        if client.finish_reason is not None:
            assert (client.received, client.finish_reason) == (naive, reason)
        else:
            assert len(client.received) < len(naive)

    @invariant()
    def leases_stay_readable(self) -> None:
        if not hasattr(self, "pool"):
            return
        for client in self.clients:
            seq = client.seq
            if not seq.prefill_only or seq.state is SequenceState.FINISHED:
                continue
            now = [(block, self.pool.generation(block)) for block in seq.block_table]
            assert now[: len(client.fixed)] == client.fixed
            is_first = seq.state is SequenceState.WAITING and len(client.fixed) < len(now)
            num_fixed = seq.num_computed_tokens // self.pool.block_size if is_first else len(now)
            client.fixed = now[:num_fixed]
            self.check_lease(seq)

    def check_lease(self, seq: Sequence) -> None:
        """What its readers need of what was computed is there."""
        kvs = kv_of(seq.token_ids, seq.cache_salt)[: seq.num_computed_tokens]
        num_tokens = seq.num_tokens - (seq.state is SequenceState.LEASED)  # the one it drew
        size, last_block = self.pool.block_size, (num_tokens - 1) // self.pool.block_size
        for index in range(self.pool.num_blocks_for(len(kvs))):
            num_groups = self.pool.needs.num_groups_of(index, last_block)
            held = kvs[index * size : (index + 1) * size]
            self.store.check_held(seq.block_table[index], num_groups, held)

    @invariant()
    def only_the_living_hold_blocks(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = {block for client in self.clients for block in client.seq.block_table}
        held |= {block for seq in self.scheduler.in_flight for block in seq.block_table}
        counts = self.pool.counts()
        num_unheld = counts.total - len(held | self.quarantined)
        assert counts.free + counts.cached == num_unheld, "held, but by nobody alive or at work"
        for chunk in (chunk for plan in self.plans for chunk in plan.chunks):
            is_held = all(map(self.pool.holders, chunk.block_table))
            assert is_held, "freed before the last step with it has ended"
        assert counts.quarantined == len(self.quarantined)

    @invariant()
    def waiting_means_all_or_nothing(self) -> None:
        if not hasattr(self, "pool"):
            return
        waiting = self.clients_in(SequenceState.WAITING)
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler.num_reserved == len(self.clients_in(SequenceState.RESERVED))
        for client in waiting:
            seq = client.seq
            assert not seq.block_table or (
                len(seq.block_table) >= self.pool.num_blocks_for(seq.num_tokens)
            )

    def teardown(self) -> None:
        """Without readers and reservations everything runs to its end, and nothing is left."""
        if not hasattr(self, "pool"):
            return
        self.pool.end_quarantine(self.quarantined)
        self.quarantined.clear()
        self.release_held()
        while self.plans:
            self.finish_step()
        for _ in range(2000):
            self.release_held()
            if not self.scheduler.has_work:
                break
            self.run_steps(1)
        while self.plans:
            self.finish_step()
        assert not self.scheduler.has_work, "no end in sight"
        assert all(client.finish_reason for client in self.clients if not client.seq.prefill_only)
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert not list(self.scheduler.holders())

    def release_held(self) -> None:
        for client in self.clients_in(SequenceState.RESERVED, SequenceState.LEASED):
            self.scheduler.release(client.seq)
            self.clients.remove(client)
        self.idle = False


class AheadMachine(SchedulerMachine):
    """Over a device that has two steps at a time."""

    max_in_flight = 2


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)

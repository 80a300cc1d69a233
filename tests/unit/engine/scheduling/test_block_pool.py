"""BlockPool keeps its books under any sequence of calls, and its cache never lies."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.block_hash import BlockKey, block_keys
from diptych.cache_change import fold
from diptych.engine.scheduling.block_pool import BlockPool, Owner
from diptych.engine.scheduling.free_runs import FreeRuns
from diptych.errors import BlocksExhaustedError

BLOCK_SIZE = 2


@dataclass
class Table:
    """What a sequence would hold: ``num_entered`` of its blocks were offered to the cache."""

    keys: list[BlockKey]
    block_ids: list[int]
    owner: Owner
    num_entered: int
    unfinished: set[int] = field(default_factory=set)  # quarantined by this table


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.tables: list[Table] = []
        self.quarantined: set[int] = set()
        self.block_of: dict[BlockKey, int] = {}  # the prefix cache as it should be
        self.parent_of: dict[BlockKey, BlockKey] = {}
        self.generations = [0] * num_blocks
        self.followed: set[BlockKey] = set()  # by the log alone
        self.followed_seq: int | None = None

    def holders(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table.block_ids)

    def pick(self, data: st.DataObject) -> Table:
        return data.draw(st.sampled_from(self.tables))

    def is_idle(self, block_id: int) -> bool:
        return not self.holders()[block_id] and block_id not in self.quarantined

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        owner=st.sampled_from(list(Owner)),
        after_hit=st.booleans(),
    )
    def admit(self, tokens: list[int], owner: Owner, after_hit: bool) -> None:
        keys = block_keys(tokens, BLOCK_SIZE)
        hits = self.pool.lookup(keys)
        assert hits == [self.block_of[key] for key in keys[: len(hits)]]
        assert len(hits) == len(keys) or keys[len(hits)] not in self.block_of
        before = self.pool.counts()
        self.pool.hold(hits, owner)
        num_fresh = self.pool.num_blocks_for(len(tokens)) - len(hits)
        available = self.pool.num_available_blocks
        num_free = self.pool.counts().free
        after = hits[-1] if hits and after_hit else None
        if num_fresh > available:
            with pytest.raises(BlocksExhaustedError) as caught:
                self.pool.allocate(num_fresh, owner, after)
            assert caught.value.metadata == {"needed": str(num_fresh), "free": str(available)}
            self.pool.free(hits, owner)
            assert self.pool.counts() == before
            return
        fresh = self.pool.allocate(num_fresh, owner, after)
        held = self.holders()
        assert len(set(fresh)) == num_fresh
        for block_id in fresh:
            assert not held[block_id]
            assert block_id not in hits
            assert block_id not in self.quarantined
            assert self.pool.is_writable(block_id)
            assert self.pool.generation(block_id) == self.generations[block_id] + 1
            self.generations[block_id] += 1
        self.tables.append(Table(keys, hits + fresh, owner, len(hits)))
        self.check_evictions(set(fresh), num_free)

    def check_evictions(self, fresh: set[int], num_free: int) -> None:
        evicted = [key for key, block in self.block_of.items() if block in fresh]
        assert len(evicted) == max(0, len(fresh) - num_free)
        for key in evicted:
            del self.block_of[key]
        parents = {self.parent_of.get(key) for key in self.block_of}
        for key, block_id in self.block_of.items():  # no idle leaf outlives its parent
            if key not in parents and self.is_idle(block_id):
                assert self.parent_of.get(key) not in evicted

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def enter(self, data: st.DataObject, num_blocks: int) -> None:
        table = self.pick(data)
        end = min(len(table.keys), table.num_entered + num_blocks)
        if table.unfinished:
            return
        for index in range(table.num_entered, end):
            key, block_id = table.keys[index], table.block_ids[index]
            parent = table.keys[index - 1] if index else None
            entered = self.pool.insert(block_id, key, parent)
            assert entered == (key not in self.block_of)
            if entered:
                self.block_of[key] = block_id
                if parent is not None:
                    self.parent_of[key] = parent
            table.num_entered += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.pick(data)
        self.tables.remove(table)
        self.pool.free(table.block_ids, table.owner)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), owner=st.sampled_from(list(Owner)))
    def retag(self, data: st.DataObject, owner: Owner) -> None:
        table = self.pick(data)
        self.pool.retag(table.block_ids, table.owner, owner)
        table.owner = owner

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        table = self.pick(data)
        private = table.block_ids[table.num_entered :]
        unfinished = data.draw(st.sets(st.sampled_from(private))) if private else set()
        self.pool.quarantine(unfinished)
        self.pool.quarantine(unfinished)
        table.unfinished |= unfinished
        self.quarantined |= unfinished

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        everything = st.integers(0, self.pool.num_blocks - 1)
        ended = data.draw(st.sets(everything))
        self.pool.end_quarantine(ended)
        self.quarantined -= ended
        for table in self.tables:
            table.unfinished -= ended

    @invariant()
    def each_block_counts_once(self) -> None:
        if not hasattr(self, "pool"):
            return
        classes = dict.fromkeys(range(self.pool.num_blocks), "free")
        classes |= dict.fromkeys(self.block_of.values(), "cached")
        for owner in Owner:
            for table in self.tables:
                if table.owner is owner:
                    classes |= dict.fromkeys(table.block_ids, owner.name.lower())
        classes |= dict.fromkeys(self.quarantined, "quarantined")
        expected = Counter(classes.values())
        counts = self.pool.counts()._asdict()
        assert counts.pop("total") == sum(counts.values()) == self.pool.num_blocks
        assert {name: num for name, num in counts.items() if num} == dict(expected)

    @invariant()
    def the_log_tells_of_every_key(self) -> None:
        if not hasattr(self, "pool"):
            return
        for change in self.pool.cache_log.since(self.followed_seq):
            kept = set() if change.is_reset else self.followed
            assert kept.issuperset(change.removed)
            assert kept.isdisjoint(change.added)
            self.followed = kept.difference(change.removed).union(change.added)
            self.followed_seq = change.to_seq
            assert (change.num_blocks, change.digest) == (len(self.followed), fold(self.followed))
        assert self.followed == self.block_of.keys()

    @invariant()
    def shared_blocks_are_immutable(self) -> None:
        if not hasattr(self, "pool"):
            return
        held, keyed = self.holders(), set(self.block_of.values())
        for block_id in range(self.pool.num_blocks):
            one_holder = held[block_id] == 1 and block_id not in self.quarantined
            assert self.pool.is_writable(block_id) == (one_holder and block_id not in keyed)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class FreeRunsMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks: int) -> None:
        self.runs = FreeRuns(num_blocks)
        self.free = set(range(num_blocks))
        self.taken: set[int] = set()

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, len(self.free)))
        after = data.draw(st.none() | st.integers(0, len(self.free | self.taken)))
        longest = max((len(run) for run in runs_of(self.free)), default=0)
        taken = self.runs.take(num_blocks, after)
        assert len(taken) == len(set(taken)) == num_blocks
        assert self.free.issuperset(taken)
        if after is not None and after + 1 in self.free and after not in self.free and taken:
            assert taken[0] == after + 1
        elif after is None and num_blocks * 2 <= longest:
            assert taken == list(range(taken[0], taken[0] + num_blocks)) if taken else True
        self.free -= set(taken)
        self.taken |= set(taken)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        for block_id in data.draw(st.sets(st.sampled_from(sorted(self.taken)))):
            self.runs.add(block_id)
            self.taken.remove(block_id)
            self.free.add(block_id)

    @invariant()
    def size_is_known(self) -> None:
        if hasattr(self, "runs"):
            assert len(self.runs) == len(self.free)


TestFreeRuns = FreeRunsMachine.TestCase
TestFreeRuns.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def runs_of(block_ids: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block_id in sorted(block_ids):
        if runs and runs[-1][-1] + 1 == block_id:
            runs[-1].append(block_id)
        else:
            runs.append([block_id])
    return runs


def test_a_table_comes_back_in_one_run_after_its_neighbours_left() -> None:
    pool = BlockPool(12, BLOCK_SIZE)
    tables = [pool.allocate(3, Owner.RUNNING) for _ in range(4)]
    assert tables[1] == [3, 4, 5]
    pool.free(tables[1], Owner.RUNNING)
    pool.free(tables[2], Owner.RUNNING)
    assert pool.allocate(6, Owner.RESERVED) == [3, 4, 5, 6, 7, 8]


def test_least_recently_used_leaves_go_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    old, new = block_keys([0, 0, 0, 0], BLOCK_SIZE), block_keys([1, 1, 1, 1], BLOCK_SIZE)
    for keys in (old, new):
        table = pool.allocate(2, Owner.RUNNING)
        pool.insert(table[0], keys[0], None)
        pool.insert(table[1], keys[1], keys[0])
        pool.free(table, Owner.RUNNING)
    pool.allocate(1, Owner.RUNNING)
    assert [len(pool.lookup(keys)) for keys in (old, new)] == [1, 2]
    pool.hold(pool.lookup(old), Owner.RUNNING)  # used again
    pool.free(pool.lookup(old), Owner.RUNNING)
    pool.allocate(2, Owner.RUNNING)
    assert [len(pool.lookup(keys)) for keys in (old, new)] == [1, 0]


def test_a_block_whose_children_are_gone_goes_before_those_used_since() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    old, new = block_keys([0, 0, 0, 0], BLOCK_SIZE), block_keys([1, 1], BLOCK_SIZE)
    table = pool.allocate(2, Owner.RUNNING)
    pool.insert(table[0], old[0], None)
    pool.insert(table[1], old[1], old[0])
    pool.free(table, Owner.RUNNING)
    table = pool.allocate(1, Owner.RUNNING)
    pool.insert(table[0], new[0], None)
    pool.free(table, Owner.RUNNING)
    for num_blocks, left in ((2, [1, 1]), (3, [0, 1])):
        pool.free(pool.allocate(num_blocks, Owner.RUNNING), Owner.RUNNING)
        assert [len(pool.lookup(keys)) for keys in (old, new)] == left


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        BlockPool(0, 16)

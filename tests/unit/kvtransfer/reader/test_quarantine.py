"""A block is quarantined from its pull's end until its last unfinished read ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.reader.quarantine import PullReads, Quarantine, ReadRecord, ReadState


class QuarantineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.num_begun = 0
        self.orphans: list[ReadRecord] = []
        self.now = 100.0
        self.quarantine = Quarantine(self.begin, self.end)

    def begin(self, block_ids: frozenset[int]) -> None:
        assert block_ids
        assert not self.held & block_ids
        self.held |= block_ids
        self.num_begun += len(block_ids)

    def end(self, block_ids: frozenset[int]) -> None:
        assert block_ids
        assert block_ids <= self.held
        self.held -= block_ids

    @rule(reads=st.lists(st.frozensets(st.integers(0, 9), min_size=1), min_size=1, max_size=3))
    def a_pull_ends(self, reads: list[frozenset[int]]) -> None:
        records = [ReadRecord(block_ids, "nixl") for block_ids in reads]
        assert self.quarantine.orphan(records, self.now) == frozenset().union(*reads)
        self.orphans += records

    @rule(data=st.data())
    def a_read_ends(self, data: st.DataObject) -> None:
        if self.orphans:
            index = data.draw(st.integers(0, len(self.orphans) - 1))
            self.quarantine.ended(self.orphans.pop(index))

    @rule()
    def a_read_nobody_orphaned_ends(self) -> None:
        self.quarantine.ended(ReadRecord(frozenset({1}), "nixl"))

    @rule()
    def time_passes(self) -> None:
        self.now += 1

    @invariant()
    def held_are_the_blocks_of_unfinished_reads(self) -> None:
        named = frozenset[int]().union(*(read.block_ids for read in self.orphans))
        assert self.held == named == set(self.quarantine.block_ids)
        assert self.quarantine.num_blocks_ever == self.num_begun

    @invariant()
    def age_is_that_of_the_oldest(self) -> None:
        ages = [self.now - (read.orphaned_at or 0) for read in self.orphans]
        assert self.quarantine.oldest_s(self.now) == max(ages, default=0)


TestQuarantine = QuarantineMachine.TestCase
TestQuarantine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_reads_of_a_pull_are_its_own_until_it_is_over() -> None:
    begun: list[frozenset[int]] = []
    ended: list[frozenset[int]] = []
    quarantine = Quarantine(begun.append, ended.append)
    reads = PullReads(quarantine, "nixl")
    first, late = reads.begin(frozenset({1})), reads.begin(frozenset({2}))
    assert quarantine.num_open_reads == 2
    assert reads.ended(first), "the pull wants it"
    assert reads.abandon(5.0) == {2}
    assert reads.abandon(6.0) == {2}
    assert begun == [{2}]
    assert quarantine.oldest_s(7.0) == 2.0
    assert quarantine.num_open_reads == 1
    assert not reads.ended(late), "nobody waits for it"
    assert ended == [{2}]
    assert late.state is ReadState.ENDED
    assert quarantine.num_open_reads == 0

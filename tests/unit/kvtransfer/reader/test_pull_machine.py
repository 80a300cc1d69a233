"""PullMachine proves a pull only after every block was announced, landed, and confirmed."""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from diptych.v1 import decode_pb2, kv_source_pb2
from kvtransfer.digest import Coverage, block_digest, combined_digest
from kvtransfer.reader.pull_machine import (
    DigestChecks,
    PlannedRead,
    PullError,
    PullMachine,
    PullState,
)

BLOCK_SIZE = 4
BLOCK_BYTES = 10
LOCAL = tuple(range(100, 120))
PROMPT = b"p" * 16
SELDOM = st.sampled_from([False] * 9 + [True])
OF_RANGES = ["gap", "last", "digests", "repeat", "blocks"]
WRONG = ["", "opening", *OF_RANGES, "corrupt", "unasked", "order", "leaving"]


def digest(block: int) -> bytes:
    return block_digest(f"block {block}".encode())


def machine(
    first: int = 0, end: int = 11, check_digests: bool = True, local: tuple[int, ...] = LOCAL
) -> PullMachine:
    """One that has asked its source."""
    pull = PullMachine(
        first_token=first,
        end_token=end,
        prompt_digest=PROMPT,
        local_block_ids=local,
        block_size=BLOCK_SIZE,
        num_bytes_of=lambda index: BLOCK_BYTES,
        checks=DigestChecks(each_block=check_digests, in_confirm=check_digests),
    )
    assert pull.begin(frozenset())
    return pull


def opening(end: int, prompt: bytes = PROMPT) -> kv_source_pb2.FetchOpened:
    return kv_source_pb2.FetchOpened(end_token=end, prompt_digest=prompt)


def announcement(first: int, end: int, last: bool) -> kv_source_pb2.Range:
    """Tokens first..end, whose source blocks are numbered from 50."""
    blocks = range(first // BLOCK_SIZE, -(-end // BLOCK_SIZE))
    return kv_source_pb2.Range(
        first_token=first,
        num_tokens=end - first,
        block_ids=[50 + block for block in blocks],
        generations=[1] * len(blocks),
        digests=[digest(block) for block in blocks],
        last=last,
    )


class PullStateMachine(RuleBasedStateMachine):
    """Messages in any order, and one kind of wrong ones; the model keeps what truly happened."""

    wrong: ClassVar[str]  # what goes wrong
    met: ClassVar[Counter[PullState]]  # how pulls ended, of all runs

    @initialize(blocks=st.integers(1, 6), tail=st.integers(0, 3), skip=st.integers(0, 2))
    def start(self, blocks: int, tail: int, skip: int) -> None:
        self.first = skip * BLOCK_SIZE
        self.end = self.first + blocks * BLOCK_SIZE - tail
        self.pull = machine(self.first, self.end)
        self.announced = self.first
        self.unlanded: list[tuple[int, int]] = []  # runs of blocks of the pull
        self.num_landed = 0
        self.spoiled = False  # something wrong was fed in
        self.asked = False

    @property
    def may_announce(self) -> bool:
        return self.pull.state is PullState.READING and self.announced < self.end

    def feed(self, good: bool, tell: Callable[[], object]) -> bool:
        """Wrong input is refused, and ends the pull; right input never is. Whether it was taken."""
        if good:
            tell()
            return True
        with pytest.raises(PullError) as refused:
            tell()
        assert refused.value.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        self.spoiled = self.pull.state is not PullState.PROVEN
        return False

    @rule(spoils=SELDOM)
    def opened(self, spoils: bool) -> None:
        bad = spoils and self.wrong == "opening"
        if self.pull.state is PullState.OPENING:
            self.feed(not bad, lambda: self.pull.opened(opening(self.end + bad)))

    def next_range(self, num_blocks: int) -> kv_source_pb2.Range:
        end = min(self.announced + num_blocks * BLOCK_SIZE, self.end)
        return announcement(self.announced, end, end == self.end)

    @rule(num_blocks=st.integers(1, 3), spoils=SELDOM)
    def range_comes(self, num_blocks: int, spoils: bool) -> None:
        if not self.may_announce:
            return
        message = self.next_range(num_blocks)
        if spoils:
            self.spoil(message)
        good, planned = message == self.next_range(num_blocks), list[PlannedRead]()
        if not self.feed(good, lambda: planned.extend(self.pull.announced(message))):
            return
        (read,) = planned
        assert read.first_block == (self.announced - self.first) // BLOCK_SIZE
        assert read.source_block_ids == tuple(message.block_ids)
        past = read.first_block + len(read.source_block_ids)
        assert read.local_block_ids == LOCAL[read.first_block : past]
        self.unlanded.append((read.first_block, len(read.local_block_ids)))
        self.announced += message.num_tokens

    def spoil(self, message: kv_source_pb2.Range) -> None:
        match self.wrong:
            case "gap":
                message.first_token += BLOCK_SIZE
            case "last":
                message.last = not message.last
            case "digests":
                del message.digests[:]
                message.digests.append(b"short")
            case "repeat":  # the first block of all, unless that is it
                message.block_ids[-1] = 50 + self.first // BLOCK_SIZE
            case "blocks":
                del message.block_ids[:]

    @rule(data=st.data(), spoils=SELDOM)
    def something_lands(self, data: st.DataObject, spoils: bool) -> None:
        """In any order; each announced run may land in one piece or two."""
        if self.unlanded and not self.spoiled:
            run = data.draw(st.sampled_from(self.unlanded))
            self.land(run, data.draw(st.integers(1, run[1])), spoils=spoils)

    def land(self, run: tuple[int, int], part: int, *, spoils: bool) -> None:
        first, num_blocks = run
        self.unlanded.remove(run)
        if part < num_blocks:
            self.unlanded.append((first + part, num_blocks - part))
        offset = self.first // BLOCK_SIZE
        digests = [digest(offset + block) for block in range(first, first + part)]
        corrupt = spoils and self.wrong == "corrupt"
        if corrupt:
            digests[-1] = b"x" * 16
        asked = list[kv_source_pb2.Confirm | None]()
        if not self.feed(
            not corrupt, lambda: asked.append(self.pull.landed(first, part, tuple(digests)))
        ):
            return
        self.num_landed += part
        (question,) = asked
        assert (question is not None) == (self.num_landed == self.pull.num_blocks)
        if question is not None:
            self.asked = True
            blocks = range(offset, offset + self.pull.num_blocks)
            assert question.num_tokens == self.end - self.first
            assert question.digest == combined_digest(digest(block) for block in blocks)

    @rule(first=st.integers(0, 8), happens=SELDOM)
    def something_lands_unasked(self, first: int, happens: bool) -> None:
        is_asked = any(begin <= first < begin + num for begin, num in self.unlanded)
        if happens and self.wrong == "unasked" and not is_asked:
            block = self.first // BLOCK_SIZE + first
            self.feed(False, lambda: self.pull.landed(first, 1, (digest(block),)))

    @rule()
    def confirmed(self) -> None:
        if self.pull.state is PullState.CONFIRMING:
            self.feed(True, self.pull.confirmed)

    @rule(what=st.sampled_from(["opened", "announced", "confirmed"]), happens=SELDOM)
    def something_comes_out_of_order(self, what: str, happens: bool) -> None:
        state = self.pull.state
        if not happens or not (self.wrong == "order" or self.spoiled):
            return
        if what == "opened" and state is not PullState.OPENING:
            self.feed(False, lambda: self.pull.opened(opening(self.end)))
        elif what == "announced" and not self.may_announce:
            self.feed(False, lambda: self.pull.announced(self.next_range(1)))
        elif what == "confirmed" and state is not PullState.CONFIRMING:
            self.feed(False, self.pull.confirmed)

    @rule(happens=SELDOM)
    def the_shell_gives_up(self, happens: bool) -> None:
        proven = self.pull.state is PullState.PROVEN
        if not happens or not (self.wrong == "leaving" or proven):
            return
        self.pull.failed()
        assert self.pull.state is (PullState.PROVEN if proven else PullState.FAILED)
        self.spoiled = not proven

    def teardown(self) -> None:
        """The rest comes, wrong in what goes wrong in this run: what is right is proven."""
        if not hasattr(self, "pull"):
            return
        if self.wrong == "order":
            self.something_comes_out_of_order("opened", happens=True)
            self.something_comes_out_of_order("confirmed", happens=True)
        if self.wrong == "leaving":
            self.the_shell_gives_up(happens=True)
        self.opened(spoils=True)
        while self.may_announce:
            self.range_comes(num_blocks=3, spoils=True)
        while self.unlanded and not self.spoiled:
            self.land(self.unlanded[-1], self.unlanded[-1][1], spoils=True)
            if self.wrong == "unasked":
                self.something_lands_unasked(self.pull.num_blocks - 1, happens=True)
        self.confirmed()
        self.proven_means_everything_landed_and_was_asked()
        assert self.pull.state is (PullState.FAILED if self.spoiled else PullState.PROVEN)
        self.met[self.pull.state] += 1

    @invariant()
    def proven_means_everything_landed_and_was_asked(self) -> None:
        if self.pull.state is PullState.PROVEN:
            assert self.asked
            assert self.announced == self.end
            assert self.num_landed == self.pull.num_blocks
            assert not self.unlanded

    @invariant()
    def unlanded_blocks_are_counted(self) -> None:
        if not self.spoiled:
            assert self.pull.num_unlanded_blocks == sum(count for _, count in self.unlanded)


@pytest.mark.parametrize("goes_wrong", WRONG)
def test_exactly_what_comes_right_is_proven_in_whatever_order(goes_wrong: str) -> None:
    class Runs(PullStateMachine):
        wrong = goes_wrong
        met: ClassVar[Counter[PullState]] = Counter()

    run_state_machine_as_test(Runs, settings=settings(max_examples=20, stateful_step_count=30))
    assert Runs.met[PullState.FAILED if goes_wrong else PullState.PROVEN]


def test_a_local_block_is_given_once() -> None:
    with pytest.raises(PullError, match="3 blocks needed, 2 given"):
        machine(local=(100, 101, 100))


def test_data_is_laid_out_block_after_block() -> None:
    pull = machine()
    pull.opened(opening(11))
    pull.announced(announcement(0, 11, last=True))
    first = pull.received(kv_source_pb2.Data(offset=0, payload=b"a" * 14))
    assert first == (0, LOCAL[:2], 0, BLOCK_BYTES, 1, (Coverage(0, 0, BLOCK_BYTES),))
    second = pull.received(kv_source_pb2.Data(offset=14, payload=b"b" * 3))
    assert second == (1, LOCAL[1:2], 4, BLOCK_BYTES, 0, ())
    third = pull.received(kv_source_pb2.Data(offset=17, payload=b"c" * 13))
    covered = (Coverage(0, 1, BLOCK_BYTES), Coverage(0, 2, BLOCK_BYTES))
    assert third == (1, LOCAL[1:3], 7, BLOCK_BYTES, 2, covered)


SIZES = (0, 0, 3, 3, 10, 10)  # bytes that are needed of blocks, one after another


def part_digest(block: int) -> bytes:
    return block_digest(bytes([block]) * SIZES[block])


def partial(first: int = 0) -> PullMachine:
    """Of 22 tokens, which has asked its source from ``first`` on."""
    pull = PullMachine(
        first_token=first,
        end_token=22,
        prompt_digest=PROMPT,
        local_block_ids=LOCAL,
        block_size=BLOCK_SIZE,
        num_bytes_of=SIZES.__getitem__,
        checks=DigestChecks(each_block=True, in_confirm=True),
    )
    assert pull.begin(frozenset())
    pull.opened(opening(22))
    return pull


def partial_announcement(first: int, end: int) -> kv_source_pb2.Range:
    message = announcement(first, end, last=end == 22)
    blocks = range(first // BLOCK_SIZE, -(-end // BLOCK_SIZE))
    message.digests[:] = [part_digest(block) for block in blocks]
    return message


def test_a_range_is_read_by_runs_of_blocks_of_which_as_much_is_needed() -> None:
    pull = partial()
    small, large = pull.announced(partial_announcement(0, 22))
    assert (small.first_block, small.num_bytes, small.local_block_ids) == (2, 3, LOCAL[2:4])
    assert (large.first_block, large.num_bytes, large.local_block_ids) == (4, 10, LOCAL[4:6])
    assert [small.source_block_ids, large.source_block_ids] == [(52, 53), (54, 55)]
    assert small.to_digest == (Coverage(0, 2, 3), Coverage(0, 3, 3))
    assert pull.num_bytes == 26
    assert pull.num_unlanded_blocks == 4
    assert pull.landed(4, 2, (part_digest(4), part_digest(5))) is None
    confirm = pull.landed(2, 2, (part_digest(2), part_digest(3)))
    assert confirm is not None
    assert confirm.digest == combined_digest(part_digest(block) for block in range(6))


def test_a_range_of_which_nothing_is_needed_has_landed() -> None:
    pull = partial()
    assert pull.announced(partial_announcement(0, 8)) == []
    assert pull.num_unlanded_blocks == 0
    assert pull.state is PullState.READING
    with pytest.raises(PullError, match="landed unasked"):
        pull.landed(0, 1, (part_digest(0),))


def test_a_wrong_digest_of_nothing_is_noticed() -> None:
    pull = partial()
    message = partial_announcement(0, 8)
    message.digests[1] = b"x" * 16
    with pytest.raises(PullError, match="differ"):
        pull.announced(message)


def test_what_is_needed_of_a_block_goes_by_its_place_in_the_sequence() -> None:
    pull = partial(first=12)
    small, large = pull.announced(partial_announcement(12, 22))
    assert (small.first_block, small.num_bytes) == (0, 3)
    assert (large.first_block, large.num_bytes) == (1, 10)


def test_data_of_parts_is_laid_out_part_after_part() -> None:
    pull = partial()
    pull.announced(partial_announcement(0, 22))
    got = [pull.received(data) for data in messages(4, 2, 15, 5)]
    assert [(write.first_block, write.offset, write.num_bytes) for write in got] == [
        (2, 0, 3),
        (3, 1, 3),
        (4, 0, 10),
        (5, 5, 10),
    ]
    assert [write.local_block_ids for write in got] == [
        LOCAL[2:4],
        LOCAL[3:4],
        LOCAL[4:6],
        LOCAL[5:6],
    ]
    assert [write.num_completed for write in got] == [1, 1, 1, 1]


def test_data_of_blocks_that_need_less_and_that_need_more_is_refused() -> None:
    pull = partial()
    pull.announced(partial_announcement(0, 22))
    with pytest.raises(PullError, match="need more"):
        pull.received(kv_source_pb2.Data(offset=0, payload=b"a" * 7))


def messages(*sizes: int) -> list[kv_source_pb2.Data]:
    """One after another."""
    ends = list(accumulate(sizes))
    return [
        kv_source_pb2.Data(offset=end - size, payload=b"a" * size)
        for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize("numbers", [(2,), (1, 1), (1, 3), (0,)])
def test_an_event_that_was_lost_repeated_or_swapped_is_noticed(numbers: tuple[int, ...]) -> None:
    pull = machine()
    *right, wrong = numbers
    for number in right:
        pull.numbered(number)
    with pytest.raises(PullError, match="came in place of"):
        pull.numbered(wrong)
    assert pull.state is PullState.FAILED


def test_a_sampled_digest_is_of_the_place_in_the_sequence() -> None:
    pull = machine(first=BLOCK_SIZE)
    pull.opened(opening(11))
    sampled = announcement(BLOCK_SIZE, 11, last=True)
    sampled.sample_seed = 9
    (planned,) = pull.announced(sampled)
    assert planned.to_digest == (Coverage(9, 1, BLOCK_BYTES), Coverage(9, 2, BLOCK_BYTES))


@pytest.mark.parametrize(("offset", "size"), [(1, 5), (0, 0), (0, 31)])
def test_data_out_of_place_is_refused(offset: int, size: int) -> None:
    pull = machine()
    pull.opened(opening(11))
    pull.announced(announcement(0, 11, last=True))
    with pytest.raises(PullError):
        pull.received(kv_source_pb2.Data(offset=offset, payload=b"a" * size))
    assert pull.state is PullState.FAILED


def test_data_before_its_range_is_refused() -> None:
    pull = machine()
    pull.opened(opening(11))
    with pytest.raises(PullError):
        pull.received(kv_source_pb2.Data(offset=0, payload=b"a"))


def test_without_digests_none_are_wanted_and_none_are_sent() -> None:
    pull = machine(check_digests=False)
    pull.opened(opening(11))
    message = announcement(0, 11, last=True)
    del message.digests[:]
    pull.announced(message)
    assert pull.landed(0, 3, ()) == kv_source_pb2.Confirm(num_tokens=11)


@pytest.mark.parametrize(("first", "end"), [(3, 11), (12, 11), (8, 8)])
def test_there_must_be_something_to_pull(first: int, end: int) -> None:
    with pytest.raises(PullError):
        machine(first, end)


def test_there_must_be_enough_local_blocks() -> None:
    with pytest.raises(PullError, match="21 blocks needed"):
        machine(end=len(LOCAL) * BLOCK_SIZE + 1)


@pytest.mark.parametrize("prompt", [b"q" * 16, b""])
def test_a_lease_of_another_sequence_is_unproven(prompt: bytes) -> None:
    pull = machine()
    with pytest.raises(PullError, match="another sequence's") as excinfo:
        pull.opened(opening(11, prompt))
    assert excinfo.value.failure == decode_pb2.PULL_FAILURE_UNPROVEN
    assert pull.state is PullState.FAILED


def test_the_source_is_not_asked_while_an_earlier_read_may_write_its_blocks() -> None:
    pull = PullMachine(
        first_token=0,
        end_token=11,
        prompt_digest=PROMPT,
        local_block_ids=LOCAL,
        block_size=BLOCK_SIZE,
        num_bytes_of=lambda index: BLOCK_BYTES,
        checks=DigestChecks(each_block=True, in_confirm=True),
    )
    assert not pull.begin({LOCAL[2], 7})
    assert pull.begin({LOCAL[3], 7})  # three blocks are needed
    with pytest.raises(PullError, match="BEGIN while OPENING"):
        pull.begin(frozenset())


@pytest.mark.parametrize(
    ("level", "inline", "is_probe", "checks"),
    [
        ("full", False, False, (True, True)),
        ("sampled", True, False, (True, True)),
        ("off", False, False, (False, False)),
        ("off", True, False, (True, False)),
        ("off", False, True, (True, True)),
    ],
)
def test_what_is_checked_at_each_level(
    level: str, inline: bool, is_probe: bool, checks: tuple[bool, bool]
) -> None:
    assert DigestChecks.of(level, inline=inline, is_probe=is_probe) == checks


def test_staged_blocks_are_read_from_where_the_source_says() -> None:
    pull = machine(end=11)
    pull.numbered(1)
    pull.opened(opening(11))
    pull.announced(announcement(0, 11, last=True))
    first = pull.staged(kv_source_pb2.Staged(offset=0, slots=[7, 2]))
    assert (first.first_block, first.source_block_ids) == (0, (7, 2))
    assert (first.local_block_ids, first.num_bytes) == (LOCAL[:2], BLOCK_BYTES)
    last = pull.staged(kv_source_pb2.Staged(offset=2 * BLOCK_BYTES, slots=[7]))
    assert (last.first_block, last.local_block_ids) == (2, LOCAL[2:3])
    assert len(last.to_digest) == 1


@pytest.mark.parametrize(("offset", "slots"), [(1, [7]), (10, [7]), (0, []), (0, [1, 2, 3, 4])])
def test_what_is_staged_out_of_turn_is_refused(offset: int, slots: list[int]) -> None:
    pull = machine(end=11)
    pull.opened(opening(11))
    pull.announced(announcement(0, 11, last=True))
    with pytest.raises(PullError):
        pull.staged(kv_source_pb2.Staged(offset=offset, slots=slots))

"""PullMachine proves a pull only after every block was announced, landed, and confirmed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.v1 import decode_pb2, kv_source_pb2
from kvtransfer.digest import WHOLE, Coverage, block_digest, combined_digest
from kvtransfer.reader.pull_machine import DigestChecks, PullError, PullMachine, PullState

BLOCK_SIZE = 4
BLOCK_BYTES = 10
LOCAL = tuple(range(100, 120))
PROMPT = b"p" * 16


def digest(block: int) -> bytes:
    return block_digest(f"block {block}".encode())


def machine(first: int = 0, end: int = 11, check_digests: bool = True) -> PullMachine:
    """One that has asked its source."""
    pull = PullMachine(
        first_token=first,
        end_token=end,
        prompt_digest=PROMPT,
        local_block_ids=LOCAL,
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_BYTES,
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
    """Messages in any order, right and wrong ones; the model keeps what truly happened."""

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

    def feed(self, good: bool, error: PullError | None) -> None:
        """Wrong input is refused for good; right input never is."""
        if error is None:
            assert good
            assert not self.spoiled
            return
        assert not good or self.spoiled
        assert error.failure == decode_pb2.PULL_FAILURE_UNPROVEN
        self.spoiled = True

    @rule(right=st.booleans())
    def opened(self, right: bool) -> None:
        good = right and self.pull.state is PullState.OPENING
        try:
            self.pull.opened(opening(self.end if right else self.end + 1))
        except PullError as error:
            self.feed(good, error)
        else:
            self.feed(good, None)

    @rule(
        num_blocks=st.integers(1, 3),
        wrong=st.sampled_from(["", "", "", "gap", "last", "digests", "repeat", "blocks"]),
    )
    def range_comes(self, num_blocks: int, wrong: str) -> None:
        end = min(self.announced + num_blocks * BLOCK_SIZE, self.end)
        message = announcement(self.announced, max(end, self.announced), end == self.end)
        good = self.pull.state is PullState.READING and self.announced < self.end and not wrong
        match wrong:
            case "gap":
                message.first_token += BLOCK_SIZE
            case "last":
                message.last = not message.last
            case "digests":
                del message.digests[:]
                message.digests.append(b"short")
            case "repeat":
                message.block_ids.append(50)
                message.block_ids.append(50)
            case "blocks":
                del message.block_ids[:]
        try:
            planned = self.pull.announced(message)
        except PullError as error:
            self.feed(good, error)
            return
        self.feed(good, None)
        assert planned.first_block == (self.announced - self.first) // BLOCK_SIZE
        assert planned.source_block_ids == tuple(message.block_ids)
        past = planned.first_block + len(planned.source_block_ids)
        assert planned.local_block_ids == LOCAL[planned.first_block : past]
        self.unlanded.append((planned.first_block, len(planned.local_block_ids)))
        self.announced = end

    @precondition(lambda self: self.unlanded)
    @rule(data=st.data(), corrupt=st.sampled_from([False, False, False, True]))
    def something_lands(self, data: st.DataObject, corrupt: bool) -> None:
        """In any order; each announced run may land in one piece or two."""
        run = data.draw(st.sampled_from(self.unlanded))
        first, num_blocks = run
        part = data.draw(st.integers(1, num_blocks))
        self.unlanded.remove(run)
        if part < num_blocks:
            self.unlanded.append((first + part, num_blocks - part))
        offset = self.first // BLOCK_SIZE
        digests = [digest(offset + block) for block in range(first, first + part)]
        if corrupt:
            digests[-1] = b"x" * 16
        good = self.pull.state is PullState.READING and not corrupt
        try:
            question = self.pull.landed(first, part, tuple(digests))
        except PullError as error:
            self.feed(good, error)
            return
        self.feed(good, None)
        self.num_landed += part
        whole = self.num_landed == self.pull.num_blocks
        assert (question is not None) == whole
        if question is not None:
            self.asked = True
            blocks = range(offset, offset + self.pull.num_blocks)
            assert question.num_tokens == self.end - self.first
            assert question.digest == combined_digest(digest(block) for block in blocks)

    @rule(first=st.integers(0, 8))
    def something_lands_unasked(self, first: int) -> None:
        if any(begin <= first < begin + count for begin, count in self.unlanded):
            return
        with pytest.raises(PullError):
            self.pull.landed(first, 1, (digest(first),))
        self.spoiled = True

    @rule()
    def confirmed(self) -> None:
        good = self.pull.state is PullState.CONFIRMING
        try:
            self.pull.confirmed()
        except PullError as error:
            self.feed(good, error)
        else:
            self.feed(good, None)

    @rule()
    def the_shell_gives_up(self) -> None:
        proven = self.pull.state is PullState.PROVEN
        self.pull.failed()
        assert self.pull.state is (PullState.PROVEN if proven else PullState.FAILED)
        self.spoiled = self.spoiled or not proven

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


TestPull = PullStateMachine.TestCase
TestPull.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_data_is_laid_out_block_after_block() -> None:
    pull = machine()
    pull.opened(opening(11))
    pull.announced(announcement(0, 11, last=True))
    first = pull.received(kv_source_pb2.Data(offset=0, payload=b"a" * 14))
    assert first == (0, LOCAL[:2], 0, 1, (WHOLE,))
    second = pull.received(kv_source_pb2.Data(offset=14, payload=b"b" * 3))
    assert second == (1, LOCAL[1:2], 4, 0, ())
    third = pull.received(kv_source_pb2.Data(offset=17, payload=b"c" * 13))
    assert third == (1, LOCAL[1:3], 7, 2, (Coverage(0, 1), Coverage(0, 2)))


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
    assert pull.announced(sampled).to_digest == (Coverage(9, 1), Coverage(9, 2))


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
        block_bytes=BLOCK_BYTES,
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

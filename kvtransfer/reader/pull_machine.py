"""One pull as its reader sees it: a pure state machine from Open to proven."""

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, NoReturn

from diptych.errors import DiptychError
from diptych.transitions import Transitions
from diptych.v1 import common_pb2, decode_pb2, kv_source_pb2
from kvtransfer.digest import (
    DIGEST_BYTES,
    Coverage,
    block_digest,
    combined_digest,
    coverages,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What to pull and where to put it."""

    source_address: str
    source_incarnation: str
    ticket: bytes = field(repr=False)
    first_missing_token: int  # a multiple of the block size
    num_tokens: int  # in the whole sequence; pulled are first_missing_token..num_tokens
    prompt_digest: bytes  # of the whole sequence, as the source must have it
    local_block_ids: tuple[int, ...]  # for tokens from first_missing_token on; more are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """A proven pull."""

    stats: common_pb2.TransferStats


class PullError(DiptychError):
    """A pull ended without proof; ``failure`` is what Decode.PullFailed reports.

    ``refusal`` is the source's reason where it was the source that ended the pull.
    ``agent_lost``: a transport agent's end broke it, ours or the source's; the ticket is
    as good as before. ``took_agent``: ours ended because of this source, and with it what others
    read over it; ``broke_agent``: it had to, for a read that had met an error to be over.
    ``unasked``: it ended before its source was asked for anything.
    """

    def __init__(
        self,
        failure: decode_pb2.PullFailure,
        message: str,
        *,
        refusal: str = "",
        agent_lost: bool = False,
        took_agent: bool = False,
        broke_agent: bool = False,
        unasked: bool = False,
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.refusal = refusal
        self.agent_lost = agent_lost
        self.took_agent = took_agent
        self.broke_agent = broke_agent
        self.unasked = unasked


class PullState(enum.Enum):
    """Where a pull stands."""

    WAITING = enum.auto()  # reads of an earlier pull may still write its blocks
    OPENING = enum.auto()  # Open sent
    READING = enum.auto()  # ranges come and land
    CONFIRMING = enum.auto()  # all landed, Confirm sent
    PROVEN = enum.auto()
    FAILED = enum.auto()


class PullEvent(enum.Enum):
    """What moves it. From the source, what is illegal fails the pull."""

    BEGIN = enum.auto()
    OPENED = enum.auto()
    RANGE = enum.auto()
    DATA = enum.auto()
    LAND = enum.auto()
    LAND_LAST = enum.auto()  # everything is there
    CONFIRMED = enum.auto()
    FAIL = enum.auto()


PULL_TRANSITIONS = Transitions(
    {
        PullState.WAITING: {
            PullEvent.BEGIN: PullState.OPENING,
            PullEvent.FAIL: PullState.FAILED,
        },
        PullState.OPENING: {
            PullEvent.OPENED: PullState.READING,
            PullEvent.FAIL: PullState.FAILED,
        },
        PullState.READING: {
            PullEvent.RANGE: PullState.READING,
            PullEvent.DATA: PullState.READING,
            PullEvent.LAND: PullState.READING,
            PullEvent.LAND_LAST: PullState.CONFIRMING,
            PullEvent.FAIL: PullState.FAILED,
        },
        PullState.CONFIRMING: {
            PullEvent.CONFIRMED: PullState.PROVEN,
            PullEvent.FAIL: PullState.FAILED,
        },
    },
    ignored={PullState.PROVEN: {PullEvent.FAIL}, PullState.FAILED: {PullEvent.FAIL}},
)


class DigestChecks(NamedTuple):
    """What is compared of what landed, besides coverage."""

    each_block: bool  # with the digest that came with its announcement
    in_confirm: bool  # all of them, by the source once more

    @classmethod
    def of(cls, digest_level: str, *, inline: bool, is_probe: bool) -> "DigestChecks":
        """Probes are checked at every level; so is what came as messages, but not by Confirm."""
        by_level = digest_level != "off" or is_probe
        return cls(each_block=by_level or inline, in_confirm=by_level)


class PlannedRead(NamedTuple):
    """Blocks to copy: the first bytes of ``source_block_ids[i]`` to ``local_block_ids[i]``."""

    first_block: int  # index in the pull of the first of them
    source_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    num_bytes: int  # of each of them, at least one
    to_digest: tuple[Coverage, ...]  # of each of them, where checked


class PlannedWrite(NamedTuple):
    """Where the bytes of one Data message go."""

    first_block: int  # index in the pull of the first block touched
    local_block_ids: tuple[int, ...]  # all that are touched
    offset: int  # of the bytes, in the first of them
    num_bytes: int  # that each of them gets in all
    num_completed: int  # of them, from the first on, are whole afterwards
    to_digest: tuple[Coverage, ...]  # of each completed one, where checked


class PullMachine:
    """Decides everything about one pull that needs no clock and no I/O.

    Invariant: no read is planned while one of an earlier pull may still write these blocks.
    PROVEN only if the source's sequence is this one, every block from ``first_token`` to
    ``end_token`` was announced once, landed once after that, its digest (where checked) was
    equal, and the source confirmed. Anything out of order raises PullError and is final.
    """

    def __init__(
        self,
        *,
        first_token: int,
        end_token: int,
        prompt_digest: bytes,
        local_block_ids: tuple[int, ...],
        block_size: int,
        num_bytes_of: Callable[[int], int],
        checks: DigestChecks,
    ) -> None:
        """num_bytes_of: how much comes of a block, by its index in the sequence."""
        self.state = PullState.WAITING
        self._first_token = first_token
        self._end_token = end_token
        self._prompt_digest = prompt_digest
        self._block_size = block_size
        self._num_bytes_of = num_bytes_of
        self._checks = checks
        self._announced_tokens = first_token
        self._num_received_bytes = 0
        self._source_block_ids: set[int] = set()
        self._digests: list[bytes] = []
        self._coverages: list[Coverage] = []
        self._num_events = 0
        self._landed: list[bool] = []  # per announced block
        self._ends: list[int] = []  # of each one's bytes, in the pull
        self._num_landed = 0
        if first_token % block_size or not 0 <= first_token < end_token:
            self._fail(f"nothing to pull from token {first_token} to {end_token}")
        self.num_blocks = -(-(end_token - first_token) // block_size)
        self.local_block_ids = local_block_ids[: self.num_blocks]
        if len(set(self.local_block_ids)) != self.num_blocks:
            self._fail(f"{self.num_blocks} blocks needed, {len(set(local_block_ids))} given")

    @property
    def num_bytes(self) -> int:
        """Of all that was announced."""
        return self._ends[-1] if self._ends else 0

    @property
    def num_unlanded_blocks(self) -> int:
        """Announced, not landed."""
        return len(self._landed) - self._num_landed

    def begin(self, quarantined: Set[int]) -> bool:
        """Whether the source may be asked now: once none of its local blocks is quarantined.

        Ask again whenever a read has ended.
        """
        self._expect(PullEvent.BEGIN)
        if not quarantined.isdisjoint(self.local_block_ids):
            return False
        self._move(PullEvent.BEGIN)
        return True

    def numbered(self, number: int) -> None:
        """The next event of the stream, of whatever kind, says it is the ``number``-th."""
        self._num_events += 1
        if number != self._num_events:
            self._fail(f"event {number} of the stream came in place of {self._num_events}")

    def opened(self, opened: kv_source_pb2.FetchOpened) -> None:
        """The source admitted us; it says of which sequence."""
        self._expect(PullEvent.OPENED)
        if opened.end_token != self._end_token:
            self._fail(f"the source has {opened.end_token} tokens, expected {self._end_token}")
        if opened.prompt_digest != self._prompt_digest:
            self._fail("the lease is another sequence's")
        self._move(PullEvent.OPENED)

    def announced(self, announced: kv_source_pb2.Range) -> list[PlannedRead]:
        """The next range became readable. Blocks of which nothing is needed lie there already."""
        self._expect(PullEvent.RANGE)
        self._check_range(announced)
        first_place = announced.first_token // self._block_size
        num_blocks = len(announced.block_ids)
        num_bytes = [self._num_bytes_of(first_place + index) for index in range(num_blocks)]
        if self._checks.each_block:
            self._digests += announced.digests
            self._coverages += coverages(num_bytes, announced.sample_seed, first_place)
        first_block = len(self._landed)
        self._landed += [False] * num_blocks
        for each in num_bytes:
            self._ends.append(self.num_bytes + each)
        self._announced_tokens += announced.num_tokens
        planned = []
        for size, run in groupby(enumerate(announced.block_ids), lambda each: num_bytes[each[0]]):
            indices, source_ids = zip(*run, strict=True)
            begin = first_block + indices[0]
            blocks = slice(begin, begin + len(indices))
            if size:
                local_ids, to_digest = self.local_block_ids[blocks], self._coverages[blocks]
                planned.append(PlannedRead(begin, source_ids, local_ids, size, tuple(to_digest)))
            else:
                nothing = tuple(block_digest(b"") for _ in self._coverages[blocks])
                confirm = self.landed(begin, len(indices), nothing)
                assert confirm is None, "a sequence needs nothing of its last block"
        return planned

    def received(self, data: kv_source_pb2.Data) -> PlannedWrite:
        """inline: the next bytes came."""
        self._expect(PullEvent.DATA)
        begin, end = data.offset, data.offset + len(data.payload)
        if begin != self._num_received_bytes or not data.payload:
            self._fail(f"bytes {begin} to {end} came after {self._num_received_bytes}")
        if end > self.num_bytes:
            self._fail(f"bytes up to {end} came, {len(self._landed)} blocks were announced")
        self._num_received_bytes = end
        first_block, past_whole = bisect_right(self._ends, begin), bisect_right(self._ends, end)
        past_block = bisect_left(self._ends, end) + 1
        before = self._ends[first_block - 1] if first_block else 0
        num_bytes = self._ends[first_block] - before
        if self._ends[past_block - 1] != before + num_bytes * (past_block - first_block):
            self._fail(f"bytes {begin} to {end} came of blocks that need more and that need less")
        return PlannedWrite(
            first_block=first_block,
            local_block_ids=self.local_block_ids[first_block:past_block],
            offset=begin - before,
            num_bytes=num_bytes,
            num_completed=past_whole - first_block,
            to_digest=tuple(self._coverages[first_block:past_whole]),
        )

    def staged(self, staged: kv_source_pb2.Staged) -> PlannedRead:
        """The next blocks lie in staging blocks of the source."""
        self._expect(PullEvent.DATA)
        begin, num_slots = staged.offset, len(staged.slots)
        if begin != self._num_received_bytes or not num_slots:
            self._fail(f"{num_slots} blocks were staged at {begin}, not {self._num_received_bytes}")
        first_block = bisect_right(self._ends, begin)
        past_block = first_block + num_slots
        if past_block > len(self._ends):
            self._fail(f"{past_block} blocks were staged, {len(self._ends)} were announced")
        num_bytes = self._ends[first_block] - begin
        end = self._num_received_bytes = self._ends[past_block - 1]
        if end != begin + num_bytes * num_slots:
            self._fail(f"blocks that need more and that need less were staged at {begin}")
        blocks = slice(first_block, past_block)
        return PlannedRead(
            first_block=first_block,
            source_block_ids=tuple(staged.slots),
            local_block_ids=self.local_block_ids[blocks],
            num_bytes=num_bytes,
            to_digest=tuple(self._coverages[blocks]),
        )

    def landed(
        self, first_block: int, num_blocks: int, digests: tuple[bytes, ...]
    ) -> kv_source_pb2.Confirm | None:
        """Consecutive blocks lie whole in local memory; ``digests`` are theirs, where checked.

        Returns the question to ask the source once everything landed.
        """
        self._expect(PullEvent.LAND)
        past_block = first_block + num_blocks
        if past_block > len(self._landed) or any(self._landed[first_block:past_block]):
            self._fail(f"blocks {first_block} to {past_block} landed unasked")
        if self._checks.each_block and list(digests) != self._digests[first_block:past_block]:
            self._fail(f"the digests of blocks {first_block} to {past_block} differ")
        self._landed[first_block:past_block] = [True] * num_blocks
        self._num_landed += num_blocks
        if self._num_landed < self.num_blocks:
            return None
        self._move(PullEvent.LAND_LAST)
        return kv_source_pb2.Confirm(
            num_tokens=self._end_token - self._first_token,
            digest=combined_digest(self._digests) if self._checks.in_confirm else b"",
        )

    def confirmed(self) -> None:
        """The source confirmed."""
        self._expect(PullEvent.CONFIRMED)
        self._move(PullEvent.CONFIRMED)

    def failed(self) -> None:
        """The shell gave up (cancel, lost source, timer). Idempotent; PROVEN stays."""
        self._move(PullEvent.FAIL)

    def _check_range(self, announced: kv_source_pb2.Range) -> None:
        """Whether it is the next one, and says all that it has to."""
        first, end = announced.first_token, announced.first_token + announced.num_tokens
        if first != self._announced_tokens or announced.num_tokens < 1 or end > self._end_token:
            self._fail(f"announced {first} to {end} after {self._announced_tokens}")
        if announced.last != (end == self._end_token) or (
            end % self._block_size and not announced.last
        ):
            self._fail(f"announced {first} to {end} of {self._end_token}, last={announced.last}")
        num_blocks = -(-announced.num_tokens // self._block_size)
        num_named = len(announced.block_ids)
        if num_named != num_blocks or len(announced.generations) != num_blocks:
            self._fail(f"{num_blocks} blocks announced, {num_named} named")
        digests = announced.digests
        if self._checks.each_block and (
            len(digests) != num_blocks or any(len(digest) != DIGEST_BYTES for digest in digests)
        ):
            self._fail("announced without a digest of each block")
        known = len(self._source_block_ids)
        self._source_block_ids.update(announced.block_ids)
        if len(self._source_block_ids) != known + num_blocks:
            self._fail("a block was announced twice")

    def _expect(self, event: PullEvent) -> None:
        if not PULL_TRANSITIONS.allows(self.state, event):
            self._fail(f"{event.name} while {self.state.name}")

    def _fail(self, message: str) -> NoReturn:
        self.failed()
        raise PullError(decode_pb2.PULL_FAILURE_UNPROVEN, message)

    def _move(self, event: PullEvent) -> None:
        self.state = PULL_TRANSITIONS.after(self.state, event) or self.state

"""Workers, as placement sees them. Plain data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

from diptych.block_needs import NOTHING_SHIPPED, ShippedBytes
from diptych.paced import Paced
from diptych.step_model import StepModel, StepWork
from router.placement.claim import Asked
from router.placement.own_sequences import NO_SHARES, Shares
from router.placement.place import NOWHERE, Place
from router.placement.promises import NOTHING_PROMISED, Promised

_LEAST_PLACES: Final = 16  # of a decode worker that keeps the last for whoever has little


class WorkerId(NamedTuple):
    """One worker process; a restart at the same address is another."""

    address: str
    incarnation: str


class Pair(NamedTuple):
    """A prefill and a decode worker, by incarnation."""

    prefill: str
    decode: str


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What a worker says of its engine, and what was sent there since: to look ahead.

    What follows from that is worked out once: many requests are weighed by one view.
    """

    model: StepModel
    max_batched_tokens: int  # of one step; 0: it does not say
    work: StepWork  # that it has; a token for each sequence that decodes
    paced: tuple[Paced, ...] | None = None  # who can lose the least; None: it does not say
    num_departed_tokens: int = 0  # of this router's prompts, sent since; they are pending, too
    num_computed_tokens: int = 0  # of this router's prompts that it had then, and has no more
    num_ended_rows: int = 0  # of this router's sequences that decoded then, and have ended
    prefill_age_s: float | None = None  # for how long it was at them when it told; see Watch
    heard_s: float = 0.0  # when it told, by our clock
    prefill_time_ratio: float = 0.0  # what prompts took of its time of late

    @cached_property
    def decoding(self) -> StepWork:
        """What decoded when it told, and does still."""
        num, num_told = self.work.num_decode_rows, self.work.num_decode_rows
        if self.num_ended_rows:
            num = max(0, num_told - self.num_ended_rows)
        return StepWork(num, self.work.num_context_tokens * num // (num_told or 1))

    @property
    def knows_decode(self) -> bool:
        """Whether its steps without prompts are known."""
        return self.model.decode.is_known

    @property
    def knows_prefill(self) -> bool:
        """Whether its steps with parts of prompts are."""
        return self.model.prefill.is_known

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Of one step, beside what decodes."""
        return max(1, self.max_batched_tokens - self.decoding.num_decode_rows)

    @cached_property
    def prompt_step_s(self) -> float:
        """Of a step with parts of prompts, what it takes but for those."""
        return self.model.prefill.expected_s(self.decoding)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    """A prefill worker that is ready, as the router sees it now. Lengths in tokens."""

    worker: WorkerId
    num_pending_tokens: int  # of all prompts it has not computed yet, all routers' together
    max_model_len: int
    has_runway: bool = True  # may take more of this router's prompts
    is_open_beyond: bool = False  # without runway: to payers of whom none of ours waits there
    num_own_tokens: int = 0  # of this router's prompts that wait there
    own_payers: frozenset[bytes] = frozenset()  # whose those are
    num_available_blocks: int | None = None  # free or cached; None: it does not say
    tokens_per_s: float = 0.0  # measured; 0 until known
    place: Place = NOWHERE
    engine: EngineView | None = None  # None: it does not say

    def takes_from(self, payer: bytes) -> bool:
        """Whether it may take one more prompt of that payer's."""
        return self.has_runway or (self.is_open_beyond and payer not in self.own_payers)

    def num_passed_by(self, payer: bytes) -> int:
        """Tokens of our prompts there that come behind that payer's next one, by their turns.

        0 where one of its own waits there already. Of the others the first goes on.
        """
        return 0 if payer in self.own_payers else self.num_own_tokens

    @property
    def num_obtainable_blocks(self) -> int | None:
        """Available: as long as some worker has enough, nobody leaves for prompts of others.

        None: it does not say.
        """
        return self.num_available_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """A decode worker that is ready, as the router sees it now. Lengths in tokens."""

    worker: WorkerId
    num_sequences: int  # all routers' together
    own_shares: Shares = NO_SHARES  # of this router's of these
    promised: Promised = NOTHING_PROMISED  # to those of its that the worker has not told of
    max_model_len: int
    local_prefill: bool  # may compute prompts itself
    proven: frozenset[str]  # incarnations of the prefill workers it can pull from
    unreadable: frozenset[str] = frozenset()  # of those that it tried to pull from in vain
    max_num_seqs: int | None = None  # that run at a time; None: it does not say
    num_pending_tokens: int = 0  # of prompts it has not computed yet, sent since included
    num_available_blocks: int | None = None  # free or cached; None: it does not say
    num_blocks: int = 0  # in all
    num_giving_way: int = 0  # of its sequences, as it last said: they leave for ones of no batch
    num_giving_way_blocks: int = 0  # that those hold
    step_s: float = 0.0  # measured; 0 until known
    prefill_time_ratio: float = 0.0  # of a worker of both roles: what prompts take of its time
    shipped: ShippedBytes = NOTHING_SHIPPED  # what it pulls; nothing: it does not say
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)  # of proven pairs; 0: unknown
    place: Place = NOWHERE
    engine: EngineView | None = None  # None: it does not say

    @property
    def has_room(self) -> bool:
        """Whether one sequence more could run, whosever it is.

        In the place of one that gives way if need be. The last place is not for a payer that has
        more than half of them, where another has little.
        """
        num_places = self._num_places
        return num_places is None or num_places > self._keeps_last

    @property
    def has_last_place(self) -> bool:
        """Whether one sequence more could run, but perhaps not everybody's."""
        return self._num_places is None or self._num_places > 0

    def takes_from(self, payer: bytes) -> bool:
        """Whether it may take one more sequence of that payer's."""
        return self.has_room or (self.has_last_place and payer != self.own_shares.main)

    @property
    def has_free_place(self) -> bool:
        """Whether one sequence more could run, nobody leaving for it."""
        return self.max_num_seqs is None or self.num_sequences < self.max_num_seqs

    @property
    def num_obtainable_blocks(self) -> int | None:
        """Available, or left by who gives way; None: it does not say."""
        if self.num_available_blocks is None:
            return None
        return self.num_available_blocks + self.num_giving_way_blocks

    @property
    def _num_places(self) -> int | None:
        """That nobody has who stays; None: it does not say."""
        if self.max_num_seqs is None:
            return None
        return self.max_num_seqs - self.num_sequences + self.num_giving_way

    @property
    def _keeps_last(self) -> bool:
        shares, most = self.own_shares, self.max_num_seqs or 0
        return most >= _LEAST_PLACES and shares.has_little and 2 * shares.num_main > most


@dataclass(frozen=True)
class Snapshot:
    """Every placeable worker at one moment.

    What follows from that is worked out once: many requests are weighed by one snapshot.
    """

    prefill: tuple[PrefillView, ...] = ()
    decode: tuple[DecodeView, ...] = ()
    has_prefill_pool: bool = True  # there shall be prefill workers, whether or not one is ready

    @cached_property
    def has_prefill(self) -> bool:
        """Whether some prefill worker is of use to a decode worker, or may soon be: it is not so
        that no pair could be proven, as where all settings of the pools differ.
        """
        if not self.decode:
            return bool(self.prefill)
        return any(
            source.worker.incarnation not in view.unreadable
            for view in self.decode
            for source in self.prefill
        )

    @cached_property
    def each_alone(self) -> "Snapshot":
        """Those that decode, as if each were by itself: it goes on with no more prompts than its
        own.
        """
        alone = (
            replace(view, prefill_time_ratio=0.0) if view.prefill_time_ratio else view
            for view in self.decode
        )
        return replace(self, prefill=(), decode=tuple(alone))

    def has_room_for(self, those: Iterable[Asked]) -> bool:
        """Whether one of them could be placed; if not, there is no use in asking.

        Without a decode worker, one that wants a single token. Where there are some and all
        are full, that one waits with the others.
        """
        if self._has_open_pair:
            return True
        prefill = [view for view in self.prefill if view.has_runway or view.is_open_beyond]
        decode = [view for view in self.decode if view.has_last_place]
        if self.decode and not decode:
            return False
        if not prefill and self.has_prefill:
            those = (asked for asked in those if asked.may_be_local)
        return any(self._is_taken(asked, prefill, decode) for asked in those)

    def _is_taken(
        self, asked: Asked, prefill: Sequence[PrefillView], decode: Sequence[DecodeView]
    ) -> bool:
        """Whether some of these take it."""
        near = [view for view in decode if view.takes_from(asked.payer)]
        if self.decode and not near:
            return False
        if any(view.takes_from(asked.payer) for view in prefill):
            return True
        may_be_local = asked.may_be_local or not self.has_prefill
        return may_be_local and any(view.local_prefill for view in near)

    @cached_property
    def _has_open_pair(self) -> bool:
        """Whether one whose prompt a prefill worker computes is taken, whosever it is."""
        if not any(view.has_runway for view in self.prefill):
            return False
        return not self.decode or any(view.has_room for view in self.decode)

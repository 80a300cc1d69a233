"""What placement is asked, what it knows, and what it answers. Plain data and one seam."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Protocol

from diptych.block_needs import NOTHING_SHIPPED, ShippedBytes
from diptych.paced import Paced
from diptych.step_model import StepModel, StepWork
from router.placement.cache_index import CacheIndex
from router.placement.claim import Asked
from router.placement.explanation import Explanation
from router.placement.output_lengths import UNKNOWN_TOKENS
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
        """Available: nobody leaves prompts to others. None: it does not say."""
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every placeable worker at one moment."""

    prefill: tuple[PrefillView, ...] = ()
    decode: tuple[DecodeView, ...] = ()
    has_prefill_pool: bool = True  # there shall be prefill workers, whether or not one is ready

    @property
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

    @property
    def _has_open_pair(self) -> bool:
        """Whether one whose prompt a prefill worker computes is taken, whosever it is."""
        if not any(view.has_runway for view in self.prefill):
            return False
        return not self.decode or any(view.has_room for view in self.decode)


class Objectives(NamedTuple):
    """What a request shall have, s; None: no matter."""

    ttft_s: float | None = None  # from now until its first token; not positive: it is too late
    tpot_s: float | None = None  # between two tokens, on average
    whole_ttft_s: float | None = None  # what the first was when it came; None: the same
    has_deadline_first: bool = (
        False  # the first is all the time that there is, and was not asked for
    )

    def kept_by(self, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether both are; ``tpot_s`` None: it had one token."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s

    @property
    def are_asked_for(self) -> bool:
        """Whether there is any, beside the time that there is for the whole answer."""
        return self.tpot_s is not None or (self.ttft_s is not None and not self.has_deadline_first)


NO_OBJECTIVES: Final = Objectives()


class Seen(NamedTuple):
    """A request that ended. Moments are of one clock, s."""

    came_s: float
    ended_s: float
    num_prompt_tokens: int  # that were to be computed
    objectives: Objectives = NO_OBJECTIVES  # as when it came
    ttft_s: float | None = None  # None: it had no answer
    tpot_s: float | None = None  # None: it had one token, or none

    @property
    def is_kept(self) -> bool:
        """Whether it had what it wanted."""
        return self.ttft_s is not None and self.objectives.kept_by(self.ttft_s, self.tpot_s)

    @property
    def num_missed(self) -> int:
        """Objectives, of one that had an answer."""
        had, wanted = (self.ttft_s, self.tpot_s), self.objectives[:2]
        pairs = zip(had, wanted, strict=True)
        return sum(its is not None and goal is not None and its > goal for its, goal in pairs)


class Query(NamedTuple):
    """One request that needs workers.

    ``failed`` workers and pairs broke something for this request, ``refused`` ones
    only said no; neither is used. ``on_prefill`` or ``on_decode`` fix one worker that
    is already held; ``num_cached_on_decode`` is what the held reservation said that it
    has cached, and None before it has.
    """

    num_tokens: int  # prompt and what was emitted
    num_max_tokens: int  # the longest the sequence may become
    block_keys: tuple[bytes, ...] = ()  # of the prompt's whole blocks
    block_size: int = 16
    failed: frozenset[str] = frozenset()
    failed_pairs: frozenset[Pair] = frozenset()
    refused: frozenset[str] = frozenset()
    on_prefill: WorkerId | None = None
    on_decode: WorkerId | None = None
    num_cached_on_decode: int | None = None
    beside: WorkerId | None = None  # runs another choice of the same prompt, whose blocks it has
    needs_prefill: bool = False  # a prefill worker has to compute the prompt: no other tells of it
    objectives: Objectives = NO_OBJECTIVES
    num_output_tokens: int = UNKNOWN_TOKENS  # that are still to come, by expectation
    payer: bytes = b""  # by which workers know whose turn it is
    is_batch: bool = False  # nobody leaves for it
    takes_spare_only: bool = False  # and it takes no room that others may want at any moment
    may_refuse: bool = False  # rather no placement than one that is foretold to miss objectives
    as_if_room: bool = False  # as if every worker took one more, with queues as long as now
    now_s: float = 0.0  # by the clock of the views

    def on(self, decode: WorkerId, num_cached_tokens: int | None) -> "Query":
        """The same with a reservation that is held already."""
        return self._replace(on_decode=decode, num_cached_on_decode=num_cached_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """That are still to come, by expectation and within what there may be; one at the least."""
        return max(1, min(self.num_output_tokens, self.num_max_tokens - self.num_tokens))

    @property
    def is_fresh(self) -> bool:
        """Nothing is held, and nothing broke."""
        held = self.on_prefill is not None or self.on_decode is not None
        return not (held or self.failed or self.failed_pairs)

    @property
    def prefill_alone(self) -> bool:
        """No token is left for a decode worker: prefill samples the only one."""
        return self.num_max_tokens - self.num_tokens <= 1


class Why(enum.Enum):
    """Why a decode worker computes the KV itself."""

    CHOICE = "choice"  # shipping would cost more than it saves, or there is no prefill pool
    NO_PREFILL = "no_prefill"  # none is alive, or of use to a decode worker
    RECOMPUTE = "recompute"  # those alive failed this request


class Outlook(NamedTuple):
    """One way to place a request, and what was predicted of it."""

    prefill: WorkerId | None  # None: the decode worker computes the prompt
    decode: WorkerId
    ttft_s: float  # from its placement on, queues included
    tpot_s: float
    num_missed: float  # objectives, by expectation: its own, and others' because of it
    seconds: float  # until its answer is whole, and the seconds by which others come later
    num_barring: float = 0.0  # of the missed, those that hold it where it may be refused
    num_own_missed: float = 0.0  # of the missed, its own
    gap_s: float = 0.0  # of a pair: between its first token and its second, the hand-off included

    def text(self) -> str:
        """One line; the workers are first."""
        workers = [self.decode.address]
        if self.prefill is not None:
            workers.insert(0, self.prefill.address)
        return (
            f"{' '.join(workers)} ttft_s={self.ttft_s:.3f} tpot_s={self.tpot_s:.4f} "
            f"missed={self.num_missed:.2f} seconds={self.seconds:.2f}"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a placement was chosen by."""

    chosen: Outlook
    candidates: tuple[Outlook, ...]  # the best, in order; the chosen one is the first
    overhead_s: float = 0.0  # of the first tokens, what was added to steps
    handoff_overhead_s: float = 0.0  # of the gaps of pairs, what was added to pull and steps
    is_probe: bool = False  # objectives looked lost, as those of many before it


@dataclass(frozen=True, slots=True)
class Paired:
    """Prefill on one worker, decode on the other, which pulls the KV.

    ``in_order``: one is asked after the other, as each could be the other's for somebody else.
    """

    prefill: WorkerId
    decode: WorkerId
    forecast: Forecast | None = field(default=None, compare=False)  # None: none was made
    in_order: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Prefill samples the only token there is to be."""

    prefill: WorkerId


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """The decode worker computes what it lacks of the KV itself."""

    decode: WorkerId
    why: Why
    num_assumed_tokens: int = 0  # that placement believed to be in the worker's prefix cache
    forecast: Forecast | None = field(default=None, compare=False)  # None: none was made


Placement = Paired | PrefillOnly | DecodeOnly


class Unreachable(NamedTuple):
    """No placement keeps a request's objectives, by what is foretold."""

    what: str  # for people: what would be missed
    retry_after_s: float | None  # when it could be otherwise, jittered; None: never


class Policy(Protocol):
    """Chooses workers. Pure: no clock, no I/O; called on the event loop."""

    @property
    def cache(self) -> CacheIndex:
        """What workers have cached, as it goes by; who hears of that tells it there."""
        ...

    def place(self, query: Query, snapshot: Snapshot) -> Placement | None:
        """The best placement there is now; None: wait."""
        ...

    def may_be_local(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether a decode worker might compute the prompt though prefill workers are there."""
        ...

    def may_come(self, query: Query, snapshot: Snapshot) -> bool:
        """Whether there would be a placement if every worker had room, whoever refused before."""
        ...

    @property
    def has_declined(self) -> bool:
        """Whether the newest ``place`` answered None for objectives alone: workers had room."""
        ...

    def foresee(self, query: Query, snapshot: Snapshot, wait_s: float) -> Unreachable | None:
        """Whether its objectives are lost if it may be placed in ``wait_s``, however long it waits.

        None: they are not, or too little is known to say so.
        """
        ...

    def came_true(self, forecast: Forecast, ttft_s: float) -> None:
        """A request that was placed by ``forecast`` had its first token after so long, s."""
        ...

    def went_on(self, forecast: Forecast, gap_s: float) -> None:
        """One whose KV moved had its second token so long after its first, s."""
        ...

    def ended_as(self, seen: Seen) -> None:
        """A request of this router ended, or was refused; not if it failed by what it is itself."""
        ...

    def explain(self, query: Query, snapshot: Snapshot, placement: Placement) -> Explanation:
        """What spoke for ``placement``, which ``place`` has just answered to the same."""
        ...

    def forget(self, worker: WorkerId) -> None:
        """``worker`` is gone, and with it what was cached there."""
        ...

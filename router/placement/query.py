"""What placement is asked, and what became of who asked. Plain data."""

from typing import Final, NamedTuple

from router.placement.output_lengths import UNKNOWN_TOKENS
from router.placement.views import Pair, WorkerId


class Objectives(NamedTuple):
    """What a request shall have, s; None: no matter."""

    ttft_s: float | None = None  # from now until its first token; not positive: it is too late
    tpot_s: float | None = None  # between two tokens, on average
    whole_ttft_s: float | None = None  # what the first was when it came; None: the same
    has_deadline_first: bool = False  # the first is all the time there is ...
    asks_first_too: bool = False  # ... and more was asked for; else nothing was

    def kept_by(self, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether both are; ``tpot_s`` None: it had one token."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s

    @property
    def are_asked_for(self) -> bool:
        """Whether there is any, beside the time that there is for the whole answer."""
        return self.tpot_s is not None or self.is_first_asked_for

    @property
    def is_first_asked_for(self) -> bool:
        """Whether a first token is, and not only all of the answer."""
        is_deadline_alone = self.has_deadline_first and not self.asks_first_too
        return self.ttft_s is not None and not is_deadline_alone


NO_OBJECTIVES: Final = Objectives()


class EndedRequest(NamedTuple):
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

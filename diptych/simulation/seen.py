"""What the router sees of each simulated worker: what it told last, and the router's own. Pure.

The rules are those of :mod:`router.cluster.member`, from which the real router's views come:
load is what the worker told less the router's own then, plus its own now.
"""

from collections.abc import Callable

from diptych.block_needs import ShippedBytes
from diptych.paced import Paced, tightest
from diptych.simulation.engine import SimulatedEngine
from diptych.step_model import StepWork
from router.placement.decode_load import DecodeLoad
from router.placement.forecast import computes_none_s
from router.placement.prefill_load import NO_PROMPTS, OwnPrompts, PrefillLoad
from router.placement.promises import Promise
from router.placement.runway import Runway
from router.placement.takes import PrefillTakes, decode_takes, is_more
from router.placement.views import DecodeView, EngineView, PrefillView, WorkerId


class Told:
    """What a worker told on Watch when it was last asked to."""

    def __init__(self, engine: SimulatedEngine) -> None:
        """As of now."""
        work, counts = engine.load(), engine.pool.counts()
        self.work: StepWork = work
        paced, decodes = engine.paced(), work.without_prompts
        token_s = engine.told_model.decode.expected_s(decodes)
        self.paced = tuple(tightest(paced, token_s))
        self.num_available_blocks = counts.free + counts.cached
        self.num_blocks = engine.pool.num_blocks
        scheduler = engine.scheduler
        self.num_sequences = scheduler.num_running + scheduler.num_waiting + scheduler.num_reserved
        self.giving_way = engine.scheduler.giving_way()
        self.tokens_per_s, self.step_s = engine.prefill_tokens_per_s, engine.decode_step_s
        self.prefill_time_ratio = engine.prefill_time_ratio
        self.prefill_age_s, self.at_s = engine.prefill_age_s, engine.now_s
        self.model = engine.told_model
        self.max_batched_tokens = engine.limits.max_batched_tokens
        self.max_num_seqs = engine.limits.max_num_seqs
        self.max_model_len = engine.limits.max_model_len
        self.local_prefill = engine.limits.local_prefill

    def engine_view(
        self,
        num_departed_tokens: int,
        num_computed_tokens: int = 0,
        paced: tuple[Paced, ...] | None = None,
        num_ended_rows: int = 0,
    ) -> EngineView:
        """With what the router sent since, and what it heard of that is done."""
        return EngineView(
            model=self.model,
            max_batched_tokens=self.max_batched_tokens,
            work=self.work,
            paced=paced,
            num_departed_tokens=num_departed_tokens,
            num_computed_tokens=num_computed_tokens,
            num_ended_rows=num_ended_rows,
            prefill_age_s=self.prefill_age_s,
            heard_s=self.at_s,
            prefill_time_ratio=self.prefill_time_ratio,
        )


class PrefillSeen:
    """A prefill worker. ``on_change`` is told of each new view, and whether it may take more."""

    def __init__(
        self, worker: WorkerId, told: Told, runway: Runway, on_change: Callable[[bool], None]
    ) -> None:
        self._worker = worker
        self._on_change = on_change
        self.beside: DecodeSeen | None = None  # the same worker, as one that decodes
        self._load = PrefillLoad(runway)
        self._told = told
        self._load.told(told.work.num_prefill_tokens, told.tokens_per_s, NO_PROMPTS)

    def told(self, told: Told, own: OwnPrompts) -> None:
        """The worker said how it is; what of ours is there."""
        took = self._takes
        self._told = told
        self._load.told(
            told.work.num_prefill_tokens,
            told.tokens_per_s,
            own,
            computes_none_s(told.engine_view(0)),
        )
        self._on_change(is_more(self._takes, took))

    def loaded(self, own: OwnPrompts, now_s: float) -> None:
        """So much of ours waits there now."""
        took = self._takes
        self._load.loaded(own, now_s - self._told.at_s)
        self._on_change(is_more(self._takes, took))

    @property
    def num_own_tokens(self) -> int:
        """Of the router's prompts, that wait there."""
        return self._load.own.num_tokens

    @property
    def num_sent_tokens(self) -> int:
        """Of prompts of ours, since the worker told how it is."""
        return self._load.own.num_sent_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Of ours that it had when it told, those that it has no more."""
        return self._load.num_computed_tokens

    @property
    def _takes(self) -> PrefillTakes:
        return self._load.takes(self._num_beside_tokens)

    @property
    def _num_beside_tokens(self) -> int:
        return 0 if self.beside is None else self.beside.num_sent_tokens

    def view(self) -> PrefillView:
        """As of now."""
        load, takes, num_beside = self._load, self._takes, self._num_beside_tokens
        num_sent = load.own.num_sent_tokens + num_beside
        return PrefillView(
            worker=self._worker,
            num_pending_tokens=load.num_pending_tokens + num_beside,
            max_model_len=self._told.max_model_len,
            has_runway=takes.has_runway,
            is_open_beyond=takes.is_open_beyond,
            num_own_tokens=load.own.num_tokens,
            own_payers=load.own.payers,
            num_available_blocks=self._told.num_available_blocks,
            tokens_per_s=self._told.tokens_per_s,
            engine=self._told.engine_view(
                num_sent,
                load.num_computed_tokens,
                num_ended_rows=0 if self.beside is None else self.beside.num_ended_rows,
            ),
        )


class DecodeSeen:
    """A decode worker. ``on_change`` is told of each new view, and whether it may take more."""

    def __init__(
        self,
        worker: WorkerId,
        told: Told,
        sources: dict[str, float],
        shipped: ShippedBytes,
        on_change: Callable[[bool], None],
        owner: str,
    ) -> None:
        """``sources``: from which prefill workers it can pull, by incarnation, and how fast.
        ``owner``: the router, as the worker calls it.
        """
        self._worker = worker
        self._told = told
        self._sources, self._proven = sources, frozenset(sources)
        self._shipped = shipped
        self._on_change = on_change
        self.beside: PrefillSeen | None = None  # the same worker, as one that computes prompts
        self._load = DecodeLoad(owner)

    def told(self, told: Told) -> None:
        """The worker said how it is."""
        took = decode_takes(self.view())
        self._told = told
        self._load.told(told.num_sequences, told.paced, told.at_s)
        self._on_change(is_more(decode_takes(self.view()), took))

    def asked(self, number: int, payer: bytes | None, num_tokens: int, promise: Promise) -> None:
        """One sequence of ours more; it computes so many tokens of a prompt itself."""
        self._load.asked(number, payer, promise, num_tokens)
        self._on_change(False)

    def reserved(self, number: int, num_cached_tokens: int) -> None:
        """One of ours has its blocks, and so many tokens of its prompt in them already."""
        if self._load.reserved(number, num_cached_tokens):
            self._on_change(False)

    def started(self, number: int, now_s: float) -> None:
        """One of ours is to run."""
        self._load.started(number, now_s)

    def drew_first(self, number: int) -> None:
        """One of ours has its first token from there."""
        if self._load.drew(number):
            self._on_change(False)

    def ended(self, number: int) -> None:
        """One of ours is over."""
        took = decode_takes(self.view())
        self._load.over(number)
        self._on_change(is_more(decode_takes(self.view()), took))

    @property
    def num_ended_rows(self) -> int:
        """Of ours, that decoded when the worker told."""
        return self._load.num_ended_rows

    @property
    def num_own_sequences(self) -> int:
        """Of the router, on this worker."""
        return self._load.num_own

    @property
    def num_sent_tokens(self) -> int:
        """Of prompts of ours that it computes itself, since the worker told how it is."""
        return self._load.num_sent_tokens

    def view(self) -> DecodeView:
        """As of now."""
        told, load, beside = self._told, self._load, self.beside
        num_sent = self.num_sent_tokens + (0 if beside is None else beside.num_sent_tokens)
        num_computed = 0 if beside is None else beside.num_computed_tokens
        return DecodeView(
            worker=self._worker,
            num_sequences=load.num_sequences,
            max_model_len=told.max_model_len,
            local_prefill=told.local_prefill,
            proven=self._proven,
            max_num_seqs=told.max_num_seqs,
            own_shares=load.shares,
            promised=load.promised,
            num_pending_tokens=told.work.num_prefill_tokens + num_sent,
            num_available_blocks=told.num_available_blocks,
            num_blocks=told.num_blocks,
            num_giving_way=told.giving_way.num,
            num_giving_way_blocks=told.giving_way.num_blocks,
            step_s=told.step_s,
            prefill_time_ratio=0.0 if beside is None else told.prefill_time_ratio,
            shipped=self._shipped,
            bytes_per_s=self._sources,
            engine=told.engine_view(
                num_sent,
                num_computed,
                load.paced,
                load.num_ended_rows,
            ),
        )

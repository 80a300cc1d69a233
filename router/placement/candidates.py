"""Every placement that a request may have, and what each would cost everybody. Pure."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from diptych.step_model import StepWork
from router.placement.eligible import is_pair, usable
from router.placement.forecast import (
    DecodeForecast,
    PrefillForecast,
    Span,
    exposed_s,
    lasting_prompts_ratio,
    of_decode,
    of_prefill,
    of_prompts,
)
from router.placement.glance import (
    looks_apart_s,
    looks_to_wait_s,
    taken_alike,
    tells_decode,
    tells_prefill,
)
from router.placement.least_loaded import LeastLoaded
from router.placement.loss import (
    Bystanders,
    Consequences,
    Toll,
    handoff_waits,
    least_slow_ratio,
    num_kept_out,
    slow_ratio,
)
from router.placement.parting import Parting, Parts
from router.placement.placement import Outlook
from router.placement.query import Query
from router.placement.shortlist import near, partnered, soonest
from router.placement.told_paces import ToldPaces, told_paces
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId
from router.placement.weighed import (
    PER_OBJECTIVE,
    Beside,
    Candidate,
    Decoder,
    Least,
    Loss,
    Source,
    Target,
    Weighed,
)

_ASTRAY = 0.3  # objectives: a worker of both roles does what is not its part


class Overheads(NamedTuple):
    """What things take beside steps, as learned. Seconds."""

    first_token_s: float
    handoff_s: float  # and beside its pull


def weigh(
    query: Query,
    snapshot: Snapshot,
    plain: LeastLoaded,
    parting: Parting,
    overheads: Overheads,
) -> Weighed | None:
    """Every candidate with its loss; None while a pool's steps are not known.

    Every pair of a prefill and a decode worker is one, and each decode worker that may compute
    prompts by itself. ``plain`` knows what prefixes are cached where; workers of both roles stay
    parted by ``parting``, or part anew.
    """
    whole = None if query.needs_prefill else parting.together(snapshot)
    snapshot = snapshot if whole is None else whole
    may_prefill, may_decode = usable(query, snapshot)
    prefills = taken_alike(may_prefill, "prefill")
    decodes = taken_alike(may_decode, "decode")
    if not prefills:  # who decodes computes all prompts, and learns by nothing else
        decodes = taken_alike(decodes, "prefill")
    if not (all(map(tells_prefill, prefills)) and all(map(tells_decode, decodes))):
        return None
    parts = parting.parts(snapshot)
    if whole is not None or not any(view.worker in parts.decoding for view in decodes):
        parts = Parts()  # nobody is there to decode for those who compute
    candidates = _Candidates(query, plain, parting, parts, overheads)
    return candidates.weighed(snapshot, prefills, decodes)


def prompt_work(query: Query, num_missing: int) -> StepWork:
    """What a worker that misses so many tokens would have to compute; the last one at the least."""
    num_cached = query.num_tokens - num_missing
    return StepWork.of_prompt(query.num_tokens, min(num_cached, query.num_tokens - 1))


class _Candidates:
    """Those of one request, where workers have these ``parts``."""

    def __init__(
        self,
        query: Query,
        plain: LeastLoaded,
        parting: Parting,
        parts: Parts,
        overheads: Overheads,
    ) -> None:
        self._query = query
        self._plain = plain
        self._parting = parting
        self._parts = parts
        self._overheads = overheads
        self._ttft_s, self._tpot_s = query.objectives[:2]
        self._num_output = query.num_answer_tokens
        self._missing: dict[WorkerId, int] = {}
        self._prompts: dict[int, StepWork] = {}  # by how much is missing
        self._told: dict[WorkerId, ToldPaces] = {}  # of those that would decode
        self._decoding: dict[WorkerId, DecodeView] = {}  # all
        self._besides: dict[WorkerId, Beside] = {}
        self._whole: dict[WorkerId, Candidate] = {}  # that do both

    def weighed(
        self, snapshot: Snapshot, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Weighed:
        query, parts = self._query, self._parts
        may_be_local = not query.needs_prefill and any(view.local_prefill for view in decodes)
        if not decodes or not (prefills or may_be_local):
            return Weighed((), (), self._look, self._beside)  # as long as all are full, many ask
        holders = self._plain.holders(query)
        near_p, near_d = partnered(
            near(prefills, holders, parts.decoding, looks_to_wait_s, self._num_missing),
            near(decodes, holders, parts.computing, looks_apart_s, self._num_missing),
            partial(is_pair, query),
        )
        computed = [
            (view, of_prefill(view, self._prompt(view.worker), query.now_s, num_passed))
            for view in near_p
            for num_passed in (view.num_passed_by(query.payer),)
        ]
        decoded = [(view, self._of_decode(view)) for view in near_d]
        known = [(view, forecast) for view, forecast in computed if forecast is not None]
        paces = [(view, forecast) for view, forecast in decoded if forecast is not None]
        few_p, few_d = partnered(
            soonest(known, parts.decoding, lambda each: each.first_token.expected_s),
            soonest(paces, parts.computing, lambda each: each.after.expected_s),
            lambda source, target: is_pair(query, source[0], target[0]),
        )
        decoders = [self._decoder(view, pace) for view, pace in few_d]
        self._told = {decoder.view.worker: decoder.told for decoder in decoders}
        self._decoding = {view.worker: view for view in snapshot.decode}
        targets = [self._target(each, is_paired=bool(few_p)) for each in decoders]
        sources = [self._source(view, computed, targets) for view, computed in few_p]
        paired = [source for source in sources if source.targets]
        return Weighed(targets, paired, self._look, self._beside)

    def _source(
        self, view: PrefillView, computed: PrefillForecast, targets: Sequence[Target]
    ) -> Source:
        """For those of the ``targets`` that can pull from it."""
        query, worker = self._query, view.worker
        first = computed.first_token.later(self._overheads.first_token_s)
        return Source(
            view,
            self._prompt(worker).num_prefill_tokens,
            computed,
            first,
            self._late_ratio(first),
            [target for target in targets if is_pair(query, view, target.decoder.view)],
            self._plain.rank(worker),
        )

    def _beside(self, source: Source) -> Beside:
        """Worked out once."""
        worker = source.view.worker
        beside = self._besides.get(worker)
        if beside is None:
            view = self._decoding.get(worker)
            beside = Beside() if view is None else self._beside_decoding(view, source.computed)
            self._besides[worker] = beside
        return beside

    def _beside_decoding(self, view: DecodeView, computed: PrefillForecast) -> Beside:
        """What the prompt that is ``computed`` there for another costs those of that view."""
        num_tokens = self._query.num_tokens
        running = of_decode(view, num_tokens)
        if running is None:
            return Beside()
        stalled_s = computed.stall_s(running.before.expected_s)
        there = running._replace(after=running.before)
        told = self._told.get(view.worker) or told_paces(view, running, num_tokens)
        told = told.beside_elsewhere(computed)
        toll = self._toll(Bystanders(there, stalled_s, view.promised, told))
        is_astray = running.num_rows and view.worker in self._parts.decoding
        return Beside(toll, _ASTRAY * bool(is_astray))

    def _decoder(self, view: DecodeView, pace: DecodeForecast) -> Decoder:
        is_astray = view.worker in self._parts.computing
        num_kept_out = self._num_kept_out(view, pace) if is_astray else 0.0
        told = told_paces(view, pace, self._query.num_tokens)
        return Decoder(view, pace, told, num_kept_out, self._plain.rank(view.worker))

    def _target(self, decoder: Decoder, *, is_paired: bool) -> Target:
        view, pace = decoder.view, decoder.pace
        may_be_alone = view.local_prefill and not self._query.needs_prefill and tells_prefill(view)
        if not is_paired:
            return Target(decoder, may_be_alone)
        toll = self._toll(Bystanders(pace, 0.0, view.promised, decoder.told))
        against = _ASTRAY * (view.worker in self._parts.computing)
        num_lost = toll.missed.num_all + against + decoder.num_kept_out
        num_lost += least_slow_ratio(pace.after, self._tpot_s)
        return Target(
            decoder,
            may_be_alone,
            self._num_missing(view.worker),
            pace.before.expected_s if pace.num_rows else 0.0,
            of_prompts(view, self._query.now_s),
            toll,
            against,
            Least(num_lost, self._num_output * pace.after.expected_s + toll.seconds),
        )

    def _of_decode(self, view: DecodeView) -> DecodeForecast | None:
        """Its pace there; of a worker whose part is to decode as if it went on with prompts only
        where the request does not keep them out.
        """
        num_tokens = self._query.num_tokens
        lasting = lasting_prompts_ratio(view, num_tokens)
        if view.worker not in self._parts.decoding or not lasting:
            return of_decode(view, num_tokens, lasting)
        plain = of_decode(view, num_tokens, 0.0)
        if plain is None:
            return None
        ratio = lasting * (1.0 - self._num_kept_out(view, plain))
        return of_decode(view, num_tokens, ratio)

    def _num_kept_out(self, view: DecodeView, pace: DecodeForecast) -> float:
        prompt_s = self._parting.prompt_s(view)
        return num_kept_out(prompt_s, pace.after, self._tpot_s, self._num_output)

    def _look(self, source: Source | None, target: Target) -> Candidate:
        return self._alone(target.decoder) if source is None else self._pair(source, target)

    def _pair(self, source: Source, target: Target) -> Candidate:
        handoff_s = self._overheads.handoff_s
        handoff_s += exposed_s(
            source.view,
            target.decoder.view,
            target.num_missing,
            source.num_computed,
            source.computed,
        )
        waits_s = handoff_waits(source.first_token.expected_s, target.step_s, target.prompts)
        pace = target.decoder.pace.after
        slow = slow_ratio(pace, self._tpot_s, self._num_output, handoff_s, waits_s)
        wait_s = sum(waits_s) / (len(waits_s) or 1)
        beside = self._beside(source)
        tolls = (target.toll, beside.toll)
        come = Consequences(
            source.first_token, source.late_ratio, pace, slow, tolls, handoff_s, wait_s
        )
        return self._valued(target.decoder, come, beside.against + target.against, source)

    def _alone(self, decoder: Decoder) -> Candidate:
        """The decode worker computes the prompt itself. Worked out once."""
        worker = decoder.view.worker
        found = self._whole.get(worker)
        if found is None:
            found = self._whole[worker] = self._computing_alone(decoder)
        return found

    def _computing_alone(self, decoder: Decoder) -> Candidate:
        view, pace = decoder.view, decoder.pace
        computed = of_prefill(view, self._prompt(view.worker), self._query.now_s)
        assert computed is not None, "its steps with parts of prompts are known"
        first = computed.first_token.later(self._overheads.first_token_s)
        stalled_s = computed.stall_s(pace.before.expected_s)
        told = decoder.told.beside(computed)
        toll = self._toll(Bystanders(pace, stalled_s, view.promised, told))
        slow = slow_ratio(pace.after, self._tpot_s, self._num_output)
        come = Consequences(first, self._late_ratio(first), pace.after, slow, (toll,))
        # Where none decodes it keeps nobody waiting but those that come, and in a burst some do.
        is_kept = pace.num_rows or self._ttft_s is not None  # which says when it is too late
        is_astray = bool(is_kept) and view.worker in self._parts.decoding
        is_astray |= view.worker in self._parts.computing
        return self._valued(decoder, come, _ASTRAY * is_astray)

    def _valued(
        self, decoder: Decoder, come: Consequences, against: float, source: Source | None = None
    ) -> Candidate:
        """What speaks against it beside those that it concerns: ``against``, in objectives, and
        prompts that it would keep out of where they ought to be computed. Without a source the
        decoder computes the prompt itself.
        """
        missed, seconds = come.missed, come.seconds(self._num_output)
        num_lost = missed.num_all + against + decoder.num_kept_out
        rank = decoder.rank if source is None else decoder.rank + source.rank
        outlook = Outlook(
            None if source is None else source.view.worker,
            decoder.view.worker,
            come.first_token.expected_s,
            come.pace.expected_s,
            missed.num_all,
            seconds,
            missed.num_barring + decoder.num_kept_out,
            missed.num_own,
            0.0 if source is None else come.gap_s,
        )
        return Loss(round(num_lost * PER_OBJECTIVE), seconds, rank), outlook

    def _late_ratio(self, first_token: Span) -> float:
        return 0.0 if self._ttft_s is None else first_token.miss_ratio(self._ttft_s)

    def _toll(self, bystanders: Bystanders) -> Toll:
        return bystanders.toll(self._tpot_s, self._num_output)

    def _num_missing(self, worker: WorkerId) -> int:
        """Tokens of the prompt that are not cached there."""
        num = self._missing.get(worker)
        if num is None:
            num = self._missing[worker] = self._plain.num_missing(self._query, worker)
        return num

    def _prompt(self, worker: WorkerId) -> StepWork:
        """What ``worker`` would have to compute of it. Of most it is the same."""
        num_missing = self._num_missing(worker)
        prompt = self._prompts.get(num_missing)
        if prompt is None:
            prompt = self._prompts[num_missing] = prompt_work(self._query, num_missing)
        return prompt

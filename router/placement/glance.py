"""What workers look like at a glance, and what they would look like otherwise. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from diptych.step_model import StepCost, StepWork
from router.placement.views import DecodeView, PrefillView, Snapshot, WorkerId

V = TypeVar("V", bound=PrefillView | DecodeView)


def tells_prefill(view: PrefillView | DecodeView) -> bool:
    """Whether the steps of its kind are known."""
    engine = view.engine
    return engine is not None and engine.max_batched_tokens > 0 and engine.knows_prefill


def tells_decode(view: DecodeView) -> bool:
    """Whether the steps of its kind are known."""
    return view.engine is not None and view.engine.knows_decode


def taken_alike(views: Sequence[V], kind: Literal["prefill", "decode"]) -> Sequence[V]:
    """Of who does not know its steps of that kind yet, those of whoever knows them best.

    So one that has just come does not make the others unknown, and is not left without the work
    by which it would learn. Those of one pool are likely alike, and where not, it soon tells.
    """
    costs: list[StepCost] = [
        getattr(view.engine.model, kind) for view in views if view.engine is not None
    ]
    known_costs = [cost for cost in costs if cost.is_known]
    if len(known_costs) == len(views) or not known_costs:
        return views
    best = max(known_costs, key=lambda cost: cost.num_steps)

    def known(view: V) -> V:
        if view.engine is None or getattr(view.engine.model, kind).is_known:
            return view
        model = view.engine.model._replace(**{kind: best})
        return replace(view, engine=replace(view.engine, model=model))

    return [known(view) for view in views]


def looks_to_wait_s(view: PrefillView) -> float:
    """About what waits there takes; no more than what orders a large pool."""
    engine = view.engine
    return 0.0 if engine is None else view.num_pending_tokens * engine.model.prefill.prefill_token_s


def looks_apart_s(view: DecodeView) -> float:
    """About the time between tokens there, with what waits there; no more than what orders."""
    engine = view.engine
    if engine is None:
        return 0.0
    return engine.model.decode.decoding_s(view.num_sequences, engine.work.num_context_tokens)


def has_all_room(snapshot: Snapshot) -> bool:
    has_runway = all(view.has_runway for view in snapshot.prefill)
    return has_runway and all(view.has_room for view in snapshot.decode)


def prompt_token_s(view: PrefillView | DecodeView) -> float:
    engine = view.engine
    if engine is None or not engine.knows_prefill:
        return math.inf
    return engine.model.prefill.prefill_token_s


def busy_workers(snapshot: Snapshot) -> set[WorkerId]:
    """Those that have sequences, or prompts to compute."""
    views: tuple[PrefillView | DecodeView, ...] = (*snapshot.prefill, *snapshot.decode)
    busy = {view.worker for view in snapshot.decode if view.num_sequences}
    return busy | {view.worker for view in views if view.num_pending_tokens}


def idle(view: V) -> V:
    """As if it had nothing to do."""
    if view.engine is None:
        return view
    idle = replace(view.engine, work=StepWork(), num_departed_tokens=0, num_computed_tokens=0)
    return replace(view, engine=idle)

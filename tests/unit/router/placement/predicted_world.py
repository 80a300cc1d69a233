"""Workers that say what their steps take, and a policy that goes by it."""

import dataclasses

from diptych.step_model import NUM_KNOWN_STEPS, StepCost, StepModel, StepWork
from router.placement.cache_index import CacheIndex
from router.placement.least_loaded import LeastLoaded
from router.placement.placement import Placement
from router.placement.predicted import Predicted
from router.placement.query import Objectives, Query
from router.placement.views import DecodeView, EngineView, PrefillView, Snapshot, WorkerId

P1, P2, D1, D2 = (WorkerId(f"{name}:1", name) for name in ("p1", "p2", "d1", "d2"))
MODEL = StepModel(
    StepCost(0.04, 0.002, 0.00001, 0.0, 0.0, 1.2, NUM_KNOWN_STEPS),
    StepCost(0.1, 0.002, 0.00001, 0.001, 0.0, 1.2, NUM_KNOWN_STEPS),
)
NO_PREFILL = MODEL._replace(prefill=StepCost())
NO_OBJECTIVES = Objectives()
KEYS = tuple(bytes([i]) * 16 for i in range(62))
QUERY = Query(num_tokens=1000, num_max_tokens=1100, block_keys=KEYS)


def view_p(worker: WorkerId, num_queued: int = 0, model: StepModel = MODEL) -> PrefillView:
    work = StepWork.of_prompt(num_queued, 0)
    return PrefillView(
        worker=worker,
        num_pending_tokens=num_queued,
        max_model_len=4096,
        engine=EngineView(model=model, max_batched_tokens=512, work=work),
    )


def view_d(
    worker: WorkerId, num_rows: int = 0, model: StepModel = NO_PREFILL, **changes: object
) -> DecodeView:
    work = StepWork(num_rows, 500 * num_rows)
    view = DecodeView(
        worker=worker,
        num_sequences=num_rows,
        max_model_len=4096,
        local_prefill=True,
        proven=frozenset({"p1", "p2"}),
        engine=EngineView(model=model, max_batched_tokens=512, work=work),
    )
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]


def made(below: int = 0) -> Predicted:
    plain = LeastLoaded(
        CacheIndex(100), local_below_tokens=below, allow_local=True, allow_recompute=True
    )
    return Predicted(plain, lambda: 0.5)


def place(
    prefills: tuple[PrefillView, ...],
    decodes: tuple[DecodeView, ...],
    objectives: Objectives = NO_OBJECTIVES,
    query: Query = QUERY,
) -> Placement | None:
    asked = query._replace(objectives=objectives)
    return made().place(asked, Snapshot(prefills, decodes))

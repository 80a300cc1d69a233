"""Where nobody is, nothing gets better by waiting: a request is placed at once, or refused."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from diptych.step_model import StepCost, StepModel
from router.placement.placement import Paired
from router.placement.query import Objectives
from router.placement.views import Snapshot
from tests.unit.router.placement.predicted_world import D1, P1, QUERY, made, view_d, view_p

# Steps vary much: of a thousand tokens each 1.0 s, of a hundred each 40 ms, or half as long again.
UNEVEN = StepModel(
    StepCost(0.04, upper_ratio=1.6, num_steps=99),
    StepCost(prefill_token_s=1e-3, upper_ratio=1.6, num_steps=99),
)
ASKED = QUERY._replace(may_refuse=True)
ALONE = Snapshot((), (view_d(D1, 0, UNEVEN),), has_prefill_pool=False)


@given(ttft_s=st.floats(0.3, 3.0), tpot_s=st.floats(0.01, 0.2))
def test_who_is_expected_to_be_in_time_is_placed_and_all_others_are_refused(
    ttft_s: float, tpot_s: float
) -> None:
    """However likely either is missed: it was declined for a while, and refused in the end."""
    policy = made()
    asked = ASKED._replace(objectives=Objectives(ttft_s, tpot_s))
    is_placed = policy.place(asked, ALONE) is not None
    assert is_placed is (ttft_s >= 1.0 and tpot_s >= 0.04)
    assert (policy.foresee(asked, ALONE, 0.0) is not None) is not is_placed


def test_beside_others_it_waits() -> None:
    """They end, and then it is likelier to be in time."""
    policy = made()
    asked = ASKED._replace(objectives=Objectives(1.2, 0.048))
    for busy in (
        dataclasses.replace(ALONE, decode=(view_d(D1, 1, UNEVEN),)),
        dataclasses.replace(ALONE, decode=(view_d(D1, 0, UNEVEN, num_pending_tokens=9),)),
    ):
        assert policy.place(asked, busy) is None
        assert policy.has_declined


def test_of_a_pair_both_are_idle() -> None:
    policy = made()
    asked = ASKED._replace(objectives=Objectives(1.2, 0.048))
    decode = view_d(D1, 0, UNEVEN, local_prefill=False)
    assert isinstance(policy.place(asked, Snapshot((view_p(P1, 0, UNEVEN),), (decode,))), Paired)
    for busy in (
        Snapshot((view_p(P1, 1, UNEVEN),), (decode,)),
        Snapshot((view_p(P1, 0, UNEVEN),), (dataclasses.replace(decode, num_sequences=1),)),
    ):
        assert policy.place(asked, busy) is None

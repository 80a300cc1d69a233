"""Two workers of both roles are asked one after the other, as the router asks them."""

import pytest

from diptych.engine.scheduling.sequence import Sequence
from diptych.simulation.cluster import Split
from diptych.simulation.engine import Listener, SimulatedEngine
from diptych.simulation.router import Wires
from diptych.simulation.simulation import Simulation
from diptych.simulation.workload import Shape
from router.placement.placement import Paired
from router.placement.query import Query
from router.placement.views import Snapshot
from tests.unit.simulation.small import ROUND, setup
from tests.unit.simulation.test_simulation import assert_idle

WORK_S = 0.04  # of the prompt


@pytest.mark.parametrize("message_s", [0.001, 2 * WORK_S], ids=["soon", "after its work"])
@pytest.mark.parametrize("is_lease_first", [True, False], ids=["lease", "reservation"])
def test_the_lesser_incarnation_is_asked_first_and_the_other_once_it_granted(
    is_lease_first: bool, message_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []
    add_prefill, reserve = SimulatedEngine.add_prefill, SimulatedEngine.reserve

    def lease(self: SimulatedEngine, seq: Sequence, listener: Listener) -> None:
        asked.append(("lease", self._agenda.now_s))
        add_prefill(self, seq, listener)

    def reservation(self: SimulatedEngine, seq: Sequence, listener: Listener) -> None:
        asked.append(("reservation", self._agenda.now_s))
        reserve(self, seq, listener)

    monkeypatch.setattr(SimulatedEngine, "add_prefill", lease)
    monkeypatch.setattr(SimulatedEngine, "reserve", reservation)
    made = setup(Split(num_soft=2), model=ROUND)._replace(wires=Wires(message_s=message_s))
    simulation = Simulation(made, iter([Shape(0.0, 20, 5)]))
    one, other = (host.worker for host in simulation.cluster.soft)
    pair = Paired(one, other) if is_lease_first else Paired(other, one)

    def place(query: Query, snapshot: Snapshot) -> Paired:
        return pair

    monkeypatch.setattr(simulation.cluster.routers[0].policy, "place", place)
    done = simulation.run(10.0, 0.0)
    first, second = asked if is_lease_first else reversed(asked)
    assert (first[0], second[0]) == ("lease", "reservation")
    assert [at_s for _, at_s in asked] == pytest.approx([message_s, 3 * message_s])
    assert done.outcomes[0].ttft_s is not None
    assert not done.refusals
    assert_idle(simulation)


@pytest.mark.parametrize("is_lease_first", [True, False], ids=["lease", "reservation"])
def test_those_that_come_together_see_each_other_before_any_worker_answers(
    is_lease_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(setup(Split(num_soft=2), model=ROUND), iter([Shape(0.0, 20, 5)] * 3))
    one, other = (host.worker for host in simulation.cluster.soft)
    pair = Paired(one, other) if is_lease_first else Paired(other, one)
    seen: list[tuple[int, int]] = []

    def place(query: Query, snapshot: Snapshot) -> Paired:
        prefill = {view.worker: view for view in snapshot.prefill}
        decode = {view.worker: view for view in snapshot.decode}
        tokens = prefill[pair.prefill].num_pending_tokens
        seen.append((tokens, decode[pair.decode].num_sequences))
        return pair

    router = simulation.cluster.routers[0]
    monkeypatch.setattr(router.policy, "place", place)
    done = simulation.run(10.0, 0.0)
    assert seen == [(0, 0), (20, 1), (40, 2)]
    assert not done.refusals
    assert router.second_halves.over(router.snapshot()) is router.snapshot(), "none is left"
    assert_idle(simulation)

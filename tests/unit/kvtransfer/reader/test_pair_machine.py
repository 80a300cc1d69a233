"""A pair has a link exactly while it is proven, and each link that it has no more is given back."""

from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.transitions import IllegalTransitionError
from kvtransfer.reader.pair_machine import PAIR_TRANSITIONS, PairEvent, PairMachine, PairState
from kvtransfer.reader.proven_link import Link, ProvenLink

WAYS = {  # by hand: how to get into each state
    PairState.CONNECTING: [],
    PairState.PROVEN: [PairEvent.PROVE],
    PairState.FAILED: [PairEvent.FAIL],
    PairState.REFUSED: [PairEvent.REFUSE],
    PairState.LEFT: [PairEvent.LEAVE],
}


def new_link() -> Link:
    return Link(cast(Any, None), "nixl", cast(Any, None), lambda: None)


def happen(machine: PairMachine, event: PairEvent, link: Link) -> Link | None:
    """Have ``event`` happen, with ``link`` where it comes with one; what comes back."""
    proven, why = ProvenLink(link, 1e9), event.name
    match event:
        case PairEvent.PROVE:
            return machine.prove(proven, why)
        case PairEvent.IMPROVE:
            return machine.improve(proven, why)
        case PairEvent.LOSE:
            return machine.lose(why)
        case PairEvent.FAIL:
            return machine.fail(why)
        case PairEvent.REFUSE:
            machine.refuse(why)
            return None
        case PairEvent.LEAVE:
            return machine.leave(why)


def machine_in(state: PairState) -> PairMachine:
    machine = PairMachine()
    for event in WAYS[state]:
        happen(machine, event, new_link())
    assert machine.state is state
    return machine


@pytest.mark.parametrize("event", PairEvent)
@pytest.mark.parametrize("state", PairState)
def test_each_event_in_each_state_moves_is_ignored_or_raises(
    state: PairState, event: PairEvent
) -> None:
    machine = machine_in(state)
    before, link = (machine.link, machine.message), new_link()
    if PAIR_TRANSITIONS.allows(state, event):
        happen(machine, event, link)
        assert machine.state is PAIR_TRANSITIONS.moves[state][event]
        assert machine.message == event.name
        return
    if event in PAIR_TRANSITIONS.ignored.get(state, ()):
        comes_with_link = event in (PairEvent.PROVE, PairEvent.IMPROVE)
        assert happen(machine, event, link) is (link if comes_with_link else None)
    else:
        with pytest.raises(IllegalTransitionError):
            happen(machine, event, link)
    assert machine.state is state
    assert (machine.link, machine.message) == before


def test_what_is_left_or_refused_stays_so() -> None:
    for state in (PairState.REFUSED, PairState.LEFT):
        reached = set(PAIR_TRANSITIONS.moves.get(state, {}).values())
        assert reached <= {PairState.LEFT}


class Pairing(RuleBasedStateMachine):
    """Any event in any order, beside a list of the links that are out."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = PairMachine()
        self.unused: list[Link] = []
        self.made: list[Link] = []

    @rule(event=st.sampled_from(PairEvent))
    def happens(self, event: PairEvent) -> None:
        comes_with_link = event in (PairEvent.PROVE, PairEvent.IMPROVE)
        state, link = self.pair.state, new_link()
        try:
            unused = happen(self.pair, event, link)
        except IllegalTransitionError:
            assert self.pair.state is state
            return
        if comes_with_link:
            self.made.append(link)
        if unused is not None:
            self.unused.append(unused)

    @rule(rate=st.floats(1, 1e12))
    def pull_is_proven(self, rate: float) -> None:
        before, num_pulls = self.pair.bytes_per_s, self.pair.cost.learned.num_samples
        self.pair.measured(4096, 4096 / rate)
        assert self.pair.cost.learned.num_samples == num_pulls + 1
        low, high = sorted((before, rate))
        assert low <= self.pair.bytes_per_s * (1 + 1e-9)
        assert self.pair.bytes_per_s <= high * (1 + 1e-9)

    @invariant()
    def it_has_a_link_exactly_while_it_is_proven(self) -> None:
        assert (self.pair.link is not None) is (self.pair.state is PairState.PROVEN)

    @invariant()
    def each_link_is_in_use_or_was_given_back_once(self) -> None:
        in_use = [] if self.pair.link is None else [self.pair.link]
        assert sorted(map(id, self.unused + in_use)) == sorted(map(id, self.made))


TestPairing = Pairing.TestCase
TestPairing.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

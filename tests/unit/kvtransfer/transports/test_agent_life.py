"""One process of an agent: each event in each state moves it, is ignored or raises."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.transitions import IllegalTransitionError
from kvtransfer.agents.wire import Kind, Message
from kvtransfer.transports.agent_life import LIFE_TRANSITIONS, AgentLife, LifeEvent, LifeState

WAYS = {  # by hand: how to get into each state
    LifeState.STARTING: [],
    LifeState.SERVING: [LifeEvent.READY],
    LifeState.DRAINING: [LifeEvent.READY, LifeEvent.RETIRE],
    LifeState.ENDED: [LifeEvent.END],
}


def new_life() -> AgentLife:
    """Its process is only told things; the test says what it does."""
    owner = SimpleNamespace(on_ready=lambda *_: None, on_life_end=lambda *_: None)
    thread = SimpleNamespace(later=lambda *_: None)
    process = SimpleNamespace(pid=1, send=lambda _: None, kill=lambda _: None)
    life = AgentLife("nixl", cast(Any, owner), cast(Any, thread))
    life.start(lambda _: cast(Any, process))
    return life


def happen(life: AgentLife, event: LifeEvent) -> None:
    match event:
        case LifeEvent.READY:
            life.on_message(Message(Kind.READY, 4096, b"metadata"))
        case LifeEvent.RETIRE:
            life.retire("replaced")
        case LifeEvent.END:
            life.on_end("signal 11")


@pytest.mark.parametrize("event", LifeEvent)
@pytest.mark.parametrize("state", LifeState)
def test_each_event_in_each_state(state: LifeState, event: LifeEvent) -> None:
    life = new_life()
    for way in WAYS[state]:
        happen(life, way)
    assert life.state is state
    following = state
    if LIFE_TRANSITIONS.allows(state, event):
        following = LIFE_TRANSITIONS.moves[state][event]
        happen(life, event)
    elif event in LIFE_TRANSITIONS.ignored.get(state, ()):
        happen(life, event)
    else:
        with pytest.raises(IllegalTransitionError):
            happen(life, event)
    assert life.state is following

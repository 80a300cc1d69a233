"""The transition tables as docs/protocol.md shows them. ``python -m tests.protocol.tables`` writes.

Each machine is a heading there; between its markers stands its table, made here.
"""

import enum
import re
from pathlib import Path

from decode_worker.held_sequence import HELD_TRANSITIONS, HeldEvent, Phase
from diptych.transitions import Transitions
from kvtransfer.reader.pair_machine import PAIR_TRANSITIONS, PairEvent, PairState
from kvtransfer.reader.pull_machine import PULL_TRANSITIONS, PullEvent, PullState
from kvtransfer.reader.quarantine import READ_TRANSITIONS, ReadEvent, ReadState
from kvtransfer.source.fetch_machine import FETCH_TRANSITIONS, FetchEvent, FetchState
from kvtransfer.source.lease_record import (
    GRANT_TRANSITIONS,
    LEASE_TRANSITIONS,
    GrantEvent,
    GrantState,
    LeaseEvent,
    LeaseState,
)
from kvtransfer.transports.agent_life import LIFE_TRANSITIONS, LifeEvent, LifeState
from prefill_worker.lease_session import SESSION_TRANSITIONS, LeasePhase, SessionEvent
from router.request.decode_reservation import (
    RESERVATION_TRANSITIONS,
    ReservationEvent,
    ReservationState,
)
from router.request.prefill_lease import (
    PREFILL_LEASE_TRANSITIONS,
    PrefillLeaseEvent,
    PrefillLeaseState,
)
from router.request.request_state import REQUEST_TRANSITIONS, RequestEvent, RequestState
from tests.protocol.invariants import Invariant

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(
    states: type[enum.Enum],
    events: type[enum.Enum],
    transitions: Transitions[enum.Enum, enum.Enum],
) -> str:
    """Markdown: a row per state, a column per event."""
    rows = [["", *(event.name for event in events)], ["---"] * (len(events) + 1)]
    for state in states:
        cells = []
        for event in events:
            if transitions.allows(state, event):
                cells.append(transitions.moves[state][event].name)
            else:
                cells.append("ignored" if event in transitions.ignored.get(state, ()) else "")
        rows.append([f"**{state.name}**", *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def sentences() -> str:
    """Markdown: each invariant's name and what it says."""
    rows = "".join(f"| {each.name} | {each.value} |\n" for each in Invariant)
    return "| name | what holds |\n| --- | --- |\n" + rows


def tables() -> dict[str, str]:
    """By the name in the page's markers."""
    return {
        "invariants": sentences(),
        "request": table(RequestState, RequestEvent, REQUEST_TRANSITIONS),  # type: ignore[arg-type]
        "lease": table(PrefillLeaseState, PrefillLeaseEvent, PREFILL_LEASE_TRANSITIONS),  # type: ignore[arg-type]
        "reservation": table(ReservationState, ReservationEvent, RESERVATION_TRANSITIONS),  # type: ignore[arg-type]
        "session": table(LeasePhase, SessionEvent, SESSION_TRANSITIONS),  # type: ignore[arg-type]
        "record": table(LeaseState, LeaseEvent, LEASE_TRANSITIONS),  # type: ignore[arg-type]
        "grant": table(GrantState, GrantEvent, GRANT_TRANSITIONS),  # type: ignore[arg-type]
        "fetch": table(FetchState, FetchEvent, FETCH_TRANSITIONS),  # type: ignore[arg-type]
        "pair": table(PairState, PairEvent, PAIR_TRANSITIONS),  # type: ignore[arg-type]
        "pull": table(PullState, PullEvent, PULL_TRANSITIONS),  # type: ignore[arg-type]
        "read": table(ReadState, ReadEvent, READ_TRANSITIONS),  # type: ignore[arg-type]
        "life": table(LifeState, LifeEvent, LIFE_TRANSITIONS),  # type: ignore[arg-type]
        "entry": table(Phase, HeldEvent, HELD_TRANSITIONS),  # type: ignore[arg-type]
    }


def with_tables(page: str) -> str:
    """The page with every table as the code has it. KeyError: a marker names no machine."""
    made = tables()
    return _MARKED.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", page)


def shown(page: str) -> list[str]:
    """The names in the page's markers."""
    return [found[2] for found in _MARKED.finditer(page)]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

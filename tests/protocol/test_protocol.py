"""The hand-off under every order of messages, losses, duplicates, delays and crashes."""

import pytest
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test

from tests.protocol.machine import IS_LONG, SEARCH, ProtocolMachine, SmallMachine

pytestmark = pytest.mark.timeout(7200 if IS_LONG else 300)


@pytest.mark.parametrize("machine", [ProtocolMachine, SmallMachine])
def test_the_protocol_holds(machine: type[ProtocolMachine], search_seed: int) -> None:
    run_state_machine_as_test(seed(search_seed)(machine), settings=SEARCH)

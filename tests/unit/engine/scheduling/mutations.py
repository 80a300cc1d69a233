"""Whether a state machine notices that what it tests was made wrong."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Patch = Callable[[pytest.MonkeyPatch], None]
"""Makes something wrong until the test is over."""


def noticed(machine: type[RuleBasedStateMachine]) -> AssertionError:
    """What the machine says of the first wrong run that it finds. It fails where there is none."""
    search = settings(
        machine.TestCase.settings,
        max_examples=3000,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises(AssertionError) as found:
        run_state_machine_as_test(machine, settings=search)
    return found.value

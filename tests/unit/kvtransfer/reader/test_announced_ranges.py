"""A range has as many ids and generations as it has blocks, or nothing of it is read."""

import pytest

from diptych.v1 import decode_pb2
from kvtransfer.reader.pull_machine import PullError, PullState
from tests.unit.kvtransfer.reader.test_pull_machine import announcement, machine, opening


@pytest.mark.parametrize("num_more", [-1, 1])
@pytest.mark.parametrize("field", ["block_ids", "generations"])
def test_a_range_that_names_too_few_or_too_many_blocks_is_refused(
    field: str, num_more: int
) -> None:
    pull = machine()
    pull.opened(opening(11))
    announced = announcement(0, 8, last=False)
    named = getattr(announced, field)
    named[:] = [*named, 99][: len(named) + num_more]
    with pytest.raises(PullError, match="2 blocks announced") as caught:
        pull.announced(announced)
    assert caught.value.failure == decode_pb2.PULL_FAILURE_UNPROVEN
    assert pull.state is PullState.FAILED

"""Memory and shares of the products of many rows."""

import pytest

from diptych.engine.backends.cpu.kernels.scratch import Scratch, group_of


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("most", [1, 3, 7, 10])
@pytest.mark.parametrize("num_panels", [1, 5, 18, 64, 1536])
def test_threads_take_panels_alike(num_panels: int, most: int, num_threads: int) -> None:
    num_groups = Scratch(num_threads).num_groups(num_panels, most)
    assert num_groups % num_threads == 0 or num_groups == num_panels
    taken, before = [0] * num_threads, 0
    for group in range(num_groups):
        first, end = group_of(num_panels, num_groups, group)
        assert first == before
        assert first < end <= first + most
        before = end
        taken[taken.index(min(taken))] += end - first  # by the thread that is free first
    assert before == num_panels
    assert max(taken) == -(-num_panels // num_threads)


def test_memory_is_kept_and_only_grows() -> None:
    scratch = Scratch(3)
    scratch.make_room(100, 40)
    assert len(scratch.x) >= 100
    assert len(scratch.panels) >= 3 * 40
    before = scratch.x.data_ptr(), scratch.panels.data_ptr()
    scratch.make_room(60, 30)
    assert (scratch.x.data_ptr(), scratch.panels.data_ptr()) == before
    scratch.make_room(60, 5000)
    assert scratch.x.data_ptr() == before[0]
    assert len(scratch.panels) >= 3 * 5000

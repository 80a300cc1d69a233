"""What is still to be asked for counts as if it had been."""

from dataclasses import replace

from router.placement.placement import Paired
from router.placement.second_halves import SecondHalves
from router.placement.views import Snapshot, WorkerId
from tests.unit.router.placement.predicted_world import D1, MODEL, P1, view_d, view_p

A, B = WorkerId("a:1", "a"), WorkerId("b:1", "b")


def both(worker: WorkerId) -> Snapshot:
    return Snapshot((view_p(worker, 100),), (view_d(worker, 2, MODEL, num_pending_tokens=100),))


def test_a_sequence_and_a_prompt_that_will_follow_are_seen_where_they_go() -> None:
    changes: list[None] = []
    halves = SecondHalves(lambda: changes.append(None), lambda: None)
    told = Snapshot(both(A).prefill + both(B).prefill, both(A).decode + both(B).decode)
    assert halves.over(told) is told
    halves.add("one", Paired(A, B), A, 300)
    halves.add("another", Paired(A, B), A, 300)
    halves.add("third", Paired(A, B), B, 40)
    seen = halves.over(told)
    assert [view.num_sequences for view in seen.decode] == [2, 4]
    assert [view.num_pending_tokens for view in seen.prefill] == [140, 100]
    assert [view.num_pending_tokens for view in seen.decode] == [140, 100]
    for view in (seen.prefill[0], seen.decode[0]):
        assert view.engine is not None
        assert view.engine.num_departed_tokens == 40
    assert seen.prefill[1] == told.prefill[1]
    assert "one" in halves
    for owner in ("one", "another", "third", "third"):
        halves.drop(owner)
    assert "one" not in halves
    assert halves.over(told) is told
    assert len(changes) == 6


def test_one_that_will_not_be_asked_for_leaves_room_and_one_that_is_does_not() -> None:
    told: list[str] = []
    halves = SecondHalves(lambda: told.append("changed"), lambda: told.append("room"))
    halves.add("one", Paired(A, B), A, 300)
    halves.add("another", Paired(A, B), A, 300)
    halves.asked("one")
    assert told == ["changed"] * 3
    for _ in range(2):
        halves.drop("another")
        halves.drop("one")
    assert told == [*["changed"] * 4, "room"]


def test_of_a_worker_that_says_little_as_much_is_seen() -> None:
    halves = SecondHalves(lambda: None, lambda: None)
    halves.add("one", Paired(P1, D1), D1, 40)
    silent = replace(view_p(P1), engine=None)
    (seen,) = halves.over(Snapshot((silent,))).prefill
    assert (seen.num_pending_tokens, seen.engine) == (40, None)

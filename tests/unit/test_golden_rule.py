"""The rule by which answers are compared, and the notes at the end of a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import notes, second_tries
from tests.golden_rule import MARGIN, Run, check_exact, check_exact_later, first_difference

CLEAR, TIED = 1.0, MARGIN / 2


def test_equal_runs_have_no_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert check_exact([1, 2], [1, 2], [CLEAR, TIED], "equal") == []


@pytest.mark.parametrize(
    ("got", "message"),
    [([1, 9, 3], "margin 1"), ([1, 2], "2 tokens, expected 3"), ([1, 2, 3, 4], "4 tokens")],
    ids=["another token", "too short", "too long"],
)
def test_a_difference_fails(got: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_exact(got, [1, 2, 3], [CLEAR] * 3, "wrong")


def test_a_near_tie_alone_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="a near tie at 1: nothing is proven"):
        check_exact([1, 9, 3], [1, 2, 3], [CLEAR, TIED, CLEAR], "tie")


@pytest.mark.parametrize(
    ("got", "message"),
    [([1, 9, 5, 7], "margin 1"), ([1, 9, 5], "1 tokens, expected 2"), ([1, 9], "0 tokens")],
    ids=["another token", "cut short", "ended at the tie"],
)
def test_what_follows_a_near_tie_is_compared(got: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_exact(
            got,
            [1, 2, 3, 4],
            [CLEAR, TIED, CLEAR, CLEAR],
            "tie",
            lambda prefix: Run([5, 6], [1, 1]),
        )


async def test_each_near_tie_is_resumed_from_its_own_place() -> None:
    asked: list[list[int]] = []

    def resume(prefix: Sequence[int]) -> Run:
        asked.append(list(prefix))
        return {2: Run([5, 6, 7], [CLEAR, TIED, CLEAR]), 4: Run([3], [CLEAR])}[len(prefix)]

    async def later(prefix: Sequence[int]) -> Run:
        return resume(prefix)

    want = Run([1, 2, 3, 4, 5], [CLEAR, TIED, CLEAR, CLEAR, CLEAR])
    got = [1, 9, 5, 8, 3]
    assert check_exact(got, want.token_ids, want.margins, "ties", resume) == [1, 3]
    assert asked == [[1, 9], [1, 9, 5, 8]]
    assert await check_exact_later(got, want, "ties", later) == [1, 3]


def test_a_run_in_which_nothing_passed_fails() -> None:
    skipped: dict[str, list[object]] = {"skipped": [object()]}
    assert notes.exit_code(0, skipped, num_collected=1) != 0
    assert notes.exit_code(0, {"passed": [object()]}, num_collected=1) == 0
    assert notes.exit_code(1, {}, num_collected=0) == 1


def test_a_run_in_which_much_was_tried_twice_fails() -> None:
    def code(num_reruns: int, code: int = 0) -> int:
        stats: dict[str, list[object]] = {"passed": [object()], "rerun": [object()] * num_reruns}
        return notes.exit_code(code, stats, num_collected=9)

    assert [code(num) != 0 for num in (0, 1, 2, 3)] == [False, False, False, True]
    assert code(3, code=2) == 2


@pytest.mark.parametrize(
    ("name", "tries_twice"),
    [
        ("integration/test_transfer.py", True),
        ("chaos/test_kill.py", True),
        ("integration/test_golden.py", False),
        ("integration/test_real_text.py", False),
        ("unit/test_docs.py", False),
        ("protocol/test_handoff.py", False),
    ],
)
def test_what_has_no_processes_or_shows_exact_text_has_one_try(
    name: str, tries_twice: bool
) -> None:
    assert second_tries.has_one(Path(second_tries.__file__).parent / name) is tries_twice


def test_a_run_that_failed_by_second_tries_grants_no_more(request: pytest.FixtureRequest) -> None:
    tries, item = second_tries.SecondTries(), request.node
    item.add_marker(pytest.mark.flaky(reruns=0))
    again = pytest.TestReport("a", ("a", 0, "a"), {}, "rerun", None, "call")  # type: ignore[arg-type]
    for _ in range(second_tries.MOST_OF_A_RUN):
        tries.pytest_runtest_logreport(again)
    tries.pytest_runtest_protocol(item)
    assert item.get_closest_marker("flaky") is not None
    tries.pytest_runtest_logreport(again)
    tries.pytest_runtest_protocol(item)
    assert item.get_closest_marker("flaky") is None

"""When are two greedy (or seeded) runs the same?

Token for token, and equally long. Only where the reference itself was closer than
``MARGIN`` to another token may rounding decide either way. What follows such a near tie
is compared too: the reference is asked how it goes on after the other token. Where nobody
can ask it, a near tie that was decided otherwise fails, because nothing is proven.
"""

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import NamedTuple

MARGIN = 2e-3


class Run(NamedTuple):
    """Tokens of the reference and how sure it was of each."""

    token_ids: list[int]
    margins: list[float]  # of each token to the next best, or of the draw to its boundary


# The reference's run after a prompt and these tokens of its answer, the last of them the
# other token of a near tie. Raises AssertionError if that token was not close either.
Resume = Callable[[Sequence[int]], Run]
ResumeLater = Callable[[Sequence[int]], Awaitable[Run]]


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing); None if equal."""
    for index, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return index
    return None if len(got) == len(want) else min(len(got), len(want))


def near_tie(got: Sequence[int], want: Run, what: str) -> int | None:
    """Where the first difference is, if it is a near tie; None if there is no difference.

    Raises AssertionError if one run is the other's beginning, or the margin was clear.
    """
    index = first_difference(got, want.token_ids)
    if index is None:
        return None
    num_got, num_want = len(got), len(want.token_ids)
    assert index < min(num_got, num_want), f"{what}: {num_got} tokens, expected {num_want}"
    assert want.margins[index] < MARGIN, (
        f"{what}: token {index} is {list(got[index : index + 3])}, expected "
        f"{list(want.token_ids[index : index + 3])}, margin {want.margins[index]:.4g}"
    )
    return index


def check_exact(
    got: Sequence[int],
    want: list[int],
    margins: list[float],
    what: str,
    resume: Resume | None = None,
) -> list[int]:
    """Assert the golden rule for one answer; the positions of the near ties decided otherwise.

    Without ``resume`` there may be none.
    """
    checking = _checking(got, Run(want, margins), what)
    try:
        prefix = next(checking)
        while True:
            assert resume is not None, f"{what}: a near tie at {len(prefix) - 1}: nothing is proven"
            prefix = checking.send(resume(prefix))
    except StopIteration as done:
        return list(done.value)


async def check_exact_later(
    got: Sequence[int], want: Run, what: str, resume: ResumeLater
) -> list[int]:
    """The same where the reference is asked over the network."""
    checking = _checking(got, want, what)
    try:
        prefix = next(checking)
        while True:
            prefix = checking.send(await resume(prefix))
    except StopIteration as done:
        return list(done.value)


def _checking(got: Sequence[int], want: Run, what: str) -> Generator[Sequence[int], Run, list[int]]:
    """Yields the answer up to each near tie, and is sent the reference's run from there on."""
    ties: list[int] = []
    begin = 0
    while (index := near_tie(got[begin:], want, f"{what}, from token {begin}")) is not None:
        ties.append(begin + index)
        begin += index + 1
        want = yield got[:begin]
    return ties

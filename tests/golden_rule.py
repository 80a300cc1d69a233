"""When are two greedy (or seeded) runs the same?

Token for token, except that where the reference itself was closer than
``MARGIN`` to another token, rounding may decide either way; from there on the
two texts differ rightly and are not compared.
"""

from collections.abc import Sequence

MARGIN = 2e-3


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing); None if equal."""
    for index, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return index
    return None if len(got) == len(want) else min(len(got), len(want))


def check_exact(
    got: Sequence[int], want: Sequence[int], margins: Sequence[float], what: str
) -> bool:
    """Assert the golden rule for one prompt; True if it needed the exception."""
    index = first_difference(got, want)
    if index is None:
        return False
    assert index < len(margins), f"{what}: lengths differ: {len(got)}, expected {len(want)}"
    assert margins[index] < MARGIN, (
        f"{what}: token {index} is {list(got[index : index + 3])}, "
        f"expected {list(want[index : index + 3])}, margin {margins[index]:.4g}"
    )
    print(f"{what}: near tie at token {index}, margin {margins[index]:.2g}")  # noqa: T201
    return True

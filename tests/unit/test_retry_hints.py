"""How long a refused caller is told to wait is declared once, not wherever one is refused."""

import ast
from pathlib import Path

import pytest

from diptych.errors import RETRY_LATER_S, RETRY_SOON_S
from tests.packages import PACKAGES

ROOT = Path(__file__).parents[2]


def literal_hints(source: str) -> list[int]:
    """Lines where ``retry_after_s``, or a constant of that name, is a number."""
    return [
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword | ast.Assign)
        and any("retry_after_s" in name.lower() for name in names_of(node))
        and isinstance(node.value, ast.Constant)
        and node.value.value is not None
    ]


def names_of(node: ast.keyword | ast.Assign) -> list[str]:
    """What gets the value."""
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_hint_is_a_number_of_its_own(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / package).rglob("*.py"))
        if (lines := literal_hints(path.read_text()))
    }
    assert found == {}


def test_what_frees_itself_is_tried_sooner() -> None:
    assert literal_hints("raise QueueFullError('full', retry_after_s=0.5)") == [1]
    assert literal_hints("_RETRY_AFTER_S = 1.0") == [1]
    assert 0 < RETRY_SOON_S < RETRY_LATER_S

"""How long a refused caller is told to wait is declared once, not wherever one is refused."""

import ast
from pathlib import Path

import pytest

from diptych.errors import RETRY_LATER_S, RETRY_SOON_S

ROOT = Path(__file__).parents[2]
PACKAGES = ("diptych", "router", "prefill_worker", "decode_worker", "kvtransfer")


def literal_hints(source: str) -> list[int]:
    """Lines where ``retry_after_s`` is a number."""
    return [
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword)
        and node.arg == "retry_after_s"
        and isinstance(node.value, ast.Constant)
        and node.value.value is not None
    ]


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
    assert 0 < RETRY_SOON_S < RETRY_LATER_S

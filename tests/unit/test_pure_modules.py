"""A module that calls itself pure asks nobody for the time, waits for nothing, calls nobody."""

import ast
import re
from pathlib import Path

import pytest

from tests.packages import PACKAGES

ROOT = Path(__file__).parents[2]
IMPURE = re.compile(
    r"(asyncio|os|selectors|socket|subprocess|threading|time|grpc\.aio)(\.|$)|.*_pb2_grpc"
)


def says_pure(path: Path) -> bool:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.search(r"\bPure[.,;]|\bPure and\b|: (a )?pure state", docstring) is not None


def imported(source: str) -> set[str]:
    """Every module or part of one that is named in an import, wherever that stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def impure(source: str) -> list[str]:
    return sorted(name for name in imported(source) if IMPURE.match(name))


PURE = [
    path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")) if says_pure(path)
]


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_called_pure_is(path: Path) -> None:
    assert impure(path.read_text()) == []


def test_every_state_machine_calls_itself_pure() -> None:
    with_table = {
        path
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if "Transitions(" in path.read_text() and path.name != "transitions.py"
    }
    assert len(with_table) > 8
    assert with_table - set(PURE) == {ROOT / "kvtransfer/transports/agent_life.py"}, "a process's"


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from time import monotonic",
        "import os.path as p",
        "import grpc.aio",
        "from grpc import aio",
        "from diptych.v1 import prefill_pb2_grpc",
    ],
)
def test_an_impure_import_is_found(source: str) -> None:
    assert impure(source)
    assert not impure("import ostrich, grpc\nfrom timeless import time")

"""A long measurement in pieces: what is in its file is not measured again."""

import json
from pathlib import Path

import pytest

from tests.bench.measured_cells import MeasuredCells

COMMON = {"duration": 30.0, "loads": ("steady",)}


def test_cells_are_there_for_who_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    cells = MeasuredCells(path, COMMON)
    cells.add(("a", "1"), {"goodput": 1.5})
    cells.add(("a", "2"), {"goodput": 2.5})
    again = MeasuredCells(path, COMMON)
    assert ("a", "1") in again
    assert ("b", "1") not in again
    again.add(("b", "1"), {"goodput": 0.5})
    told = json.loads(path.read_text())
    assert [cell["goodput"] for cell in told["cells"]] == [1.5, 2.5, 0.5]
    assert [path] == list(tmp_path.iterdir())


def test_one_that_is_measured_again_takes_the_place_of_the_other(tmp_path: Path) -> None:
    cells = MeasuredCells(tmp_path / "cells.json", COMMON)
    cells.add(("a",), {"goodput": 1.0})
    cells.add(("a",), {"goodput": 2.0})
    assert [cell["goodput"] for cell in cells] == [2.0]


def test_cells_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    MeasuredCells(path, COMMON).add(("a",), {})
    with pytest.raises(ValueError, match="duration=30"):
        MeasuredCells(path, {**COMMON, "duration": 60.0})

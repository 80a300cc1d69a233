"""Cells of a long measurement in one JSON file, so that it can be made in pieces."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


class MeasuredCells:
    """Each cell is written when it is measured; what is there is not measured again.

    Owns the file: it holds what all cells have in common, and the cells, each with its key.
    """

    def __init__(self, path: Path, common: Mapping[str, Any]) -> None:
        """``common``: settings, without which two cells could not be compared.

        Raises ValueError if the file was made with others.
        """
        self._path = path
        self.common = json.loads(json.dumps(common))
        self._cells: dict[tuple[str, ...], Cell] = {}
        if not path.exists():
            return
        told = json.loads(path.read_text())
        for name, value in self.common.items():
            if told["common"].get(name) != value:
                was = told["common"].get(name)
                raise ValueError(f"{path}: measured with {name}={was!r}, not {value!r}")
        self.common = told["common"]
        self._cells = {tuple(cell["key"]): cell for cell in told["cells"]}

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._cells

    def __getitem__(self, key: tuple[str, ...]) -> Cell:
        return self._cells[key]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def add(self, key: tuple[str, ...], cell: Mapping[str, Any]) -> None:
        """One that was measured now; the file is whole at any moment."""
        self._cells[key] = {"key": list(key), **json.loads(json.dumps(cell))}
        common = json.dumps(self.common, indent=1)
        lines = ",\n".join(json.dumps(each) for each in self)
        begun = self._path.with_name(self._path.name + ".part")
        begun.write_text(f'{{"common": {common},\n"cells": [\n{lines}\n]}}\n')
        os.replace(begun, self._path)

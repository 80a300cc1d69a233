"""What is installed says of itself that it is typed."""

import tomllib
from pathlib import Path

from tests.packages import PACKAGES

ROOT = Path(__file__).parents[2]


def test_type_checkers_of_those_who_import_it_read_its_types() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"]["packages"] == list(PACKAGES)  # whole folders
    assert [each for each in PACKAGES if not (ROOT / each / "py.typed").exists()] == []

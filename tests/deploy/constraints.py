"""``make constraints``: which version of each package the image has, those that are installed here.

Every package that the image installs and all that these need, torch by its public version:
which build of it is meant, for CPUs or CUDA, the recipe's index says.
"""

import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.unit.deploy.chart import ROOT

PATH = ROOT / "deploy" / "constraints.txt"
# As the recipe names them; its argument of that name adds more, which are not pinned.
EXTRAS = ("worker", "kubernetes")
_HEAD = "# The versions in the image: `make constraints` writes those of .venv.\n"


def direct_requirements() -> list[Requirement]:
    """What pyproject.toml says that the image needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    return [Requirement(text) for text in texts]


def pinned() -> dict[str, Version]:
    """The file's versions, by the packages' names."""
    lines = [line for line in PATH.read_text().splitlines() if not line.startswith("#")]
    return {name: Version(text) for name, _, text in (line.partition("==") for line in lines)}


def installed() -> dict[str, Version]:
    """The versions here of all that the image needs. Raises PackageNotFoundError."""
    found: dict[str, Version] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    wanted = direct_requirements()
    while wanted:
        requirement = wanted.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key not in seen and _is_meant(requirement, frozenset({""})):
            seen.add(key)
            found[key[0]] = Version(Version(distribution(key[0]).version).public)
            wanted += _needs(requirement)
    return found


def _needs(requirement: Requirement) -> Iterator[Requirement]:
    """What the installed package of that name, with those extras, needs in turn."""
    for text in distribution(requirement.name).requires or []:
        needed = Requirement(text)
        if _is_meant(needed, frozenset({"", *requirement.extras})):
            needed.marker = None
            yield needed


def _is_meant(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether it is asked for on this machine, with one of these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def main() -> None:
    """Write the file."""
    lines = [f"{name}=={version}\n" for name, version in sorted(installed().items())]
    PATH.write_text(_HEAD + "".join(lines))


if __name__ == "__main__":
    main()

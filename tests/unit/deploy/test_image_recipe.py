"""Two builds of the image install the same packages."""

import re

from packaging.utils import canonicalize_name

from tests.deploy.constraints import EXTRAS, PATH, direct_requirements, pinned
from tests.unit.deploy.chart import ROOT

RECIPE = (ROOT / "deploy" / "Containerfile").read_text()


def test_every_package_that_is_asked_for_has_one_version_which_fits() -> None:
    versions = pinned()
    for requirement in direct_requirements():
        version = versions[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, requirement


def test_each_line_pins_one_package() -> None:
    head, *lines = PATH.read_text().splitlines()
    assert head.startswith("#")
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])
    assert len(pinned()) == len(lines) > len(direct_requirements())


def test_nothing_is_installed_without_them() -> None:
    steps = re.sub(r"\\\n", " ", RECIPE)
    installs = re.findall(r"pip install ([^\n&]*)", steps)
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in each for each in installs)
    assert f'".[{",".join(EXTRAS)}${{EXTRAS:+,${{EXTRAS}}}}]"' in installs[-1]
    assert "\nARG EXTRAS=\n" in RECIPE
    name = PATH.relative_to(ROOT)
    assert f"\nCOPY pyproject.toml {name} ./\n" in RECIPE
    assert f"\n!{name}\n" in (ROOT / ".dockerignore").read_text()


def test_the_guide_says_how_to_pin_the_base() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", RECIPE, re.MULTILINE)
    assert f"docker pull {base}\n" in guide
    assert f"--build-arg BASE={base.partition(':')[0]}@sha256:" in guide


def test_the_base_is_a_version_and_can_be_another() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", RECIPE, re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-\w+-\w+(@sha256:[0-9a-f]{64})?$", base)
    assert re.findall(r"^FROM (\S+)", RECIPE, re.MULTILINE) == ["${BASE}", "${BASE}"]

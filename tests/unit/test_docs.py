"""What the documentation names exists: files it links to, settings, metrics, make targets."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_server.config import BatchServerConfig
from diptych import __version__
from diptych.cli.batch import SubmitConfig
from diptych.cli.generate import GenerateConfig
from diptych.cli.health import HealthConfig
from diptych.cli.key import KeyConfig
from diptych.cli.model import ImportConfig
from diptych.cli.trace import TraceConfig
from diptych.cli.up import UpConfig
from diptych.errors import DiptychError
from diptych.models.demo import DEMO_NAME
from diptych.simulation.settings import SimulationConfig
from router.config import RouterConfig
from tests.packages import PACKAGES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (*PACKAGES, "tests", "examples", "proto", "docs", "deploy")
PATHS = [path for folder in FOLDERS for path in [ROOT / folder, *(ROOT / folder).rglob("*")]]


BY_NAME = defaultdict[str, list[Path]](list)
for _path in PATHS:
    BY_NAME[_path.name].append(_path)


def ends_in(named: str) -> list[Path]:
    """The files or folders (ending in a slash) whose path ends so, whole parts only."""
    parts = tuple(named.strip("/").split("/"))
    return [
        path
        for path in BY_NAME[parts[-1]]
        if path.relative_to(ROOT).parts[-len(parts) :] == parts
        and path.is_dir() == named.endswith("/")
    ]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Of its titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_titles_lead_to_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_changelog_has_the_version_and_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[([^]]+)\]", text, re.MULTILINE)[0]
    assert newest in (__version__, "Unreleased")
    assert f"## [{__version__}]" in text
    assert len(text.splitlines()) < 80


def settings_of(config: type[BaseModel], prefix: str = "") -> set[str]:
    """Flags of ``config``, nested ones with dots."""
    flags: set[str] = set()
    for name, field in config.model_fields.items():
        flags.add("--" + prefix + (field.alias or name).replace("_", "-"))
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            flags |= settings_of(kind, f"{prefix}{name.replace('_', '-')}.")
    return flags


# Of programs that are not ours: docker, helm and kubectl; and those that all of ours have.
ELSEWHERE = {
    *("--build", "--build-arg", "--extra-index-url", "--file", "--format", "--rm", "--tag"),
    *("--from-file", "--logs", "--set", "--timeout", "--values", "--wait", "--server-side"),
    *("--reset-then-reuse-values", "--reuse-values", "--field-manager", "--filename", "--validate"),
    *("--config", "--help", "--timers", "--delete-emptydir-data", "--ignore-daemonsets", "--force"),
}


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md", "docs/tenants.md"])
def test_settings_that_are_named_exist(page: str) -> None:
    # The workers' settings are declared without torch, so this stays a unit test.
    from decode_worker.config import DecodeWorkerConfig
    from prefill_worker.config import PrefillWorkerConfig
    from soft_worker.config import SoftWorkerConfig

    known: set[str] = set()
    for config in (
        RouterConfig,
        BatchServerConfig,
        SubmitConfig,
        PrefillWorkerConfig,
        DecodeWorkerConfig,
        SoftWorkerConfig,
        UpConfig,
        GenerateConfig,
        HealthConfig,
        ImportConfig,
        KeyConfig,
        TraceConfig,
        SimulationConfig,
    ):
        known |= settings_of(config)
    known |= {f"--no-{flag.removeprefix('--')}" for flag in known}
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z._-]*[a-z]", text)) - ELSEWHERE
    assert len(named) > 20
    assert named <= known


def defaults_of(config: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Of its flags, nested ones with dots."""
    found: dict[str, object] = {}
    for name, field in config.model_fields.items():
        flag = prefix + name.replace("_", "-")
        found[flag] = field.default
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= defaults_of(field.annotation, f"{flag}.")
    return found


def in_words(default: object) -> str:
    """A default as the README's table has it."""
    if default in (None, []):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (tuple, list)):
        return ", ".join(default)
    if isinstance(default, int) and default % 2**20 == 0:
        return f"{default // 2**20} MiB"
    return f"{default:g}" if isinstance(default, (int, float)) else str(default)


def test_defaults_in_the_readme_are_the_programs() -> None:
    """Of the router, but those that stand there in words of their own."""
    defaults = defaults_of(RouterConfig)
    own_words = {"api-keys": "anybody", "http-metrics": "on; off in the chart"}
    table = (ROOT / "README.md").read_text().partition("## Tune")[2]
    num_compared = 0
    for names, cell in re.findall(r"^\| router \| (.*?) \| (.*?) \|", table, re.MULTILINE):
        flags = re.findall(r"`--([a-z.-]+)`", names)
        told = cell.split(", ") if ", " in cell else [cell] * len(flags)
        for flag, default in zip(flags, told, strict=len(flags) == names.count("`") // 2):
            assert own_words.get(flag, in_words(defaults[flag])) == default, flag
            num_compared += 1
    assert num_compared > 25


def test_models_that_bodies_in_the_docs_name_are_what_the_demo_is_called() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r'"model": "([^"]+)", "messages"', text)) == {DEMO_NAME}


def test_metrics_in_the_docs_are_made_somewhere() -> None:
    code = "".join(
        path.read_text() for package in FOLDERS[:7] for path in (ROOT / package).rglob("*.py")
    )
    for page in PAGES:
        for name in re.findall(r"`(diptych_[a-z_]+|gen_ai_[a-z_]+)`", page.read_text()):
            assert f'"{name.removeprefix("diptych_")}"' in code, name


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE):
            assert target in targets, target


def test_reasons_in_the_docs_are_those_of_the_error_model() -> None:
    reasons = {error.reason for error in DiptychError.__subclasses__()}
    for page in PAGES:
        for reason in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page.read_text()):
            assert reason in reasons, reason


def test_errors_in_the_protos_are_those_of_the_error_model() -> None:
    """``CODE/REASON``, and further reasons of that code after "or" or a comma."""
    kinds: list[type[DiptychError]] = [DiptychError, *DiptychError.__subclasses__()]
    known = {(error.code.name, error.reason) for error in kinds}
    num_named = 0
    for proto in sorted((ROOT / "proto").rglob("*.proto")):
        text = re.sub(r"\n\s*//", "", proto.read_text())
        for code, listed in re.findall(
            r"\b([A-Z_]+)/([A-Z_]+(?:(?:, | or )[A-Z_]+\b(?!/))*)", text
        ):
            for reason in re.split(r", | or ", listed):
                assert (code, reason) in known, f"{proto.name}: {code}/{reason}"
                num_named += 1
    assert num_named >= 20


def test_files_in_the_docs_exist() -> None:
    """A path or the end of one, whole parts only: ``router/app.py``, ``app.py``, ``cpu/``."""
    num_named = 0
    for page in PAGES:
        text = page.read_text()
        for named in re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|proto))(?:::\w+)?`", text):
            assert ends_in(named), f"{page.name}: {named}"
            num_named += 1
        for folder in re.findall(r"`((?:[\w-]+/)+)`", text):
            assert ends_in(folder), f"{page.name}: {folder}"
    assert num_named > 100


def test_tests_in_the_docs_exist() -> None:
    """``test_x.py``, ``test_x.py::test_y`` and, after one of these, ``::test_z``."""
    named_test = re.compile(r"`((?:[\w-]+/)*test_\w+\.py)?(?:::(test_\w+))?")
    num_named = 0
    for page in PAGES:
        for line in page.read_text().splitlines():
            file = ""
            for named, function in named_test.findall(line):
                file = named or file
                if not named and not function:
                    continue
                found = ends_in(file)
                assert len(found) == 1, f"{page.name}: {file or function} is one of {found}"
                assert f"def {function}(" in found[0].read_text() or not function, (
                    f"{file}::{function}"
                )
                num_named += 1
    assert num_named > 50


@pytest.mark.parametrize("wrong", ["wrong/app.py", "pp.py", "router/request/app.py", "outer/"])
def test_a_wrong_folder_is_noticed(wrong: str) -> None:
    assert ends_in("router/app.py") == [ROOT / "router/app.py"]
    assert not ends_in(wrong)


def test_details_in_the_docs_are_those_that_tests_name() -> None:
    """Each row's tests have its number in their names; no row is without one."""
    text = (ROOT / "docs" / "clients.md").read_text()
    table = text.split("<!-- table: details -->")[1].split("<!-- end -->")[0]
    told = set()
    for number, tests in re.findall(r"^\| (\d+) \|.*\| (.*) \|$", table, re.MULTILINE):
        told |= {(int(number), name) for name in re.findall(r"::(test_\w+)", tests)}
    named_test = re.compile(r"def (test_details?_(\d+)(?:_and_(\d+))?_\w+)")
    made = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name, *numbers in named_test.findall(path.read_text()):
            made |= {(int(number), name) for number in numbers if number}
    assert told <= made
    assert {number for number, _ in told} >= set(range(1, 25))


def test_each_decision_has_a_number_of_its_own() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(len(names)))
    for name in names[1:]:
        title = (ROOT / "docs" / "adr" / name).read_text().partition("\n")[0]
        assert title.startswith(f"# {int(name[:4])}. "), name

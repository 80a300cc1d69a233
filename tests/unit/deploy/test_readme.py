"""The README's ways from a clone to an answer: short, and of files and values that there are."""

import re
import shlex

import jsonschema

from diptych import __version__
from tests.unit.deploy.chart import CHART, ROOT, servers, with_defaults
from tests.unit.deploy.test_chart_values import SCHEMA

# To clone, and to enter the clone, where a section takes it for done.
_BEFORE = 2


def commands(title: str) -> list[list[str]]:
    """What the first shell block under a title says, a command each line."""
    text = (ROOT / "README.md").read_text()
    (section,) = re.findall(rf"^###? {title}\n(.*?)(?=^###? )", text, re.MULTILINE | re.DOTALL)
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [shlex.split(line, comments=True) for line in block[1].splitlines() if line.strip()]


def flag(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


def test_an_answer_takes_few_commands() -> None:
    assert len(commands("Start")) + _BEFORE <= 10
    assert len(commands("Install with Helm")) <= 10


def test_what_helm_is_told_is_there() -> None:
    clone, enter, build, push, install, test = commands("Install with Helm")
    assert clone[:2] == ["git", "clone"]
    assert enter == ["cd", clone[2].rpartition("/")[2].removesuffix(".git")]
    assert build[:2] == ["docker", "build"]
    assert (ROOT / flag(build, "file")).exists()
    assert push == ["docker", "push", flag(build, "tag")]
    assert install[:2] == ["helm", "install"]
    assert ROOT / install[3] == CHART
    assert (ROOT / flag(install, "values")).exists()
    name, _, value = flag(install, "set").partition("=")
    assert name == "image.repository"
    assert flag(build, "tag") == f"{value}:{__version__}", "as the chart asks for, if told nothing"
    jsonschema.Draft7Validator(SCHEMA).validate(with_defaults({"image": {"repository": value}}))
    assert test == ["helm", "test", install[2], "--logs"]
    assert "--wait" in install
    minutes = int(flag(install, "timeout").removesuffix("m"))
    for pod in servers():
        probe = pod.container["startupProbe"]
        assert 60 * minutes >= probe["periodSeconds"] * probe["failureThreshold"], pod.where

"""Fixtures of all tests."""

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from diptych.loading import loading
from tests import notes, search_seed, second_tries
from tests.golden import models

# Tests and all that they start share few cores: a thread of torch that has nothing to do sleeps,
# else it spins in place of one that has. Read once, as torch is loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Hundreds of workers are started, and hardly a test asks what is foretold of their steps.
for role in ("PREFILL", "DECODE", "WORKER"):
    os.environ.setdefault(f"DIPTYCH_{role}_STEP_TRIALS_S", "0")

# A busy machine makes no example fail: what an example takes is nowhere bounded.
settings.register_profile("default", deadline=None)
if settings.get_current_profile_name() == "default":  # else it is CI's, which has none either
    settings.load_profile("default")
# ``--hypothesis-profile long``: searches take hours instead of seconds.
LONG = "long"
LONG_S = 7200.0  # a test may take, if it does not say it itself
settings.register_profile(LONG, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-all", action="store_true", help="all golden prompts, not five per model"
    )
    parser.addoption(
        "--chaos-long", action="store_true", help="fault tests with ten times the cases"
    )
    parser.addoption(
        "--chaos-model",
        choices=("tiny", "demo"),
        default="tiny",
        help="model of the fault tests: a random one, whose steps take milliseconds, or SmolLM2",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(second_tries.SecondTries())
    config.pluginmanager.register(search_seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they import stay until the end: no collection has to look at them."""
    with loading():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is longer than ever has the time that it takes."""
    if settings.get_current_profile_name() != LONG:
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests noted, and what was not proven here."""
    stats = terminalreporter.stats
    failed_once = stats.get("rerun", [])
    for report in failed_once:
        terminalreporter.section(f"FAILED ONCE: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
        for title, captured in report.sections:
            terminalreporter.line(f"{title}:")
            terminalreporter.line(captured)
    for title, lines in (
        ("noted", notes.noted([*stats.get("passed", []), *stats.get("failed", [])])),
        ("NEEDED A SECOND TRY", second_tries.first_failures(failed_once)),
        ("NOT PROVEN HERE", notes.not_proven(stats.get("skipped", []))),
    ):
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which nothing passed fails, and one in which much had to be tried twice."""
    if session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        code = notes.exit_code(int(session.exitstatus), reporter.stats, session.testscollected)
        session.exitstatus = code


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> notes.Note:
    """Say something that was measured or counted: it is shown at the end of the run."""
    return lambda text: record_property(notes.PROPERTY, text)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A process that a test runs within its own sets up logging: for that test alone."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped meanwhile is freed at once, or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def chaos_long(request: pytest.FixtureRequest) -> bool:
    """Whether fault tests run in their long form."""
    return bool(request.config.getoption("--chaos-long"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (downloaded once)."""
    return models.smollm2_folder()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The folder of Gemma 3 270M (downloaded once)."""
    return models.gemma3_folder()

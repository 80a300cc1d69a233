"""Each run searches elsewhere, and says how to search there again.

A plugin of pytest, for tests that begin from the fixture ``search_seed``. Each process of a run
has its own; the reports of its tests tell it.
"""

import secrets
from collections.abc import Callable, Iterable

import pytest

_PROPERTY = "search_seed"
_SEED = pytest.StashKey[int]()


def seed_of(given: str | None) -> int:
    """Where searches begin, if this was given for Hypothesis: there, or anywhere."""
    return secrets.randbelow(2**32) if given is None or given == "random" else int(given)


def searched(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each file and seed: also what found nothing can be repeated."""
    begun = {
        (report.nodeid.partition("::")[0], value)
        for report in reports
        for name, value in report.user_properties
        if name == _PROPERTY
    }
    return [f"{file} searched with --hypothesis-seed={seed}" for file, seed in sorted(begun)]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEED] = seed_of(config.getoption("--hypothesis-seed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    for line in searched([*stats.get("passed", []), *stats.get("failed", [])]):
        terminalreporter.write_line(line)


@pytest.fixture
def search_seed(pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> int:
    """Where the searches of this run begin."""
    seed = pytestconfig.stash[_SEED]
    record_property(_PROPERTY, seed)
    return seed

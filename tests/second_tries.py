"""Tests over real processes and real time are tried twice; a run may need that rarely, and says so.

They have deadlines of seconds, and a machine that stands still for that long makes one fail which
proves nothing wrong. A second failure is one, and so is a run in which many need their second try:
once it has failed by that, none has another.
Tests of pure code, of the protocol and of exact text have one try.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

MOST_OF_A_RUN = 2
_ROOT = Path(__file__).parent
_OVER_PROCESSES = (_ROOT / "integration", _ROOT / "chaos")
_OF_EXACT_TEXT = ("test_golden.py", "test_real_text.py", "test_boundaries.py")


def has_one(path: Path) -> bool:
    """Whether tests of this file are tried twice."""
    return path.name not in _OF_EXACT_TEXT and any(
        path.is_relative_to(folder) for folder in _OVER_PROCESSES
    )


class SecondTries:
    """Pytest's hooks that grant second tries, until the run has failed by their number."""

    def __init__(self) -> None:
        self._num_used = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if has_one(item.path):
                item.add_marker(pytest.mark.flaky(reruns=1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome  # one of pytest's own, or the plugin's
        self._num_used += outcome == "rerun"

    @pytest.hookimpl(tryfirst=True)  # before the plugin that tries again asks for the mark
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self._num_used > MOST_OF_A_RUN:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "flaky"]


def first_failures(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each first try that failed: which, and the last line of why."""
    return [
        f"{report.nodeid}: {(report.longreprtext.strip().splitlines() or ['no reason'])[-1]}"
        for report in reports
    ]

"""Tests over real processes and real time are tried twice; a run may need that rarely, and says so.

They have deadlines of seconds, and a machine that stands still for that long makes one fail which
proves nothing wrong. A second failure is one, and so is a run in which many need their second try.
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


def grant(items: Iterable[pytest.Item]) -> None:
    """Let each test that may have one have its second try."""
    for item in items:
        if has_one(item.path):
            item.add_marker(pytest.mark.flaky(reruns=1))


def first_failures(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each first try that failed: which, and the last line of why."""
    return [
        f"{report.nodeid}: {(report.longreprtext.strip().splitlines() or ['no reason'])[-1]}"
        for report in reports
    ]

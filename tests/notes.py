"""What a test measured or counted, and what could not run: shown at the end of every run.

pytest keeps back the output of tests that pass. A figure that nobody sees is worth nothing,
and a run in which something was skipped must not look like one in which all was proven.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest

from tests import second_tries

Note = Callable[[str], None]  # say one line
PROPERTY = "note"


def noted(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each thing that a test said, in the order they ran."""
    return [
        f"{report.nodeid.rpartition('/')[2]}: {text}"
        for report in reports
        for name, text in report.user_properties
        if name == PROPERTY
    ]


def not_proven(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each reason for which tests did not run here, and how many."""
    reasons: Counter[str] = Counter()
    for report in skipped:
        # pytest gives (path, line, "Skipped: reason").
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    return [f"{num} skipped: {reason}" for reason, num in reasons.most_common()]


def exit_code(code: int, stats: Mapping[str, list[object]], num_collected: int) -> int:
    """Of the whole run: one in which tests were chosen and none passed has proven nothing.

    One in which many tests passed only at their second try has proven too little.
    """
    if code != 0:
        return code
    if num_collected > 0 and not stats.get("passed"):
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    too_many = len(stats.get("rerun", [])) > second_tries.MOST_OF_A_RUN
    return int(pytest.ExitCode.TESTS_FAILED) if too_many else code

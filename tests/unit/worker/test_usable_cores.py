"""How many threads a worker takes by default."""

import errno
from pathlib import Path

import pytest

from diptych.worker.cores import confine_to, num_usable_cores


@pytest.mark.parametrize(
    ("cpu_max", "num_cores"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("", 8),
    ],
)
def test_a_container_has_the_cores_of_its_share(
    cpu_max: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert num_usable_cores(tmp_path) == num_cores


@pytest.mark.parametrize(
    ("quota_us", "num_cores"),
    [("-1", 8), ("400000", 4), ("250000", 2), ("50000", 1), ("6400000", 8), ("", 8)],
)
def test_one_of_the_first_version_of_control_groups_too(
    quota_us: str, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_usable_cores(tmp_path) == num_cores


def test_without_a_container_all_cores_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert num_usable_cores(tmp_path) == 8


def test_a_thread_that_ends_meanwhile_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    confined: list[int] = []

    def confine(task: int, cores: frozenset[int]) -> None:
        confined.append(task)
        assert cores == {0, 1}
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr("os.sched_setaffinity", confine, raising=False)
    confine_to("0-1")
    assert confined

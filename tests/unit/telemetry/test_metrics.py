"""Metrics are of one process, whatever the environment says to prometheus_client."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COUNT = """
from prometheus_client import CollectorRegistry, generate_latest
from diptych.telemetry.metrics import Metrics
registry = CollectorRegistry()
Metrics(registry).counter("requests", "Requests.").inc()
print(generate_latest(registry).decode())
"""


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_of_metrics_of_several_processes_is_left_alone(
    tmp_path: Path, is_there: bool
) -> None:
    folder = tmp_path if is_there else tmp_path / "missing"
    told = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "diptych_requests_total 1.0" in told.stdout, told.stderr[-200:]
    assert not list(tmp_path.iterdir())

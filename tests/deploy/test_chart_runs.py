"""The commands of the chart's pods run: they get ready, `helm test`'s passes, they end in time.

With the demo model, which is fetched if it is not in the user's cache.
"""

import time
from collections.abc import Iterator

import pytest

from tests.deploy.local_pods import LocalPods

_READY_S = 180.0

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPods]:
    with LocalPods("default", tmp_path_factory.mktemp("pods")) as cluster:
        deadline = time.monotonic() + _READY_S
        for role, process in cluster.processes.items():
            while not process.passes("readinessProbe"):
                assert process.child.poll() is None, cluster.log(role)
                assert time.monotonic() < deadline, cluster.log(role)
                time.sleep(1)
        yield cluster


def test_all_probes_pass(cluster: LocalPods) -> None:
    for process in cluster.processes.values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert process.passes(probe)


def test_helm_test_passes_each_time(cluster: LocalPods) -> None:
    for _ in range(2):
        done = cluster.test()
        assert done.returncode == 0, done.stderr
        assert "KV pulled" in done.stderr
        assert "no trace was looked for: router, prefill, decode send none" in done.stderr


def test_everything_ends_within_its_grace_period(cluster: LocalPods) -> None:
    """The last: nothing runs after it."""
    assert {role: process.stop() for role, process in cluster.processes.items()} == {
        "router": 0,
        "prefill": 0,
        "decode": 0,
    }

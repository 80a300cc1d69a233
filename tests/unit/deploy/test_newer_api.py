"""What stands between the chart and an older API server changes only what that server lacks."""

from typing import Any

import pytest

from tests.deploy.installed.newer_api import stored, told
from tests.unit.deploy.chart import VALUES, rendered


def without_policy(found: Any) -> Any:
    """The one key that is dropped."""
    if isinstance(found, dict):
        kept = {key: value for key, value in found.items() if key != "unhealthyPodEvictionPolicy"}
        return {key: without_policy(value) for key, value in kept.items()}
    return [without_policy(each) for each in found] if isinstance(found, list) else found


@pytest.mark.parametrize("name", VALUES)
def test_what_is_kept_is_told_again_as_it_was(name: str) -> None:
    for manifest in rendered(name):
        again = told(stored(manifest))
        for probe in _probes(again):
            if not probe["grpc"]["service"]:  # which says the same as none
                del probe["grpc"]["service"]
        assert again == without_policy(manifest)


def _probes(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, list):
        return [probe for each in found for probe in _probes(each)]
    if not isinstance(found, dict):
        return []
    own = [found] if isinstance(found.get("grpc"), dict) else []
    return own + [probe for each in found.values() for probe in _probes(each)]


def test_what_the_older_server_lacks_is_sent_as_what_it_has() -> None:
    for manifest in rendered("cpu"):
        text = str(stored(manifest))
        assert "policy/v1'" not in text
        assert "'grpc': {" not in text
        assert "unhealthyPodEvictionPolicy" not in text


def test_endpoints_have_their_zone_where_the_chart_is_read() -> None:
    older = {
        "apiVersion": "discovery.k8s.io/v1beta1",
        "items": [{"endpoints": [{"topology": {"topology.kubernetes.io/zone": "a"}}]}],
    }
    assert told(older) == {
        "apiVersion": "discovery.k8s.io/v1",
        "items": [{"endpoints": [{"zone": "a"}]}],
    }


def test_the_versions_of_a_group_are_the_newer_one_alone() -> None:
    version = {"groupVersion": "policy/v1beta1", "version": "v1beta1"}
    group = {"name": "policy", "versions": [version], "preferredVersion": version}
    newer = {"groupVersion": "policy/v1", "version": "v1"}
    assert told(group) == {"name": "policy", "versions": [newer], "preferredVersion": newer}

"""What values say stands in the manifests; what they leave unsaid is as the chart has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import HELM_4, template
from tests.unit.deploy.chart import Manifest, parsed


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """The manifests that helm makes with these values."""

    def make(**values: object) -> tuple[Manifest, ...]:
        path = tmp_path / "values.yaml"
        path.write_text(json.dumps(values))
        return parsed(template(HELM_4, [path]))

    return make


def http_rule(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """The one rule of the HTTPRoute."""
    (route,) = [m for m in manifests if m["kind"] == "HTTPRoute"]
    (rule,) = route["spec"]["rules"]
    return dict(rule)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"request": "0s", "backendRequest": "0s"}),
        ({"timeouts": {"request": "1h"}}, {"request": "1h", "backendRequest": "0s"}),
        ({"timeouts": {"backendRequest": None}}, {"request": "0s"}),
        ({"timeouts": None}, None),
    ],
)
def test_no_gateway_ends_an_answer_unless_told_to(made: Any, own: Any, expected: Any) -> None:
    """Envoy would after 15 s, where the route says nothing."""
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}], **own}
    assert http_rule(made(router={"httpRoute": route})).get("timeouts") == expected

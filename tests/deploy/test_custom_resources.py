"""Custom resources fit their published schemas; a key that those have not is found."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy import custom_resources
from tests.deploy.grpc_route import GRPC_ROUTE, errors
from tests.deploy.test_manifests import CUSTOM, tool
from tests.unit.deploy.chart import RENDERED, VALUES, rendered

# Their models are large: they take seconds to import.
pytestmark = pytest.mark.timeout(300)


def check(path: Path) -> tuple[Counter[str], list[str]]:
    """How many of each kind were checked, and what was wrong with them."""
    python = Path(tool("kubernetes-validate")).with_name("python")
    done = subprocess.run(
        [python, custom_resources.__file__, path],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    said = json.loads(done.stdout)
    return Counter(said["kinds"]), said["wrong"]


def test_every_custom_resource_fits_its_schema() -> None:
    kinds, wrong = check(RENDERED / "everything.yaml")
    assert wrong == []
    assert kinds.keys() == custom_resources.MODELS.keys()
    assert kinds["Certificate"] == 3
    others = {m["kind"] for name in VALUES if name != "everything" for m in rendered(name)}
    assert not others & CUSTOM, "they are checked here as well, then"


def test_all_kinds_that_are_not_kubernetes_own_are_checked() -> None:
    assert {*custom_resources.MODELS, "GRPCRoute"} == CUSTOM


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("pollingInterval:", "pollInterval:", "ScaledObject.spec.pollInterval"),
        ("podMetricsEndpoints:", "endpoints:", "PodMonitor"),
        ("renewBefore:", "renewAfter:", "Certificate.spec.renewAfter"),
    ],
)
def test_a_key_that_the_schema_has_not_is_found(
    right: str, wrong: str, named: str, tmp_path: Path
) -> None:
    documents = (RENDERED / "everything.yaml").read_text().split("\n---\n")
    (changed, *_) = [text.replace(right, wrong) for text in documents if right in text]
    (tmp_path / "wrong.yaml").write_text(changed)
    _, found = check(tmp_path / "wrong.yaml")
    assert any(named in each for each in found), found


def grpc_route() -> dict[str, Any]:
    """A copy of the chart's."""
    (route,) = [m for m in rendered("everything") if m["kind"] == "GRPCRoute"]
    return dict(yaml.safe_load(yaml.safe_dump(route)))


def test_a_route_fits_gateway_apis_own_types() -> None:
    assert errors(grpc_route()) == []


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("port", "grpc", "/spec/rules/0/backendRefs/0/port"),
        ("name", 5, "/spec/rules/0/backendRefs/0/name"),
        ("weight", -1, "/spec/rules/0/backendRefs/0/weight"),
    ],
)
def test_those_types_see_a_wrong_backend(key: str, value: object, where: str) -> None:
    route = grpc_route()
    route["spec"]["rules"][0]["backendRefs"][0][key] = value
    assert any(error.startswith(where) for error in errors(route)), errors(route)


def test_a_route_has_no_key_that_gateway_api_has_not() -> None:
    validator = jsonschema.Draft7Validator(GRPC_ROUTE)
    route = grpc_route()
    validator.validate(route)
    route["spec"]["hostname"] = route["spec"].pop("hostnames")
    assert not validator.is_valid(route)

"""Custom resources fit their published schemas; a key that those have not is found."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy import custom_resources
from tests.deploy.gateway_route import ROUTE, errors
from tests.deploy.helm import HELM_4, template
from tests.deploy.test_manifests import CUSTOM, tool
from tests.unit.deploy.chart import RENDERED, VALUES, parsed, rendered

KINDS = ["GRPCRoute", "HTTPRoute"]

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


def route(kind: str) -> dict[str, Any]:
    """The chart's, of a router that speaks both."""
    key = f"router.{kind[:4].lower()}Route"
    said = ("enabled=true", "parentRefs[0].name=gateway", "hostnames={llm.example}")
    manifests = parsed(template(HELM_4, [], *(f"--set={key}.{value}" for value in said)))
    (found,) = [m for m in manifests if m["kind"].endswith("Route")]
    assert found["kind"] == kind
    return dict(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_fits_gateway_apis_own_types(kind: str) -> None:
    assert errors(route(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("port", "grpc", "/spec/rules/0/backendRefs/0/port"),
        ("name", 5, "/spec/rules/0/backendRefs/0/name"),
        ("weight", -1, "/spec/rules/0/backendRefs/0/weight"),
    ],
)
def test_those_types_see_a_wrong_backend(kind: str, key: str, value: object, where: str) -> None:
    wrong = route(kind)
    wrong["spec"]["rules"][0]["backendRefs"][0][key] = value
    assert any(error.startswith(where) for error in errors(wrong)), errors(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_has_no_key_that_gateway_api_has_not(kind: str) -> None:
    validator = jsonschema.Draft7Validator(ROUTE)
    right = route(kind)
    validator.validate(right)
    right["spec"]["hostname"] = right["spec"].pop("hostnames")
    assert not validator.is_valid(right)


def test_each_route_leads_to_the_port_of_what_it_carries() -> None:
    ports = [route(kind)["spec"]["rules"][0]["backendRefs"][0]["port"] for kind in KINDS]
    assert ports == [50051, 8000]


def test_a_route_over_grpc_has_no_timeouts() -> None:
    """The standard channel knows none there."""
    assert ["timeouts" in route(kind)["spec"]["rules"][0] for kind in KINDS] == [False, True]

"""The dashboard is the one that was made, whole, and in the places where Grafana looks for it."""

import json
import re
from itertools import combinations
from typing import Any

import yaml

from tests.unit.deploy.chart import CHART, ROOT, rendered
from tests.unit.deploy.dashboard import PATH, dashboard_text, expressions, metric_names


def panels() -> list[dict[str, Any]]:
    return list(json.loads(PATH.read_text())["panels"])


def test_the_file_is_what_is_made() -> None:
    assert PATH.read_text() == dashboard_text(), "run `make manifests`"


def test_every_expression_asks_for_a_series_of_ours() -> None:
    assert len(expressions()) > 20
    for expr in expressions():
        assert metric_names(expr), expr
        assert expr.count("(") == expr.count(")"), expr


def test_a_namespace_can_be_chosen_and_every_expression_is_of_it() -> None:
    variables = json.loads(PATH.read_text())["templating"]["list"]
    assert [each["name"] for each in variables] == ["source", "namespace"]
    assert variables[1]["allValue"] == ".*", "else nothing is shown where there are none"
    for expr in [target["expr"] for panel in panels() for target in panel.get("targets", ())]:
        scopes = re.findall(r"\b(?:diptych|gen_ai)_[a-z_]+(\{[^}]*\})?", expr)
        assert scopes
        assert set(scopes) == {'{namespace=~"$namespace"}'}, expr


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in panels()]
    assert len({panel["id"] for panel in panels()}) == len(places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
        assert one["x"] + one["w"] <= 24


def test_the_chart_hands_it_to_grafanas_sidecar() -> None:
    (made,) = [
        m
        for m in rendered("everything")
        if m["kind"] == "ConfigMap" and m["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    assert json.loads(made["data"]["diptych.json"]) == json.loads(PATH.read_text())


def test_compose_hands_it_to_grafana() -> None:
    deploy = ROOT / "deploy"
    grafana = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    targets = {target: (deploy / source).resolve() for source, target in mounts.items()}
    provider = yaml.safe_load(
        targets["/etc/grafana/provisioning/dashboards/diptych.yaml"].read_text()
    )["providers"][0]
    assert targets[provider["options"]["path"]] == CHART / "dashboards"

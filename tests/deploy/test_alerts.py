"""The chart's alerts fire when they are to, by Prometheus' own tool."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promtool import NoPromtoolError, promtool
from tests.unit.deploy.chart import rendered

TESTS = Path(__file__).with_name("alert_tests.yaml")


def rules() -> dict[str, Any]:
    """As the Prometheus operator gives them to Prometheus."""
    (manifest,) = [m for m in rendered("everything") if m["kind"] == "PrometheusRule"]
    return dict(manifest["spec"])


def without_summaries() -> dict[str, Any]:
    """A copy; promtool would compare their texts as well."""
    spec = copy.deepcopy(rules())
    for rule in spec["groups"][0]["rules"]:
        del rule["annotations"]
    return spec


@pytest.fixture
def tool() -> Path:
    try:
        return promtool()
    except NoPromtoolError as error:
        pytest.skip(str(error))


def run(tool: Path, folder: Path, spec: dict[str, Any], *command: str) -> tuple[int, str]:
    """promtool in a folder that has these rules and the tests."""
    (folder / "rules.yaml").write_text(json.dumps(spec))
    shutil.copy(TESTS, folder / "tests.yaml")
    done = subprocess.run(
        [tool, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_prometheus_takes_the_rules(tool: Path, tmp_path: Path) -> None:
    code, said = run(tool, tmp_path, rules(), "check", "rules", "rules.yaml")
    assert code == 0, said
    assert f"{len(rules()['groups'][0]['rules'])} rules found" in said


def test_alerts_fire_when_they_are_to_and_not_before(tool: Path, tmp_path: Path) -> None:
    code, said = run(tool, tmp_path, without_summaries(), "test", "rules", "tests.yaml")
    assert code == 0, said


def test_a_rule_that_changed_is_noticed(tool: Path, tmp_path: Path) -> None:
    spec = without_summaries()
    for rule in spec["groups"][0]["rules"]:
        rule["expr"] = rule["expr"].replace("== 0", "== 1")
    code, said = run(tool, tmp_path, spec, "test", "rules", "tests.yaml")
    assert code != 0
    assert "DiptychNoDecodeWorker" in said


def test_every_alert_has_a_case_where_it_fires() -> None:
    cases = [
        case
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fired == quiet == {rule["alert"] for rule in rules()["groups"][0]["rules"]}

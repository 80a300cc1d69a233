"""The chart's alerts fire when they are to, by Prometheus' own tool."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import HELM_4, template
from tests.deploy.promtool import NoPromtoolError, promtool
from tests.unit.deploy.chart import RELEASE, ROOT, VALUES, parsed, pods_of, rendered

TESTS = Path(__file__).with_name("alert_tests.yaml")


def rules() -> dict[str, Any]:
    """As the Prometheus operator gives them to Prometheus."""
    (manifest,) = [m for m in rendered("everything") if m["kind"] == "PrometheusRule"]
    return dict(manifest["spec"])


def expressions(name: str, *values: str, release: str = RELEASE) -> dict[str, str]:
    """By alert, with the values of that name and these."""
    flags = [f"--set={value}" for value in ("metrics.alerts.enabled=true", *values)]
    manifests = parsed(template(HELM_4, VALUES[name], *flags, name=release))
    (manifest,) = [m for m in manifests if m["kind"] == "PrometheusRule"]
    return {rule["alert"]: rule["expr"] for rule in manifest["spec"]["groups"][0]["rules"]}


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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpu", ()),
        ("default", ("prefill.replicas=0",)),
        ("default", ("prefill.pools.main=null", "decode.settings.roles={prefill,decode}")),
    ],
)
def test_nobody_is_told_of_a_prefill_pool_that_is_missing_on_purpose(
    name: str, values: tuple[str, ...]
) -> None:
    alone = {"DiptychNoPrefillWorker", "DiptychNoProvenPair"}
    assert expressions("default").keys() - expressions(name, *values).keys() == alone


@pytest.mark.parametrize(
    ("values", "limit_s"),
    [
        ((), 60),
        (("router.settings.dns.interval_s=20",), 60),
        (("router.settings.dns.interval_s=300",), 600),
        (("router.discovery=kubernetes",), 120),
    ],
)
def test_a_source_is_stale_by_how_often_it_is_asked(values: tuple[str, ...], limit_s: int) -> None:
    expr = expressions("default", *values)["DiptychDiscoveryIsStale"]
    assert expr.startswith("diptych_router_discovery_age_seconds{")
    assert expr.endswith(f"}} > {limit_s}")


def test_no_alert_is_of_another_namespace() -> None:
    for expr in expressions("default").values():
        series = re.findall(r"\bdiptych_[a-z_]+(\{[^}]*\})?", expr)
        assert series
        assert all('namespace="serving"' in labels for labels in series), expr


def pod_names(release: str) -> set[str]:
    """As controllers name the pods that a release serves by."""
    ends = {"Deployment": "5d7f9c4b8-x2z4q", "StatefulSet": "0"}
    groups = [pod.manifest for pod in pods_of(parsed(template(HELM_4, name=release)), "here")]
    serving = [each for each in groups if each["kind"] in ends]
    return {f"{each['metadata']['name']}-{ends[each['kind']]}" for each in serving}


@pytest.mark.parametrize("neighbour", ["other", "try-diptych-router", "try-diptych-decode"])
def test_each_release_of_a_namespace_has_alerts_of_its_own_pods(neighbour: str) -> None:
    pods = {name: pod_names(name) for name in (RELEASE, neighbour)}
    for own in pods:
        for expr in expressions("default", release=own).values():
            for labels in re.findall(r"\bdiptych_[a-z_]+(\{[^}]*\})?", expr):
                (pattern,) = re.findall(r' pod=~"([^"]+)"', labels)
                found = {
                    pod for each in pods.values() for pod in each if re.fullmatch(pattern, pod)
                }
                assert found == pods[own], expr


def test_prometheus_takes_the_compose_files_configuration(tool: Path, tmp_path: Path) -> None:
    config = ROOT / "deploy" / "compose" / "prometheus.yaml"
    code, said = run(tool, tmp_path, rules(), "check", "config", "--syntax-only", str(config))
    assert code == 0, said
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(config.read_text().replace("static_configs", "static"))
    assert run(tool, tmp_path, rules(), "check", "config", "--syntax-only", str(wrong))[0] != 0

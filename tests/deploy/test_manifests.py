"""What helm renders is what Kubernetes takes, and what a security check has no question about."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.helm import HELM_3, HELM_4, helm_binary, template
from tests.unit.deploy.chart import (
    ALL_VALUES,
    CHART,
    RENDERED,
    ROOT,
    VALUES,
    parsed,
    pods_of,
    rendered,
)

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
# Their schemas are not Kubernetes'.
CUSTOM = {"PodMonitor", "PrometheusRule", "GRPCRoute", "Certificate", "ScaledObject"}
DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    """The program; `make chart` puts it on the PATH."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not on the PATH: run `make chart`"
    return found


def validate(path: Path, version: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("kubernetes-validate"), "--strict", "--kubernetes-version", version, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL_VALUES)
def test_kubernetes_takes_every_manifest(name: str, version: str) -> None:
    path = RENDERED / f"{name}.yaml"
    done = validate(path, version)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    of_kubernetes = [m for m in parsed(path.read_text()) if m["kind"] not in CUSTOM]
    assert said.count("passed for resource") == len(of_kubernetes), said


def test_the_validator_sees_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    text = (RENDERED / "default.yaml").read_text()
    path.write_text(text.replace("podManagementPolicy:", "podManagement:"))
    assert validate(path, VERSIONS[-1]).returncode != 0


def test_an_image_as_a_volume_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "image.yaml"
    path.write_text(template(HELM_4, [], "--set=model.image.reference=registry.example/a:1"))
    done = validate(path, VERSIONS[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def test_devices_by_claims_are_taken(tmp_path: Path) -> None:
    values, path = tmp_path / "values.yaml", tmp_path / "claims.yaml"
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    pool = {"resourceClaims": [claim], "resources": {"claims": [{"name": "gpu"}]}}
    values.write_text(json.dumps({"prefill": {"shmSize": "64000k"}, "decode": pool}))
    path.write_text(template(HELM_4, [values]))
    done = validate(path, VERSIONS[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    (pod,) = [pod for pod in pods_of(parsed(path.read_text()), "") if pod.command == "decode"]
    assert pod.spec["resourceClaims"] == [claim]
    assert pod.container["resources"]["claims"] == [{"name": "gpu"}]
    assert pod.container["resources"]["limits"], "beside the others"


@pytest.mark.parametrize("name", VALUES)
def test_checkov_finds_nothing_that_is_not_explained(name: str) -> None:
    files = [part for path in VALUES[name] for part in ("--var-file", str(path))]
    path = f"{helm_binary(HELM_3).parent}:{Path(tool('checkov')).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [
            *(tool("checkov"), "--directory", str(CHART), "--framework", "helm", "--quiet"),
            *("--config-file", str(DEPLOY / "checkov.yaml"), "--output", "json"),
            *files,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={"PATH": path, "HOME": str(ROOT / ".cache")},
    )
    report = json.loads(done.stdout)
    failed = [f"{c['check_id']} {c['resource']}" for c in report["results"]["failed_checks"]]
    assert failed == []
    assert report["summary"]["passed"] > 200
    assert report["summary"]["resource_count"] >= len(rendered(name)), "it read these values"


def test_hadolint_has_nothing_to_say_of_the_image() -> None:
    done = subprocess.run(
        [tool("hadolint"), str(DEPLOY / "Containerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout

